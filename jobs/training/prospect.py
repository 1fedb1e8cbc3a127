"""What a drafter could save that is not trained yet: it decodes for a moment, and its accept length is assumed.

Scaling laws for speculative decoding (Scylla, arXiv:2505.07858), T1.3, with the seconds of rounds of B rows:

    T_SD / T_AR = (T_draft(B) + T_verify(B, K)) / (accept length * T_plain(B))

Here the seconds of prefill, which no draft shortens, are counted beside it.
"""

from statistics import mean

from exspec.actors.engine.shape.sample import Feed

TURNS = 3


class Prospect:
    """Compares two engines, which decode in turns for so many seconds in all. now: as the job decodes. other: with
    another drafter."""

    def __init__(self, now: Feed, other: Feed, seconds: float) -> None:
        for feed in (now, other):
            feed.run(0.1)  # the first rounds admit sequences, compile, and record graphs
        before, speeds = other.engine.statistics, list[tuple[float, float]]()
        for _ in range(TURNS):
            speeds.append((now.run(seconds / 2 / TURNS), other.run(seconds / 2 / TURNS)))
        after = other.engine.statistics
        self.now = mean(speed for speed, _ in speeds)  # tokens/s
        spent = {phase: after.seconds[phase] - before.seconds.get(phase, 0.0) for phase in after.seconds}
        rows, tokens = after.busy_rows - before.busy_rows, after.tokens - before.tokens
        each = 1 / mean(speed for _, speed in speeds)
        self.prefill = each * spent["admit"] / sum(spent.values())  # seconds per token
        self.round = (each - self.prefill) * tokens / rows  # seconds per row

    def ratio(self, accept_length: float) -> float:
        """How many times as fast the job would be with so many tokens per round."""
        return 1 / (self.prefill + self.round / accept_length) / self.now


def length_of(chance: float, drafts: int) -> float:
    """Tokens per round, the bonus included, if a drafted token is right with this chance."""
    return sum(chance**i for i in range(drafts + 1))


def chance_of(accept_length: float, drafts: int) -> float:
    """The chance with which drafts have this accept length."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if length_of(middle, drafts) < accept_length else (low, middle)
    return low
