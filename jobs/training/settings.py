"""The settings of `exspec train` and `exspec scale`. A field's name is its flag's name."""

from dataclasses import dataclass
from typing import Literal

from exspec.actors.engine.settings import numbers, setting, settings_of


@dataclass(frozen=True)
class TrainSettings:
    """What to train, on what, and for how long."""

    drafter: Literal["model", "eagle3", "clover", "dflash"] = setting("dflash", "What to train.")
    rows: int = setting(20_000, "Rows to read, approximately. A tenth is held out.", ge=1)
    minutes: float = setting(30.0, "Minutes of training, at most.", ge=0.001)
    steps: int = setting(1_000_000, "Steps of training, at most.", ge=1)
    draft: str | None = setting(None, "Draft or head to train further. Default: a new one.")
    layers: int | None = setting(None, "Layers of a new draft model or head of DFlash.", ge=1)
    draft_tokens: int | None = setting(None, "Tokens of a draft, K. Default: by drafter.", ge=1)
    workers: int = setting(1, "Processes that train together, each on a GPU if there are any.", ge=1)
    cache_gib: float = setting(8.0, "GiB of hidden states to keep on disk for the next epochs.", ge=0)
    regenerate: bool = setting(False, "OUTPUT is an input: let the target answer it first.")
    target: str | None = setting(None, "With --regenerate: the target model. Default: the demo's.")
    max_new_tokens: int | None = setting(None, "With --regenerate: tokens of an answer, at most. Default: 256.", ge=1)
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model or the job.")
    allow_pickle: bool = setting(False, "Load weights that are not safetensors.")


SCALED = ("model", "dflash")  # drafters that may have several layers


@dataclass(frozen=True)
class ScaleSettings:
    """The grid of drafters to train and to time, and the job to choose for."""

    drafters: str = setting("model", f"What to train: {', '.join(SCALED)}, or both, comma-separated.")
    layers: str = setting("1,2,4", "Layers of the drafters.")
    tokens: str = setting("30000,100000,300000,1000000", "Training tokens of the drafters, every epoch counted.")
    batch_sizes: str = setting("1,4,16,64", "Every B to time.")
    draft_tokens: int | None = setting(None, "Tokens of a draft, K. Default: by drafter.", ge=1)
    rows: int = setting(20_000, "Rows to read, approximately. A tenth is held out.", ge=1)
    job_rows: int | None = setting(None, "Rows of the job to choose for. Default: those of the job in OUTPUT.", ge=1)
    seconds: float = setting(2.0, "Seconds to time each drafter, B and K.", ge=0.01)
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model or the job.")
    allow_pickle: bool = setting(False, "Load weights that are not safetensors.")

    def __post_init__(self) -> None:
        for name, known in settings_of(ScaleSettings).items():
            known.check(getattr(self, name))
        if strange := [name for name in self.kinds if name not in SCALED]:
            raise ValueError(f"--drafters: expected some of {', '.join(SCALED)}, not {strange[0]!r}")
        for name in ("layers", "tokens", "batch_sizes"):
            self.numbers(name)
        layers, tokens = len(self.numbers("layers")), len(self.numbers("tokens"))
        if tokens < 2 or layers * tokens < 4:
            raise ValueError(
                "--layers and --tokens: expected at least two numbers of tokens and four drafters; the law has three "
                "constants"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of drafters."""
        return tuple(dict.fromkeys(self.drafters.split(",")))

    def numbers(self, name: str) -> tuple[int, ...]:
        """A setting that is a list of positive numbers."""
        found: tuple[int, ...] = numbers(name, getattr(self, name))
        if min(found) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected positive numbers, not {getattr(self, name)!r}")
        return tuple(dict.fromkeys(found))
