"""The settings of drafters that read KV."""

from dataclasses import dataclass

from exspec.actors.engine.settings import setting


@dataclass(frozen=True)
class WindowSettings:
    """How much KV a drafter reads."""

    draft_window: int | None = setting(
        None,
        "Last tokens whose KV a drafter reads, in addition to the first page. Default: what is measured; else sparse "
        "reads a twentieth of the capacity, at least 256, and others read all.",
        "any if exact",
        ge=1,
    )
    draft_chosen: int | None = setting(
        None,
        "Tokens whose KV sparse reads in addition, in the pages that weighed most in the last verify. Default: what is "
        "measured, or none.",
        "any if exact",
        ge=1,
    )
