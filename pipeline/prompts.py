"""From a row to a request: the prompt's text, its tokens, and the row's own settings."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2
import pyarrow as pa
from jinja2.sandbox import SandboxedEnvironment

from exspec.actors.answers import asked
from exspec.actors.engine import Request, Sampling
from exspec.actors.models import StopStrings
from exspec.pipeline.errors import JobError
from exspec.pipeline.job import Job
from exspec.pipeline.plan import Shard

DEFAULT_COLUMNS = ("messages", "prompt", "message", "text")


class RowError(ValueError):
    """A row that cannot be generated; its message becomes the row's `error`."""


@dataclass(frozen=True)
class RowSettings:
    """What a row may override."""

    max_new_tokens: int
    temperature: float
    seed: int
    stop: list[str]


class Prompts:
    """Renders rows to token ids, by a template, a messages column or a text column.

    A text column is wrapped as one user message where the tokenizer has a chat template, and taken as it is otherwise.
    """

    def __init__(self, job: Job, tokenizer: Any, schema: pa.Schema) -> None:
        self.job, self.tokenizer = job, tokenizer
        self.answers = job.answers(tokenizer)
        self.column = None if job.prompt_template else prompt_column(job, schema)
        self.template = None
        if job.prompt_template:
            try:
                environment = SandboxedEnvironment(undefined=jinja2.StrictUndefined)
                self.template = environment.from_string(job.prompt_template)
            except jinja2.TemplateSyntaxError as error:
                raise JobError(f"prompt_template, line {error.lineno}: {error.message}") from error

    def text(self, row: dict[str, Any]) -> str:
        """The prompt of a row. Raises RowError."""
        if self.template:
            try:
                rendered = self.template.render(row)
            except Exception as error:  # whatever a template's expressions may raise
                raise RowError(f"prompt_template: {type(error).__name__}: {error}") from error
            return self._chat([{"role": "user", "content": rendered}]) if rendered else ""
        value = row[str(self.column)]
        if value is None:
            raise RowError(f"column {self.column!r} is null")
        if isinstance(value, str):
            return self._chat([{"role": "user", "content": value}]) if value else ""
        if isinstance(value, list):
            return self._chat(value) if value else ""
        raise RowError(f"column {self.column!r}: expected text or messages, not {type(value).__name__}")

    def _chat(self, messages: list[Any]) -> str:
        if bad := [m for m in messages if not isinstance(m, dict) or not isinstance(m.get("content"), str)]:
            raise RowError(f"column {self.column!r}: expected messages with role and content, not {bad[0]!r}")
        if not self.tokenizer.chat_template:
            if len(messages) == 1 and messages[0].get("role") == "user":
                return str(messages[0]["content"])
            raise RowError("the tokenizer has no chat template for a list of messages; use a text column or a template")
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.job.template_arguments
            )
        except Exception as error:  # whatever the model's template may raise
            raise RowError(f"chat template: {error}") from error
        return str(rendered)

    def tokens(self, row: dict[str, Any]) -> list[int]:
        """Token ids of a row's prompt. Raises RowError where there is none."""
        text = self.text(row)
        if not text:
            raise RowError("the prompt is empty")
        # A chat template writes the special tokens itself.
        ids = self.tokenizer(text, add_special_tokens=not self.tokenizer.chat_template)["input_ids"]
        if not ids:
            raise RowError("the prompt has no tokens")
        return list(ids)

    def request(self, row: dict[str, Any], shard: Shard, number: int) -> Request:
        """What an actor asks its engine for this row, under its shard and number. Raises RowError."""
        job, own = self.job, self.settings(row, shard, number)
        return Request(
            id=(shard.name, number),
            prompt=self.tokens(row),
            max_new_tokens=own.max_new_tokens,
            sampling=Sampling(own.temperature, job.top_k, job.top_p, own.seed, job.repetition_penalty),
            stop=StopStrings(self.tokenizer, own.stop) if own.stop else None,
            **asked(self.answers),
        )

    def settings(self, row: dict[str, Any], shard: Shard, number: int) -> RowSettings:
        """The row's settings: the job's, but for the columns that override them. Raises RowError."""
        job = self.job
        whole: Callable[[Any], bool] = lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63  # noqa: E731
        seed = _override(row, job.seed_column, row_seed(job.seed, shard, number), whole, "a whole number of 63 bits")
        length = _override(
            row,
            job.max_new_tokens_column,
            self.answers.longest or job.max_new_tokens,
            lambda v: whole(v) and 1 <= v < 2**31,
            "a whole number from 1 up",
        )
        temperature = _override(
            row, job.temperature_column, job.temperature, lambda v: isinstance(v, int | float) and v >= 0, "0 or more"
        )
        texts: Callable[[Any], bool] = lambda v: v != "" and all(isinstance(s, str) and s for s in v)  # noqa: E731
        stop = _override(row, job.stop_column, job.stop, texts, "texts that are not empty")
        return RowSettings(length, float(temperature), seed, [stop] if isinstance(stop, str) else list(stop))


def prompt_column(job: Job, schema: pa.Schema) -> str:
    """The prompt's column. Raises JobError naming what the input has instead."""
    found = ", ".join(schema.names)
    if job.prompt_column is None:
        column = next((c for c in DEFAULT_COLUMNS if c in schema.names), None)
        if column is None:
            raise JobError(f"prompt_column: none of {', '.join(DEFAULT_COLUMNS)} is in the input, which has {found}")
    else:
        column = job.prompt_column
        if column not in schema.names:
            raise JobError(f"prompt_column: {column!r} is not in the input, which has {found}")
    kind = schema.field(column).type
    if not (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_list(kind) or pa.types.is_null(kind)
    ):
        raise JobError(f"prompt_column: {column!r} is {kind}, expected text or a list of messages")
    return column


def row_seed(seed: int, shard: Shard, number: int) -> int:
    """63 bits from the job's seed and the row's identity, so that a retry draws the same noise."""
    digest = hashlib.sha256(f"{seed} {shard.name} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _override(row: dict[str, Any], column: str | None, default: Any, good: Callable[[Any], bool], expected: str) -> Any:
    value = row[column] if column else None
    if value is None:
        return default
    if not good(value):
        raise RowError(f"column {column!r}: expected {expected}, not {value!r}")
    return value
