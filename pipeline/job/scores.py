"""Scoring jobs: the likelihood of completions that the input has."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import field_validator

from exspec.actors.engine.config import DRAFTING
from exspec.pipeline.job.labels import as_texts
from exspec.pipeline.job.settings import Job, setting

if TYPE_CHECKING:
    from exspec.actors.answers.answers import Answers

_scores = partial(setting, "Scores")
_COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "mean_logprob": (pa.float64(), "the mean of `logprobs`"),
    "perplexity": (pa.float64(), "exp(-mean_logprob)"),
    "ranks": (pa.list_(pa.int32()), "the rank of each token by the target, from 1"),
}
_CHOICES: dict[str, tuple[pa.DataType, str]] = {
    "choice": (pa.int32(), "the number of the likeliest choice, from 0; `completion` has its text"),
    "choice_logprobs": (pa.list_(pa.float64()), "of each choice, the sum of its log-probabilities"),
    "choice_probability": (pa.float64(), "the likeliest choice's probability among the choices"),
}
_PROMPT = {"prompt_logprobs": (pa.list_(pa.float32()), "of each prompt token; null for the first")}
# Settings of a job that do not apply, because nothing is generated or drafted.
USELESS = ("max_new_tokens", "max_new_tokens_column", "min_new_tokens", "ignore_eos", "bad_words", "bad_words_ids",
           "stop", "stop_column", "draft", "learn", "n", "n_column", "best_of",
           "max_thinking_tokens", "draft_from", "draft_length", "threshold", *DRAFTING)  # fmt: skip
BINS, LEAST = 40, -10.0  # bars of the histogram, and where it begins at the least


class ScoreJob(Job):
    """A job whose completions are given: one for each row, or several choices, of which the likeliest is chosen."""

    kind: ClassVar[str] = "score"
    reads: ClassVar[bool] = True

    completion_column: str | None = _scores(None, "Column of the completions: text, or token ids.")
    choices: list[str] = _scores([], "Texts; the likeliest one is chosen.")
    choices_column: str | None = _scores(None, "Column of a row's choices: a list of texts, or of token ids.")
    choose_by: Literal["sum", "mean"] = _scores(
        "sum", "Compare the sums of the log-probabilities of choices, or their means over tokens."
    )
    prompt_logprobs: bool = _scores(False, "Keep the log-probabilities of prompt tokens too. Needs completion_column.")

    @field_validator("choices", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        return as_texts(value)

    def _broken(self) -> Iterator[str]:
        yield from super()._broken()
        given = [name for name in ("completion_column", "choices", "choices_column") if getattr(self, name)]
        if len(given) != 1:
            expected = "completion_column, choices and choices_column"
            yield f"expected one of {expected}, not {' and '.join(given) or 'none'}"
        if self.choices and (len(self.choices) < 2 or len(set(self.choices)) < len(self.choices)):
            yield f"choices: expected two or more distinct texts, not {self.choices}"
        if not all(self.choices):
            yield "choices: expected non-empty texts"
        if self.choose_by != "sum" and self.completion_column:
            yield "choose_by needs choices or choices_column"
        if self.prompt_logprobs and not self.completion_column:
            yield "prompt_logprobs needs completion_column: with choices, prompts are computed once for all of them"
        penalties = ("presence_penalty", "frequency_penalty")
        if self.prompt_logprobs and (used := [name for name in penalties if getattr(self, name)]):
            yield f"prompt_logprobs does not work with {used[0]}, which counts the tokens of completions"
        if useless := [name for name in USELESS if getattr(self, name) != Job.model_fields[name].default]:
            yield f"{useless[0]} does not apply to a scoring job: completions are given, and nothing is drafted"
        if self.method not in ("auto", "plain") or self.drafter not in ("auto", "none"):
            yield "method and drafter do not apply to a scoring job: nothing is drafted"

    @property
    def given(self) -> str | None:
        """The column that the completions or choices are in."""
        return self.completion_column or self.choices_column

    def completions(self, row: dict[str, Any]) -> Any:
        if self.completion_column:
            return [row[self.completion_column]]
        return row[self.choices_column] if self.choices_column else self.choices

    @property
    def keeps_logprobs(self) -> bool:
        return True

    def form_columns(self) -> pa.Schema:
        named = _COLUMNS | ({} if self.completion_column else _CHOICES) | (_PROMPT if self.prompt_logprobs else {})
        return pa.schema([pa.field(n, kind, metadata={"description": text}) for n, (kind, text) in named.items()])

    @property
    def value_columns(self) -> list[str]:
        return list(self.form_columns().names)

    def form(self, tokenizer: Any) -> "Answers":  # noqa: ARG002
        from exspec.actors.answers.scores import Scores

        return Scores(self.choose_by, not self.completion_column, self.prompt_logprobs)

    def evaluate(self, read: Callable[[list[str]], Iterator[pa.Table]]) -> dict[str, Any]:
        """The histogram of the rows' mean log-probabilities, the perplexity of all tokens, and the rows by choice."""
        least = min((pc.min(t["mean_logprob"]).as_py() or 0.0 for t in read(["mean_logprob"])), default=0.0)
        counts, edges = np.zeros(BINS, dtype=int), np.linspace(max(least, LEAST), 0, BINS + 1)
        total, tokens, choices = 0.0, 0, dict[str, int]()
        columns = ["mean_logprob", "completion_tokens", *(["choice"] if not self.completion_column else [])]
        for table in read(columns):
            means, lengths = (table[name].drop_null().to_numpy() for name in columns[:2])
            counts += np.histogram(means.clip(edges[0], 0), edges)[0]
            total, tokens = total + float((means * lengths).sum()), tokens + int(lengths.sum())
            for number in table["choice"].drop_null().to_pylist() if len(columns) > 2 else []:
                name = self.choices[number] if self.choices else str(number)
                choices[name] = choices.get(name, 0) + 1
        if not tokens:
            return {}
        found = {"perplexity": round(math.exp(min(-total / tokens, 700.0)), 4), "histogram": counts.tolist()}
        return {"mean_logprob": found | {"from": edges[0], "to": 0.0}} | (
            {"choice": {"rows_by_label": choices}} if choices else {}
        )
