"""Budgets of thinking: never exceeded, with the tokens of a slow loop, whatever is drafted."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exspec.actors.answers.answers import AnswerError, FreeText
from exspec.actors.answers.thinking import Section, Thinking, Thoughtful
from exspec.actors.engine import Request, Sampling
from exspec.actors.engine.drafters.registry import DRAFTERS, NONE
from exspec.jobs.commands.audit import audit
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests import tiny
from tests.actors.engine.test_constraints import constraint_of
from tests.jobs.calls import rows_of
from tests.pipeline import jobs
from tests.pipeline.test_logprobs import run

BEGIN, END, SAYS = (7,), (8, 9), (11, 12)


def section(budget: int) -> Section:
    return Section(BEGIN, END, budget, (*SAYS, *END), frozenset(tiny.ENDS), tiny.VOCABULARY)


def requests() -> list[Request]:
    """In a section from the start or not, with an answer that has a form or not."""
    made = []
    for i, prompt in enumerate(tiny.prompts(16)):
        answer = constraint_of(0) if i % 3 == 0 else None
        inside = i % 2 == 0

        def constraint(budget: int = (0, 1, 4, 9)[i % 4], inside: bool = inside, answer: Any = answer) -> Thinking:
            return Thinking(section(budget), inside, answer() if answer else None)

        sampling = Sampling(temperature=0.9 * (i % 5 == 0), seed=i)
        made.append(Request(i, [*prompt, *BEGIN] if inside else prompt, 30, sampling, constraint=constraint))
    return made


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_a_slow_loop(drafter: str) -> None:
    target, asked = tiny.deep(), requests()
    expected = tiny.slow_decode(target, asked)
    if drafter == NONE:
        made = tiny.engine(target, NONE, method="plain")
    else:
        made = tiny.engine(target, drafter, tiny.draft_of(drafter, target))
    assert tiny.decode(made, asked, shuffle=1) == expected
    cut = 0
    for request in asked:
        inside, budget = request.id % 2 == 0, (0, 1, 4, 9)[request.id % 4]
        start, end, _ = section(budget).after(expected[request.id], inside)
        assert end - start <= budget + len(SAYS)
        assert tuple(expected[request.id][start + budget : end]) == SAYS[: max(0, end - start - budget)]
        cut += end - start > budget
    assert cut > 4


@pytest.mark.parametrize("seed", range(20))
def test_a_rollback_takes_everything_back(seed: int) -> None:
    chance = random.Random(seed)
    answer = chance.choice([constraint_of(0)(), None])
    made = Thinking(section(chance.randrange(5)), chance.random() < 0.5, answer)

    def look() -> Any:
        return made.allowed().tolist(), made.path[-1]

    seen, taken = [look()], 0
    for _ in range(60):
        if taken and chance.random() < 0.4:
            count = chance.randrange(1, taken + 1)
            made.rollback(count)
            del seen[len(seen) - count :]
            taken -= count
            assert look() == seen[-1]
            continue
        allowed = [t for t in range(tiny.VOCABULARY) if made.accepts(t)]
        if not allowed:
            break
        made.advance(chance.choice([*allowed, *(t for t in (*BEGIN, *END) if t in allowed)]))
        seen.append(look())
        taken += 1


def test_a_marker_that_has_begun_is_finished() -> None:
    """Its first token was the last that the budget allows."""
    made = Thinking(section(3), True, None)
    for token in (20, 21, END[0]):
        assert made.accepts(token)
        made.advance(token)
    assert [t for t in range(tiny.VOCABULARY) if made.accepts(t)] == [END[1]]
    made.advance(END[1])
    assert made.accepts(30)


def test_thinking_has_a_column_of_its_own(pair: jobs.Pair, tmp_path: Path) -> None:
    """With two drafters, and equal to the audit's plain decoding."""
    (tmp_path / "in").mkdir()
    prompts = [" ".join(jobs.WORDS[t] for t in (*jobs.prompt(n), *BEGIN)) for n in range(8)]
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "in" / "0.parquet")
    own: dict[str, Any] = {
        "max_thinking_tokens": 4, "thinking_markers": ["w7", "w8 w9"], "thinking_sentence": "w11 w12",
        "max_new_tokens": 20, "max_new_tokens_column": None, "id_column": None,
    }  # fmt: skip
    found = [run(pair, tmp_path / "in", tmp_path / d, drafter=d, **own) for d in ("model", "suffix")]
    names = ("thinking", "completion", "completion_tokens")
    assert [{n: r[n] for n in names} for r in found[0]] == [{n: r[n] for n in names} for r in found[1]]
    for row in found[0]:
        words = row["thinking"].split()
        assert len(words) <= 6
        assert len(words) <= 4 or words[4:] == ["w11", "w12"][: len(words) - 4]
        assert "w8 w9" not in row["thinking"]
        answered = len(row["completion"].split())
        assert row["completion_tokens"] - answered - len(words) in ((2, 3) if answered else (0, 1, 2, 3))
    assert audit(str(tmp_path / "model"), {}, 64, None, 0, True, {}) == 0


def test_labels_come_after_thinking(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    target = jobs.with_end_token(pair[0], tmp_path / "target")
    own: dict[str, Any] = {"max_thinking_tokens": 3, "thinking_markers": ["w7", "w8"], "max_new_tokens_column": None}
    plain = jobs.job((target, None), source, tmp_path / "out", method="plain", **own)
    job = LabelJob(**plain.model_dump(exclude_unset=True), labels=["w10", "w11 w12"])
    assert execute(prepare(job)) == 0
    for row in rows_of(tmp_path / "out"):
        assert row["error"] is None
        assert row["label"] == row["completion"]
        assert row["label"] in job.labels
        assert len(row["thinking"].split()) <= 3
        assert 0 < row["label_confidence"] <= 1
    assert audit(str(tmp_path / "out"), {}, 64, None, 0, False, {}) == 0


def test_what_cannot_be_budgeted_is_refused(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the chat template has no <think> and </think>"):
        prepare(jobs.job(pair, source, tmp_path / "out", max_thinking_tokens=3))
    with pytest.raises(ValueError, match="stop does not work with max_thinking_tokens"):
        jobs.job(pair, source, tmp_path / "out", max_thinking_tokens=3, stop=["x"])
    with pytest.raises(ValueError, match="thinking_markers: expected two texts"):
        jobs.job(pair, source, tmp_path / "out", max_thinking_tokens=3, thinking_markers=["x"])
    markers = {"thinking_markers": ["w7", "w8"], "max_new_tokens_column": None}
    with pytest.raises(JobError, match=r"max_thinking_tokens: 20 of 20 max_new_tokens leave none to answer"):
        prepare(jobs.job(pair, source, tmp_path / "out", max_thinking_tokens=20, max_new_tokens=20, **markers))
    with pytest.raises(AnswerError, match="has no tokens"):
        Thoughtful(jobs.tokenizer(), FreeText(), 3, [" ", "w1"])
    with pytest.raises(AnswerError, match="has the end marker 'w2'"):
        Thoughtful(jobs.tokenizer(), FreeText(), 3, ["w1", "w2"], "w5 w2")


def test_a_marker_inside_a_prompt_opens_nothing() -> None:
    made = Thoughtful(jobs.tokenizer(), FreeText(), 3, ["w7", "w8"])
    requests = [Request("x", prompt) for prompt in ([7], [1, 7], [7, 1], [1])]
    phases = [made.requests(request, None)[0].constraint().path[0].phase for request in requests]  # type: ignore
    assert phases == ["inside", "inside", "outside", "outside"]
