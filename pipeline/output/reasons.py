"""Why rows have an error, counted by reason, each with a few rows to look at."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

NAMED = 3  # rows named for each reason
MOST = 200  # reasons told apart
OTHER = "other reasons"
VARYING = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


@dataclass
class Reason:
    """text: the error of the first such row. ids: of a few rows. lasting: the row itself is at fault, and no second try
    would help."""

    text: str
    rows: int = 0
    ids: list[str] = field(default_factory=list)
    lasting: bool = False

    @property
    def named(self) -> str:
        return ", ".join([*self.ids, *(["..."] if self.rows > len(self.ids) else [])])


class Reasons:
    """Errors that differ in numbers and quoted values alone have one reason."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, bool], Reason] = {}

    def add(self, text: str, rows: int, ids: Iterable[str], lasting: bool) -> None:
        key = VARYING.sub("#", text), lasting
        if key not in self.found and len(self.found) >= MOST:
            text, key = OTHER, (OTHER, lasting)
        reason = self.found.setdefault(key, Reason(text, lasting=lasting))
        reason.rows += rows
        reason.ids = [*reason.ids, *ids][:NAMED]

    def merge(self, told: Iterable[dict[str, Any]]) -> None:
        """Add what `to_json` has told of others."""
        for reason in told:
            self.add(**reason)

    @property
    def most_first(self) -> list[Reason]:
        return sorted(self.found.values(), key=lambda reason: -reason.rows)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(reason) for reason in self.most_first]

    def lines(self) -> list[str]:
        """A line for each reason, the most frequent first."""
        return [f"{r.rows} {'row' if r.rows == 1 else 'rows'}: {r.text} ({r.named})" for r in self.most_first]
