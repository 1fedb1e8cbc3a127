"""How much of some prompts an engine would find computed, for other prompts begin alike."""

from collections.abc import Sequence


class Shared:
    """Counts the prompt tokens that lie in whole prefill chunks with which an earlier prompt began too.

    chunk: C, tokens of a prefill chunk. The last token of a prompt is in none: the first round feeds it.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.prompts = self.tokens = self.found = 0
        self.begun: dict[tuple[int, tuple[int, ...]], int] = {}  # number of a beginning, by that of the one it extends

    def add(self, prompt: Sequence[int]) -> None:
        """Count a prompt's token ids."""
        self.prompts += 1
        self.tokens += len(prompt)
        beginning = 0
        for start in range(0, len(prompt) - self.chunk, self.chunk):
            longer = beginning, tuple(prompt[start : start + self.chunk])
            self.found += self.chunk * (longer in self.begun)
            beginning = self.begun.setdefault(longer, len(self.begun) + 1)

    def line(self) -> str | None:
        """What is told; None of a prompt that is alone."""
        if self.prompts < 2:
            return None
        if not self.found:
            return f"shared: no two of {self.prompts} prompts have their first {self.chunk} tokens in common"
        return (
            f"shared: {self.found / self.tokens:.0%} of the prompt tokens of {self.prompts} prompts begin as those of "
            "another (computed once an actor)"
        )
