"""Random engines against a loop that decodes one sequence at a time, without a cache.

EXSPEC_FUZZ is the number of engines, EXSPEC_FUZZ_FROM the first seed.
"""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from exspec.actors.adapter import adapt
from exspec.actors.answers.thinking import Thinking
from exspec.actors.engine import Request, Sampling
from exspec.actors.engine.drafters.registry import DRAFTERS, NONE
from exspec.actors.engine.tokens.constraint import Constraint, MakeConstraint
from exspec.actors.samples import sample_requests
from tests import tiny
from tests.actors.engine.test_constraints import constraint_of
from tests.actors.engine.test_logprobs import compare
from tests.actors.test_adapter import save_adapter
from tests.pipeline.test_thinking import section

COUNT, FIRST = int(os.environ.get("EXSPEC_FUZZ", "12")), int(os.environ.get("EXSPEC_FUZZ_FROM", "0"))
DEEP = ("early_exit", *tiny.HEADS)  # they use the target's layers


def shape(rng: random.Random) -> dict[str, Any]:
    page = rng.choice([1, 3, 5, 7, 8, 16])
    rows = rng.randint(1, 7)
    made: dict[str, Any] = {
        "method": rng.choice(["plain", "exspec", "exspec", "exspec"]),
        "batch_size": rows,
        "window": rows + rng.randint(0, 6),
        "draft_tokens": rng.randint(1, 12),
        "bucket": rng.choice([13, 16, 32, 96]),
        "prefill_rows": rng.randint(1, 4),
        "prefill_columns": page * rng.randint(1, 3),
        "page": page,
        "attention": rng.choice(["gathered", "in_place"] if tiny.in_place() else ["gathered"]),
        "draft_length": rng.choice(["fixed", "explicit", "implicit", "both"]),
        "exact": rng.random() < 0.8,
        "kernels": rng.choice(["eager", "packed"]),
        "overlap": rng.random() < 0.5,
        "drafter": rng.choice([name for name in DRAFTERS if name != NONE]),
        "exit_depth": rng.choice([None, 1]),
        "exit_tokens": rng.randint(1, 4),
        "draft_window": rng.randint(16, 80),
        "draft_chosen": rng.choice([None, rng.randint(1, 40)]),
        "draft_from": rng.choice([0, 0, rng.randint(2, 60)]),
    }
    if made["drafter"] != "sparse" and rng.random() < 0.5:
        del made["draft_window"]
    if rng.random() < 0.5:  # so few that sequences are preempted
        made["pages"] = -(-tiny.CONTEXT // page) + rng.randint(0, 12)
    return made


def sampling(rng: random.Random) -> Sampling:
    if rng.random() < 0.4:
        return Sampling(repetition_penalty=rng.choice([1.0, 1.0, 1.3]), presence_penalty=rng.choice([0.0, 0.2]))
    return Sampling(
        temperature=rng.choice([0.5, 1.0, 1.6]),
        top_k=rng.choice([0, 0, 3, 20]),
        top_p=rng.choice([1.0, 0.9, 0.6]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randrange(2**63),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.1]),
    )


def prompt(rng: random.Random, trunk: list[int]) -> list[int]:
    """A prompt of any length, which may begin with part of the trunk."""
    own = [rng.randrange(tiny.VOCABULARY) for _ in range(rng.choice([1, 2, 5, 17, 40]))]
    return [*trunk[: rng.choice([0, 0, 7, 16, 33])], *own]


def request(rng: random.Random, name: int, trunk: list[int]) -> Request:
    """A row that may have log-probabilities, and a budget for thinking, with an answer that has a form or not."""
    tokens, new = prompt(rng, trunk), rng.randint(1, 20)
    constraint: MakeConstraint | None = None
    if rng.random() < 0.3:
        answer = rng.choice([None, constraint_of(name)])
        budget, inside = rng.randrange(9), rng.random() < 0.5

        def constraint() -> Constraint:
            return Thinking(section(budget), inside, answer() if answer else None)

    logprobs = rng.choice([None, None, 0, 3])
    return Request(name, tokens, new, sampling(rng), constraint=constraint, logprobs=logprobs)


def adapters(rng: random.Random, target: PreTrainedModel, folder: Path) -> list[str]:
    """Up to three adapters for the target."""
    linear = [name for name, m in target.named_modules() if "layers." in name or ".h." in name if is_linear(m)]
    names = [tuple(rng.sample(linear, rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
    return [str(save_adapter(folder / str(i), target, some, seed=i)) for i, some in enumerate(names)]


def is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_a_random_engine_equals_a_slow_loop(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    family, settings = rng.choice(sorted(tiny.FAMILIES)), shape(rng)
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": rng.choice([3, 5])}
    target = tiny.model(family, seed, **(layers if settings["drafter"] in DEEP else {}))
    draft = tiny.model(family, seed + rng.randint(0, 1))
    if settings["drafter"] == "eagle3":
        draft = tiny.head(target, seed, size=rng.choice([20, tiny.VOCABULARY]))
    if settings["drafter"] == "dflash":
        draft = tiny.dflash(target, seed, block_size=rng.choice([2, 5, 13]), sliding_window=rng.choice([None, 6]))
    if settings["drafter"] == "clover":
        draft = tiny.clover(target, seed, heads=rng.choice([1, 3, 5]))
    trunk = [rng.randrange(tiny.VOCABULARY) for _ in range(33)]
    if rng.random() < 0.3:
        adapt(target, adapters(rng, target, tmp_path))
    made = tiny.engine(target, draft=draft, **settings)
    rows = [request(rng, i, trunk) for i in range(rng.randint(1, 9))]
    rows = [replace(row, adapter=rng.randint(0, made.adapters)) for row in rows]
    rows += [sample for row in rows if rng.random() < 0.2 for sample in sample_requests(row, rng.randint(1, 4))]
    found = tiny.run(made, rows, shuffle=seed)
    print(family, settings)
    for row in rows:
        compare(target, row, found[row.id])
    if settings["method"] == "plain":  # the scores of what was generated are those of its generation
        scored = [replace(r, constraint=None, given=found[r.id].tokens) for r in rows if r.logprobs is not None]
        again = tiny.run(made, scored, shuffle=seed + 1)
        for row in scored:
            scores = [[t.chosen.target for t in done[row.id].logprobs] for done in (found, again)]
            assert scores[0] == (scores[1] if settings["exact"] else pytest.approx(scores[1], abs=1e-4))
