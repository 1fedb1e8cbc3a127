"""The shapes that calibration compares."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from exspec.actors.engine.config import EngineConfig, KernelsName, Method
from exspec.actors.engine.drafters.lookup import available, drafter_class, label
from exspec.actors.engine.drafters.registry import NONE
from exspec.actors.engine.shape.plan import Models

FREE = ("method", "drafter", "batch_size", "window", "draft_tokens", "draft_from", "bucket", "kernels", "prefill")
# Values of B to try, the likeliest first.
ROWS = {"cuda": (8, 16, 32, 64, 128, 256, 4, 2, 1), "cpu": (16, 32, 8, 64, 4, 2, 1)}
# Kernels to time first. On a CPU the faster ones also decide how the products of compiled kernels are computed.
TRIED: dict[str, tuple[KernelsName, ...]] = {"cuda": ("eager",), "cpu": ("eager", "packed")}
TO_COMPILED: dict[KernelsName, KernelsName] = {"eager": "compiled", "packed": "compiled_packed"}
UNCOMPILED = {compiled: name for name, compiled in TO_COMPILED.items()}
PREFILLS = {"cuda": ((1, 128), (4, 128), (16, 128)), "cpu": ((4, 32), (8, 32), (16, 32), (1, 128))}  # rows and columns
BUCKETS = (128, 256, 512, 1024)
DRAFT_FROM = (256, 512, 1024, 2048, 4096, 8192)  # tokens of a row from which drafts may begin to pay
USUAL = 5  # the K with which B is chosen

DrafterChoice = dict[str, Any]  # a drafter's name and its own settings


def device_kind(models: Models) -> str:
    """The device's key in the tables of this file."""
    return "cuda" if models.target.device.type == "cuda" else "cpu"


def drafter_choices(models: Models, config: EngineConfig, free: Sequence[str], longest: int) -> list[DrafterChoice]:
    """The drafters to compare, with their settings: the config's drafter, or all available ones with the config's
    first. Empty if the config asks for plain decoding. longest: tokens of the longest request.

    Raises ValueError if the config asks for drafts and no drafter is available.
    """
    if not config.drafts and "method" not in free:
        return []
    target = models.target
    names = available(target.config, models.draft_config, config)
    if "drafter" not in free:
        names = [name for name in names if name == config.drafter]
    names.sort(key=lambda name: name != config.drafter)
    variants = {name: drafter_class(name).variants(target.config, config, longest) for name in names}
    if "drafter" not in free:
        variants = {name: own or [{}] for name, own in variants.items()}  # it is tried in any case
    choices = [{"drafter": name, **own} for name, several in variants.items() for own in several]
    reasons = [drafter_class(c["drafter"]).trial(target, config.drafting(c)) for c in choices]
    working = [choice for choice, reason in zip(choices, reasons, strict=True) if reason is None]
    if not working and "method" not in free:
        reason = f" ({reasons[0]})" if reasons else ""
        raise ValueError(
            f"calibration: no drafter is available for method {config.method}{reason}; expected one, or method plain"
        )
    return working


def probe_shape(models: Models, config: EngineConfig, choice: DrafterChoice, free: Sequence[str]) -> EngineConfig:
    """The shape in which a drafter is probed."""
    drafter = drafter_class(choice["drafter"])
    longest = min(drafter.probed_with, max(drafter.lengths_with(models.draft_config)))
    drafted = longest if "draft_tokens" in free or not config.drafts else config.draft_tokens
    if config.exact:
        drafted = max(min(drafted, config.bucket - 1), 1)
    method = config.method if config.drafts else "exspec"
    shape = replace(config.drafting(choice), method=method, draft_tokens=drafted)
    return replace(shape, draft_length="fixed", columns=None, draft_from=0)  # all rounds draft


def candidates(
    models: Models, config: EngineConfig, choices: list[DrafterChoice], free: Sequence[str]
) -> Iterator[EngineConfig]:
    """Shapes that differ from `config` in the free settings, the likeliest first."""

    def options(name: str, values: Sequence[Any]) -> Sequence[Any]:
        return values if name in free else (getattr(config, name),)

    widths = (*BUCKETS, config.capacity) if config.attention == "gathered" else (config.capacity,)
    buckets = options("bucket", sorted({min(b, config.capacity) for b in widths}))
    speculating: Method = config.method if config.drafts else "exspec"
    plain = {"method": "plain", "drafter": NONE, "draft_tokens": config.draft_tokens or 1}
    methods: list[dict[str, Any]] = [plain] if "method" in free or not choices else []
    for choice in choices:
        lengths = options("draft_tokens", drafter_class(choice["drafter"]).lengths_with(models.draft_config))
        methods += [{"method": speculating, **choice, "draft_tokens": k} for k in lengths]
    for rows in options("batch_size", ROWS[device_kind(models)]):
        if "window" not in free and rows > config.window:
            continue
        for bucket in buckets:
            window = (config.devices + 2) * rows  # if it is more than the rounds need, fewer slots are made
            windows = options("window", (window,))
            for method in methods:
                with suppress(ValueError):  # a bucket narrower than a verify forward, for example
                    yield replace(config.drafting(method), batch_size=rows, window=windows[0], bucket=bucket)


def coarse(shapes: list[EngineConfig]) -> list[EngineConfig]:
    """The shapes with which B is chosen: with the middle bucket and, for each drafter, the usual K."""
    buckets = sorted({s.bucket for s in shapes})
    middle = [s for s in shapes if s.bucket == buckets[len(buckets) // 2]]

    def usual(shape: EngineConfig) -> int:
        lengths = {s.drafted for s in middle if label(s) == label(shape)}
        return min(lengths, key=lambda k: abs(k - USUAL))

    return [s for s in middle if s.drafted == usual(s)]


def prefill_shapes(models: Models, config: EngineConfig) -> list[EngineConfig]:
    """The config with each prefill shape of its device that its pages allow."""
    shapes = []
    for rows, columns in PREFILLS[device_kind(models)]:
        with suppress(ValueError):
            shapes.append(replace(config, prefill_rows=rows, prefill_columns=columns))
    return shapes
