"""The settings of `exspec train`. A field's name is its flag's name."""

from dataclasses import dataclass
from typing import Literal

from exspec.actors.engine.settings import setting


@dataclass(frozen=True)
class TrainSettings:
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
