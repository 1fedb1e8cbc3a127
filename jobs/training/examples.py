"""Texts with what a target has written, in batches, with its hidden states."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from exspec.actors.engine import Request
from exspec.actors.engine.config import EngineConfig
from exspec.actors.engine.engine import model_end_ids
from exspec.actors.engine.kv.batch import Batch
from exspec.actors.engine.kv.cached_model import GATHERED, IN_PLACE, PagedModel
from exspec.actors.engine.kv.pages import Pages
from exspec.actors.engine.kv.trial import attention_trial
from exspec.actors.engine.learners.learner import Lesson
from exspec.actors.models import Pair
from exspec.jobs.finished import FinishedRow

TOKENS_PER_STEP = 3072
ROWS_PER_STEP = 64
Example = tuple[list[int], list[int]]  # tokens of a prompt, and of its completion


def example_of(row: FinishedRow, pair: Pair) -> Example | None:
    """The tokens of a row; None without a completion, or if it does not encode to the tokens that were counted."""
    if row.request is None or row.completion is None:
        return None
    tokens = list(pair.tokenizer(row.completion, add_special_tokens=False)["input_ids"])
    if row.tokens == len(tokens) + 1 < row.request.max_new_tokens:
        tokens += _end(row.request, pair)
    elif row.tokens != len(tokens):
        return None
    return (list(row.request.prompt), tokens) if tokens else None


def _end(request: Request, pair: Pair) -> list[int]:
    """The token that ended the completion, or nothing if it could have been one of several."""
    ends = model_end_ids(pair.target) | request.end_ids
    return list(ends) if len(ends) == 1 and request.stop is None and not request.ignore_end else []


def counts_of(examples: Iterable[Example]) -> Counter[int]:
    """How often the target wrote each token."""
    return Counter(token for _, completion in examples for token in completion)


def batched(examples: Sequence[Example]) -> list[list[Example]]:
    """Every example once, in batches of about TOKENS_PER_STEP tokens. Examples of similar length share a batch."""
    made: list[list[Example]] = [[]]
    for row in sorted(examples, key=lambda row: sum(map(len, row))):
        size = len(made[-1])
        if size == ROWS_PER_STEP or (size and (size + 1) * sum(map(len, row)) > TOKENS_PER_STEP):
            made.append([])
        made[-1].append(row)
    return made


def padded(batch: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [R, S] of a batch, padded with zeros on the right, which of them are text and which are completions."""
    width = max(len(p) + len(c) for p, c in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    text, own = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(batch):
        tokens[i, : len(prompt) + len(completion)] = torch.tensor([*prompt, *completion])
        text[i, : len(prompt) + len(completion)] = True
        own[i, len(prompt) : len(prompt) + len(completion)] = True
    return tokens, text, own


class TargetStates:
    """Computes the hidden states of a target after some of its layers, by a forward over pages as in the engine.

    longest: tokens of the longest text.
    """

    def __init__(self, target: PreTrainedModel, layers: Sequence[int], longest: int) -> None:
        config, self.layers = EngineConfig(), tuple(layers)
        size, self.chunk = config.page_size, config.prefill_columns
        self.longest = -(-longest // self.chunk) * self.chunk
        count = ROWS_PER_STEP + (TOKENS_PER_STEP + self.longest) // size
        self.pages = Pages(ROWS_PER_STEP, count, size, self.chunk, self.longest, target.device)
        works = attention_trial(target.config, target.device, target.dtype, size) is None
        self.model = PagedModel(target, self.pages, IN_PLACE if works else GATHERED)
        self.model.remember(set(layers))

    def of(self, tokens: Tensor) -> Tensor:
        """The states [R, S, F] of texts [R, S]."""
        rows, width = tokens.shape
        for slot in range(rows):
            begun = self.pages.begin(slot, [], 0, width, 0)
            assert begun is not None, "there are pages for a whole batch"
        slots = torch.arange(rows, device=tokens.device)
        whole = Batch(slots, tokens, torch.zeros_like(slots), width)
        for start in range(0, width, self.chunk):
            part = tokens[:, start : start + self.chunk]
            self.model.fill(whole._replace(tokens=part, starts=whole.starts + start), last=max(self.layers))
        states = self.model.recall(self.layers, whole)
        for slot in range(rows):
            self.pages.end(slot)
        return states.clone()


class Lessons:
    """Batches of examples with the target's hidden states. The batches of an epoch come in an order of its own.

    cache: a folder of this process's, which keeps states for the next epoch, up to `budget` bytes in all.
    """

    def __init__(
        self, examples: Sequence[Example], states: TargetStates, cache: Path, budget: float, device: Any
    ) -> None:
        self.batches = batched(examples)
        self.states, self.cache, self.budget, self.device = states, cache, budget, device
        cache.mkdir(parents=True, exist_ok=True)
        self.kept = sum(file.stat().st_size for file in cache.glob("*.safetensors"))

    def at(self, step: int) -> Lesson:
        """The lesson of a step."""
        epoch, place = divmod(step, len(self.batches))
        order = random.Random(epoch).sample(range(len(self.batches)), len(self.batches))
        return self._lesson(order[place])

    def all(self) -> Iterator[Lesson]:
        """Every batch once."""
        return map(self._lesson, range(len(self.batches)))

    def _lesson(self, number: int) -> Lesson:
        tokens, text, own = (t.to(self.device) for t in padded(self.batches[number]))
        file = self.cache / f"{number}.safetensors"
        if file.exists():
            return Lesson(tokens, text, own, load_file(file, device=str(self.device))["states"])
        states = self.states.of(tokens)
        size = states.numel() * states.element_size()
        if self.kept + size <= self.budget:
            part = file.with_suffix(".part")
            try:
                save_file({"states": states.contiguous()}, part)
            except SafetensorError:  # the disk is full
                part.unlink(missing_ok=True)
                self.budget = 0
            else:
                part.replace(file)
                self.kept += size
        return Lesson(tokens, text, own, states)
