"""Row errors, counted by reason, with a few row ids each."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from exspec.pipeline.errors import counted

NAMED = 3  # row ids per reason
MOST = 200  # distinct reasons
OTHER = "other reasons"
VARYING = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


@dataclass
class Reason:
    """text: the error of the first row. ids: of a few rows. lasting: the error is in the row itself, so that a retry
    would not help."""

    text: str
    rows: int = 0
    ids: list[str] = field(default_factory=list)
    lasting: bool = False

    @property
    def named(self) -> str:
        """The rows. Only the first one surely has this text: those of the others may have other numbers or values."""
        ids = [*self.ids, *(["..."] if self.rows > len(self.ids) else [])]
        between = "; similar: " if VARYING.search(self.text) else ", "
        return between.join(filter(None, [*ids[:1], ", ".join(ids[1:])]))


class Reasons:
    """Errors that differ only in numbers and quoted values count as one reason."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, bool], Reason] = {}

    def add(self, text: str, rows: int, ids: Iterable[str], lasting: bool) -> None:
        key = VARYING.sub("#", text), lasting
        if key not in self.found and len(self.found) >= MOST:
            text, key = OTHER, (OTHER, lasting)
        reason = self.found.setdefault(key, Reason(text, lasting=lasting))
        reason.rows += rows
        reason.ids = [*reason.ids, *ids][:NAMED]

    def merge(self, others: Iterable[dict[str, Any]]) -> None:
        """Add reasons from `to_json`."""
        for reason in others:
            self.add(**reason)

    @property
    def most_first(self) -> list[Reason]:
        return sorted(self.found.values(), key=lambda reason: -reason.rows)

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(reason) for reason in self.most_first]

    def lines(self) -> list[str]:
        """A line per reason, the most frequent first."""
        return [f"{counted(r.rows, 'row')}: {r.text} ({r.named})" for r in self.most_first]
