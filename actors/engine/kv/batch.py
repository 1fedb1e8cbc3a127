"""What one forward is given."""

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """The tokens of one forward: row r feeds tokens[r] to the sequence in slot slots[r], at positions starts[r] + q.

    slots, starts: [R]. tokens: [R, Q]. kv_columns: a position is dead that is negative or not below this number: it
    leaves no trace, and its logits mean nothing.
    """

    slots: Tensor
    tokens: Tensor
    starts: Tensor
    kv_columns: int

    def shifted(self, by: int) -> "Batch":
        """The same tokens `by` positions later."""
        return self._replace(starts=self.starts + by)
