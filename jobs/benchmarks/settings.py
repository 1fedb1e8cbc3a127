"""The settings of `exspec bench` and `exspec synthetic`. A field's name is its flag's name."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from exspec.actors.engine.config import KERNELS, METHODS, SETTINGS, KernelsName
from exspec.actors.engine.drafters.registry import DRAFTERS, NONE
from exspec.actors.engine.settings import numbers, setting, settings_of
from exspec.jobs.benchmarks.shapes import pair_names

RIVALS = ("generate", "assisted")
VARIANT = re.compile(r"(eqspec|exspec)(?:@(\w+))?(?:\+(explicit|implicit|both))?(?::(\d+))?")
# The engine's settings that are flags of `bench`. The others follow from the methods and the prompts.
SHAPE = tuple(name for name in SETTINGS if name not in ("method", "drafter", "capacity"))
DEVICE_HELP = "cpu, cuda or cuda:N."


@dataclass(frozen=True)
class BenchSettings:
    """shape: settings of the engine, by name."""

    target: str | None = setting(None, "Hub id or folder. Default: the demo pair.")
    draft: tuple[str, ...] = setting(
        (),
        "Hub id or folder of a draft model or head. Each drafter takes the first draft that it can use. auto uses one "
        "of the drafts: that of --drafter, or the first.",
    )
    prompts: Path | None = setting(None, "Parquet or JSONL file. Default: demo messages.")
    prompt_column: str = setting("prompt", "Column of the prompts; `turns[0]` takes the first item of a list.")
    limit: int = setting(48, "Prompts to decode.", ge=1)
    max_new_tokens: int = setting(64, "Tokens of a completion, at most.", ge=1)
    methods: str = setting(
        "plain,eqspec,exspec,auto,generate,assisted",
        "Comma-separated. exspec@suffix+both:3 names the drafter, the draft length and K.",
    )
    drafter: str = setting("auto", f"Drafter of methods that name none: {', '.join(DRAFTERS)} or auto.")
    kernels: str = setting("auto", f"What runs the layers: {', '.join(KERNELS)}, or auto: the fastest here.")
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "Dtype of weights and KV.")
    device: str = setting("cpu", DEVICE_HELP)
    threads: int | None = setting(None, "CPU threads. Default: one per core.", ge=1)
    repeats: int = setting(3, "Timed runs of every method, in turns.", ge=1)
    tune_seconds: float = setting(120.0, "Longest time to choose the kernels, and again the shape of auto.", ge=0.1)
    shape: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_device_name(self.device)
        if self.drafter not in ("auto", *DRAFTERS):
            raise ValueError(f"--drafter: expected one of auto, {', '.join(DRAFTERS)}, not {self.drafter!r}")
        if self.kernels not in ("auto", *KERNELS):
            raise ValueError(f"--kernels: expected one of auto, {', '.join(KERNELS)}, not {self.kernels!r}")
        for method in self.names:
            variant = VARIANT.fullmatch(method)
            drafter = variant and (variant[2] or self.drafter)
            if drafter and drafter not in ("auto", *DRAFTERS):
                raise ValueError(f"--methods: {method}: expected a drafter of {', '.join(DRAFTERS)}, not {drafter!r}")
            if drafter == NONE:
                raise ValueError(f"--methods: {method} needs a drafter; without one name plain")
            if method not in (*METHODS, *RIVALS, "auto") and not variant:
                raise ValueError(
                    f"--methods: {method!r} is unknown, expected some of {', '.join((*METHODS, 'auto', *RIVALS))}; "
                    "exspec also with a drafter, as exspec@suffix, as exspec+explicit, +implicit or +both, and with a "
                    "K of its own as exspec:3"
                )
        if self.target is None and self.draft:
            raise ValueError("--draft: expected --target too, or neither (the demo pair)")
        if self.target is not None and not self.draft and "assisted" in self.names:
            raise ValueError("--methods: assisted needs --draft; name the others")

    @property
    def names(self) -> tuple[str, ...]:
        """The methods."""
        return tuple(self.methods.split(","))


@dataclass(frozen=True)
class SyntheticSettings:
    """Runs come in the order of batch_sizes, draft_tokens and acceptances. Put what matters most first: the time
    may run out.

    shapes: (B, K) of the stages before `speed`. rivals: methods of transformers; the first is timed after the first K,
    the others at the end. rival_batch_sizes: B of the rivals. prefills: (rows, columns) of the prefill forwards that
    are timed; decoding uses the first.
    """

    pair: str = "Qwen/Qwen3-8B:Qwen/Qwen3-0.6B"
    device: str = setting("cuda", DEVICE_HELP)
    seconds: float = setting(490.0, "Time for all stages together.", ge=1)
    batch_sizes: str = setting("8,64,1,32,256,16,4,128,2", "Every B to time.")
    draft_tokens: str = setting("5,3,8", "Every K to time.")
    acceptances: str = setting("0.8,0.6", "Chances that a drafted token is right.")
    limit: int = setting(512, "Prompts, at most.", ge=1)
    max_new_tokens: int = setting(64, "Tokens of a completion.", ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = setting("bfloat16", "Dtype of weights and KV.")
    prompt_tokens: int = 200
    shapes: tuple[tuple[int, int], ...] = ((8, 5), (64, 5))
    rivals: tuple[str, ...] = ("generate", "continuous batching")
    rival_batch_sizes: tuple[int, ...] = (8, 64)
    prefills: tuple[tuple[int, int], ...] = ((4, 128), (1, 128), (16, 128), (4, 32), (1, 512))
    kernels: tuple[KernelsName, ...] = ("eager", "compiled")

    def __post_init__(self) -> None:
        for name, known in settings_of(SyntheticSettings).items():
            known.check(getattr(self, name))
        check_device_name(self.device)
        pair_names(self.pair)
        for name, kind in (("batch_sizes", int), ("draft_tokens", int), ("acceptances", float)):
            self.numbers(name, kind)

    def numbers(self, name: str, kind: type = int) -> tuple[Any, ...]:
        """A setting that is a list of numbers."""
        return numbers(name, getattr(self, name), kind)


def check_device_name(device: str) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device: expected cpu, cuda or cuda:N, not {device!r}")
