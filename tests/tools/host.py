"""Measures the host's work in a round: everything but the forwards and the choice of tokens.

The models are tables of logits behind transformers' interface, so that a vocabulary of any size needs no weights. A
first engine computes what the device would, and a second engine, which is timed, gets those results played back.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from exspec.actors.answers.json_schema import Json
from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.actors.stop_strings import StopStrings
from tests.tiny import Weightless

DRAFTED = 5  # K
CAPACITY = 1024
PROMPT = 300  # tokens of the shortest prompt
WARM, ROUNDS = 2, 9  # rounds before the timed ones, and timed rounds
LARGEST = 2**20  # bytes of a result that a tape keeps whole
TABLE = 16  # rows of logits in a model
LETTERS = 'etaoinshrdlucmfgpbETA\u0120,.":{}0123456789'
SCHEMA = {
    "type": "object",
    "properties": {
        "product": {"type": "string"},
        "category": {"enum": ["refund", "delivery", "damaged", "other"]},
        "urgent": {"type": "boolean"},
        "quantity": {"type": "integer"},
        "summary": {"type": "string"},
    },
    "required": ["product", "category", "urgent", "quantity", "summary"],
    "additionalProperties": False,
}


class Table(Weightless):
    """A causal model that looks its logits up in a table, by token and position.

    wrong: a row that is replaced by the next one, so that a draft errs; None: none.
    """

    def __init__(self, logits: Tensor, wrong: int | None) -> None:
        self.logits, self.wrong = logits, wrong
        text = SimpleNamespace(num_attention_heads=1, head_dim=2, hidden_size=2, num_hidden_layers=1)
        text.vocab_size, text.max_position_embeddings, text.eos_token_id = logits.shape[1], CAPACITY, None
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int = 0, **_: Any) -> Any:
        kept = slice(-logits_to_keep, None) if logits_to_keep else slice(None)
        rows = (31 * input_ids[:, kept] + 17 * position_ids[:, kept]) % len(self.logits)
        if self.wrong is not None:
            rows = torch.where(rows == self.wrong, (rows + 1) % len(self.logits), rows)
        return SimpleNamespace(logits=self.logits[rows])


class Tape:
    """A recorder that keeps the results of a first engine, and plays them to a second engine with the same calls."""

    records = False

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.playing: Iterator[Any] | None = None
        self._inside = False

    def rewind(self) -> None:
        self.playing = iter(self.results)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def taped(*arguments: Any) -> Any:
            if self.playing is not None:
                return next(self.playing)
            if self._inside:
                return function(*arguments)
            self._inside = True
            result = function(*arguments)
            self._inside = False
            self.results.append(_bounded(result))
            return result

        return taped


def _bounded(result: Any) -> Any:
    """A result as a tape keeps it. Of large logits, which only the device reads, it keeps the shape."""
    if isinstance(result, tuple):
        parts = map(_bounded, result)
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    if isinstance(result, Tensor) and result.dtype.is_floating_point and result.nbytes > LARGEST:
        return result.new_zeros(1).expand(result.shape)
    return result


@cache
def synthetic_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocabulary` tokens, at least 512, made by random merges."""
    rng, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges, short = {token: i for i, token in enumerate(alphabet)}, [], list(LETTERS)
    while len(tokens) < vocabulary - 1:
        pair = rng.choice(short), rng.choice(short)
        if (token := "".join(pair)) not in tokens:
            tokens[token] = len(tokens)
            merges.append(pair)
            if len(token) <= 4:
                short.append(token)
    made = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def host_milliseconds(batch_size: int = 64, vocabulary: int = 152_000) -> dict[str, float]:
    """Milliseconds of host work in a round of B rows, the median over rounds, by what the requests ask for.

    greedy: nothing. penalty: a repetition penalty. stop: two stop strings. json: JSON of a schema. beside_target: the
    part of json that is done while the target computes.
    """
    tokenizer = synthetic_tokenizer(vocabulary)
    stop = StopStrings(tokenizer, ["\n\nUser:", "</answer>"])
    answers = Json(tokenizer, SCHEMA, {})
    cases: dict[str, dict[str, Any]] = {
        "greedy": {},
        "penalty": {"sampling": Sampling(repetition_penalty=1.1)},
        "stop": {"stop": stop},
        "json": {"constraint": answers.constraint, "end_ids": answers.end_ids},
    }
    found = {name: _milliseconds(batch_size, vocabulary, case) for name, case in cases.items()}
    rounds = {name: whole for name, (whole, _) in found.items()} | {"beside_target": found["json"][1]}
    return {name: round(milliseconds, 3) for name, milliseconds in rounds.items()}


def _milliseconds(batch_size: int, vocabulary: int, case: dict[str, Any]) -> tuple[float, float]:
    """Of a whole round, and of its verify phase."""
    logits = torch.randn(TABLE, vocabulary, generator=torch.Generator().manual_seed(0))
    tape = Tape()
    _rounds(tape, logits, batch_size, case)
    tape.rewind()
    rounds, verifies = zip(*_rounds(tape, logits, batch_size, case)[WARM:], strict=True)
    return 1000 * median(rounds), 1000 * median(verifies)


def _rounds(tape: Tape, logits: Tensor, batch_size: int, case: dict[str, Any]) -> list[tuple[float, float]]:
    """Seconds of each round, and of its verify."""
    config = EngineConfig(
        batch_size=batch_size, window=batch_size, draft_tokens=DRAFTED, capacity=CAPACITY, bucket=CAPACITY
    )
    engine = Engine(Table(logits, None), Table(logits, 0), config, recorder=tape)  # type: ignore[arg-type]
    rng = random.Random(0)
    for i in range(2 * batch_size):
        prompt = [rng.randrange(logits.shape[1]) for _ in range(PROMPT + rng.randrange(PROMPT))]
        engine.submit(Request(i, prompt, CAPACITY - 2 * PROMPT, **case))
    seconds = []
    for _ in range(WARM + ROUNDS):
        before, start = engine.statistics.seconds.get("verify", 0.0), time.perf_counter()
        engine.step()
        seconds.append((time.perf_counter() - start, engine.statistics.seconds["verify"] - before))
    return seconds


if __name__ == "__main__":
    print(json.dumps(host_milliseconds()))
