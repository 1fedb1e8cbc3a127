"""What `exspec bench` is told: settings of its own, and those of the engine."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from exspec.actors.engine.config import KERNELS, METHODS, SETTINGS
from exspec.actors.engine.drafters import DRAFTERS, NONE
from exspec.actors.engine.settings import setting

RIVALS = ("generate", "assisted")
VARIANT = re.compile(r"(eqspec|exspec)(?:@(\w+))?(?:\+(explicit|implicit|both))?(?::(\d+))?")
# The engine's settings that are flags here: methods say the others, or the prompts.
SHAPE = tuple(name for name in SETTINGS if name not in ("method", "drafter", "capacity"))


@dataclass(frozen=True)
class BenchSettings:
    """The names are the flags'. shape: settings of the engine, by name."""

    target: str | None = setting(None, "Hub id or folder. Default: the demo pair.")
    draft: tuple[str, ...] = setting(
        (),
        "Hub id or folder of the draft: a model, or a head for the target. May be given again: a drafter takes the "
        "first that it can use; auto compares what one draft allows, that of --drafter or the first.",
    )
    prompts: Path | None = setting(None, "Parquet or JSONL file. Default: demo messages.")
    prompt_column: str = setting("prompt", "Column of the prompts; `turns[0]` takes a list's item.")
    limit: int = setting(48, "Prompts to decode.", ge=1)
    max_new_tokens: int = setting(64, "Tokens of a completion, at most.", ge=1)
    methods: str = setting(
        "plain,eqspec,exspec,auto,generate,assisted",
        f"Comma-separated: {', '.join(METHODS)}, auto, generate, assisted; exspec@suffix+both:3 has a drafter, a "
        "policy and a K.",
    )
    drafter: str = setting("auto", f"Who drafts where a method does not say: {', '.join(DRAFTERS)} or auto.")
    kernels: str = setting("auto", f"What runs the layers: {', '.join(KERNELS)}, or auto for what is fastest here.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Dtype of weights and KV.")
    device: str = setting("cpu", "cpu, cuda or cuda:N.")
    threads: int | None = setting(None, "CPU threads. Default: one per core.", ge=1)
    repeats: int = setting(3, "Timed runs of every method, in turn.", ge=1)
    tune_seconds: float = setting(20.0, "Seconds of the calibration of auto.", ge=0.1)
    shape: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"--device: expected cpu, cuda or cuda:N, not {self.device!r}")
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
        """Of the methods."""
        return tuple(self.methods.split(","))
