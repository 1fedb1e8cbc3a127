"""The settings of early exit."""

from dataclasses import dataclass

from exspec.actors.engine.settings import setting


@dataclass(frozen=True)
class EarlyExitSettings:
    """At which layers early exit drafts and checks, and how many tokens."""

    exit_depth: int | None = setting(
        None, "Layers after which early_exit drafts. Default: an eighth, or what is measured.", "any if exact", ge=1
    )
    check_depth: int | None = setting(
        None, "Layers after which early_exit checks. Default: a quarter, or what is measured.", "any if exact", ge=1
    )
    exit_tokens: int | None = setting(
        None,
        "Tokens that early_exit drafts before it checks them. Default: 2, or what is measured.",
        "any if exact",
        ge=1,
    )
