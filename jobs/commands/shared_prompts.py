"""Estimates how many prompt tokens an engine would find cached, because prompts share prefixes."""

from collections.abc import Sequence


class Shared:
    """Counts prompt tokens in whole prefill chunks that an earlier prompt also started with.

    chunk: C, tokens of a prefill chunk. The last token of a prompt is in no chunk, because the first round feeds it.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.prompts = self.tokens = self.cached = 0
        # Id of a prefix, by the id of the prefix that it extends and its last chunk.
        self.prefixes: dict[tuple[int, tuple[int, ...]], int] = {}

    def add(self, prompt: Sequence[int]) -> None:
        """Count the tokens of a prompt."""
        self.prompts += 1
        self.tokens += len(prompt)
        prefix = 0
        for start in range(0, len(prompt) - self.chunk, self.chunk):
            longer = prefix, tuple(prompt[start : start + self.chunk])
            self.cached += self.chunk * (longer in self.prefixes)
            prefix = self.prefixes.setdefault(longer, len(self.prefixes) + 1)

    def line(self) -> str | None:
        """A line to print, or None if there are fewer than two prompts."""
        if self.prompts < 2:
            return None
        if not self.cached:
            return f"shared: nothing; no two of {self.prompts} prompts begin with the same {self.chunk} tokens or more"
        return (
            f"shared: {self.cached / self.tokens:.0%} of the tokens of {self.prompts} prompts are in a prefix "
            "of another prompt (each actor computes it once)"
        )
