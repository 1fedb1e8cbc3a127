"""From a row to a request: the text of the prompt, its tokens, and the settings of the row."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
import jinja2.meta
import pyarrow as pa
from jinja2 import nodes

from exspec.actors.answers.answers import asked
from exspec.actors.engine import Request, Room, Sampling
from exspec.actors.engine.request import LARGEST, MOST_LIKELY
from exspec.actors.stop_strings import StopStrings
from exspec.pipeline.errors import JobError, no_column
from exspec.pipeline.input.batch import BODY, COLUMNS, METHOD, URL, fields, is_batch
from exspec.pipeline.input.plan import Shard
from exspec.pipeline.input.rows import Row, RowError, are_texts, shown
from exspec.pipeline.input.schemas import is_json, is_list, is_text
from exspec.pipeline.input.templates import Sandbox, bounded
from exspec.pipeline.job.settings import ALIKE, MOST_SAMPLES, Job
from exspec.pipeline.secrets import anonymous

MESSAGES = "messages"
DEFAULT_COLUMNS = (MESSAGES, "prompt", "message", "text")
MARK = 0xF0000  # first of the private-use characters that stand for control tokens in a row's text
LONG = 32  # characters per token of capacity: of a longer text, the beginning is tokenized first


@dataclass(frozen=True)
class RowSettings:
    """Settings of one row. sampling: the sampling settings that differ between rows. given: the tokens of its
    completions in a scoring job, which are max_new_tokens at most. samples: how many to draw. adapter: its number, from
    1; 0 is none."""

    max_new_tokens: int
    sampling: dict[str, Any]
    stop: list[str]
    logprobs: int | None
    given: list[list[int]] | None = None
    samples: int = 1
    adapter: int = 0


class Prompts:
    """Renders rows to token ids, from a template, a messages column or a text column.

    Text becomes one user message if the chat template applies, and is used as it is otherwise. Control tokens in the
    values of a row are text; control tokens in templates are control tokens. Text of JSON type, or in a column called
    `messages`, is parsed as messages. All methods raise a row that is a RowError already.
    """

    def __init__(self, job: Job, tokenizer: Any, schema: pa.Schema) -> None:
        self.batch = is_batch(job, schema)
        if self.batch and job.reads:
            what = "embedded" if job.embeds else "scored"
            raise JobError(f"input: requests of the batch API cannot be {what}; set prompt_column or prompt_template")
        if self.batch and (given := [name for name in COLUMNS if getattr(job, name)]):
            raise JobError(f"{given[0]}: requests of the batch API have their own settings; leave it out")
        if self.batch and (job.best_of or job.n not in (None, 1)):
            raise JobError(
                "n and best_of: requests of the batch API ask for samples; set n to 1, and leave best_of out"
            )
        if job.adapters and not (self.batch or job.adapter_column):
            raise JobError("adapters: needs adapter_column, the column of their names")
        if job.draws.count > 1 and not (job.temperature or job.temperature_column):  # model_sampling set none
            raise JobError(ALIKE)
        self.job, self.tokenizer = job.model_copy(update=COLUMNS) if self.batch else job, tokenizer
        self.answers = job.answers(tokenizer)
        if self.answers.longest is None and (job.max_thinking_tokens or 0) >= job.max_new_tokens:
            thought, most = job.max_thinking_tokens, job.max_new_tokens
            raise JobError(f"max_thinking_tokens: {thought} of {most} max_new_tokens leave none to answer; raise these")
        self.space: Room | None = None
        self.column = None if job.prompt_template else "prompt" if self.batch else prompt_column(job, schema)
        kind = schema.field(self.column).type if self.column in schema.names else pa.null()
        self.json = is_json(kind) or (self.column == MESSAGES and is_text(kind))
        stop = schema.field(job.stop_column).type if job.stop_column in schema.names else pa.null()
        self.json_stop = is_json(stop)
        self.chat = bool(tokenizer.chat_template) if job.chat is None else job.chat
        self._check_chat()
        self.special = {} if job.allow_special else _marks(tokenizer)  # control tokens by mark
        self.marks = re.compile(f"([{re.escape(''.join(self.special))}])" if self.special else "(?!)")
        self.template: jinja2.Template | None = None
        self.variables: set[str] = set()
        if job.prompt_template:
            self.template, self.variables = _template(job.prompt_template, schema.names)

    def _check_chat(self) -> None:
        if self.chat and not self.tokenizer.chat_template:
            raise JobError("chat: the target's tokenizer has no chat template; leave chat out, or use prompt_template")
        for name in ("system_prompt", "template_arguments"):
            if getattr(self.job, name) and not self.chat:
                raise JobError(f"{name}: needs a chat template, but this prompt is used as it is")

    def within(self, room: Room) -> "Prompts":
        """The same, but rows that do not fit raise RowError here, as they would in the engine."""
        other = copy.copy(self)
        other.space = room
        return other

    def columns(self, schema: pa.Schema) -> list[str]:
        """The columns that prompts and settings of rows need, in the order of the schema."""
        named = {self.column, *(getattr(self.job, key) for key in COLUMNS), *self.variables, self.job.given}
        named = {METHOD, URL, BODY} if self.batch else named
        return [name for name in schema.names if name in named]

    def _values(self, row: Row) -> dict[str, Any]:
        if isinstance(row, RowError):
            raise row
        return fields(row) if self.batch else row

    def fitted(self, row: Row, max_new_tokens: int) -> tuple[list[int], int]:
        """Token ids of a row's prompt, and how many tokens truncate_prompt cut off.

        Raises RowError if there are no tokens, or more than the engine accepts.
        """
        tokens = self.tokens(row)
        most = self.space.longest_prompt(max_new_tokens) if self.space else len(tokens)
        long = self.job.truncate_prompt and self._refusal(len(tokens), max_new_tokens)
        cut = len(tokens) - most if long and most > 0 else 0
        self.room(len(tokens) - cut, max_new_tokens)
        return tokens[cut:], cut

    def room(self, tokens: int, max_new_tokens: int) -> None:
        """Raises RowError if the engine would reject a prompt of this many tokens."""
        if why := self._refusal(tokens, max_new_tokens):
            raise RowError(why)

    def _refusal(self, tokens: int, max_new_tokens: int) -> str | None:
        return self.space.refusal(tokens, max_new_tokens, whole=self.job.reads) if self.space else None

    def text(self, row: Row) -> str:
        """The prompt of a row. Raises RowError."""
        rendered = self._rendered(row)
        return self.marks.sub(lambda found: self.special[found[0]], rendered)

    def _rendered(self, row: Row) -> str:
        """The prompt, with a mark for every control token in the row's text."""
        row = self._values(row)
        if self.template:
            try:
                with bounded():
                    rendered = self.template.render({name: self._marked(value) for name, value in row.items()})
            except Exception as error:  # expressions may raise anything
                why = str(error) or "it takes too much memory"
                raise RowError(f"prompt_template: {type(error).__name__}: {why}") from error
            return self._chat([{"role": "user", "content": rendered}]) if rendered else ""
        value = self._marked(self._value(row))
        if isinstance(value, str):
            return self._chat([{"role": "user", "content": value}]) if value else ""
        if isinstance(value, list):
            return self._chat(value) if value else ""
        raise RowError(f"column {self.column!r}: expected text or messages, not {type(value).__name__}")

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            if self.marks.search(value):
                raise RowError("the text contains a private-use character (from U+F0000 up); allow_special accepts it")
            for mark, text in self.special.items():
                value = value.replace(text, mark)
            return value
        if isinstance(value, list):
            return [self._marked(item) for item in value]
        return {key: self._marked(item) for key, item in value.items()} if isinstance(value, dict) else value

    def _value(self, row: dict[str, Any]) -> Any:
        value = row[str(self.column)]
        if self.json and isinstance(value, str):
            value = _json(self.column, value, "messages")
        if value is None:
            raise RowError(f"column {self.column!r} is null")
        return value

    def _chat(self, messages: list[Any]) -> str:
        if bad := [m for m in messages if not isinstance(m, dict) or not isinstance(m.get("content"), str)]:
            raise RowError(f"column {self.column!r}: expected messages with role and content, not {shown(bad[0])}")
        if not self.chat:
            if len(messages) == 1 and messages[0].get("role") == "user":
                return str(messages[0]["content"])
            what = "chat is off" if self.tokenizer.chat_template else "the tokenizer has no chat template"
            raise RowError(f"{what}, but the prompt is a list of messages; use a text column or a template")
        if self.job.system_prompt and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.job.system_prompt}, *messages]
        try:
            with bounded():
                rendered = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **self.job.template_arguments
                )
        except Exception as error:  # templates may raise anything
            raise RowError(f"chat template: {error}") from error
        return str(rendered)

    def tokens(self, row: Row) -> list[int]:
        """Token ids of a row's prompt. Raises RowError if there is none, or if it is far too long."""
        return self.encode(self._rendered(row))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt's text. Raises RowError as `tokens` does."""
        if not text:
            raise RowError("the prompt is empty")
        if (space := self.space) and len(text) > (most := LONG * space.capacity):
            begun = len(self._ids(text[:most]))  # all of it could take minutes and gigabytes
            if begun >= 2 * space.capacity and not self.job.truncate_prompt:
                room, larger = f"capacity of {space.capacity}", ", raise capacity"
                if begun >= space.context:
                    room, larger = f"context of {space.context}", ""
                raise RowError(
                    f"the prompt has {len(text)} characters, of which the first {most} are {begun} tokens; it does not "
                    f"fit the {room} tokens; shorten it{larger}, or let truncate_prompt cut it"
                )
        if not (ids := self._ids(text)):
            raise RowError("the prompt has no tokens")
        return ids

    def _ids(self, text: str) -> list[int]:
        source = f"column {self.column!r}" if self.column else "prompt_template"
        return self._encoded(text, source, special=not self.chat)  # the chat template adds the special tokens

    def _encoded(self, text: str, source: str, special: bool) -> list[int]:
        """The tokens of a text with marks. source: of the text. special: whether the tokenizer puts its own tokens
        around it. Raises RowError."""
        try:
            first, *others = self.marks.split(text)
            ids = list(self.tokenizer(first, add_special_tokens=special)["input_ids"])
            after = self._after if special and others else []
            ids = ids[: len(ids) - len(after)]
            for piece in filter(None, others):
                marked = self.special.get(piece)
                given = {"split_special_tokens": True} if marked else {}
                ids += self.tokenizer(marked or piece, add_special_tokens=False, **given)["input_ids"]
        except Exception as error:  # for example, for half a surrogate pair
            raise RowError(f"{source}: the tokenizer failed: {type(error).__name__}: {error}") from error
        return ids + after

    @cached_property
    def _after(self) -> list[int]:
        """The tokens that the tokenizer puts after a text, such as an end token."""
        bare, whole = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
        ends = (end for end in range(len(bare), len(whole) + 1) if bare and whole[end - len(bare) : end] == bare)
        return list(whole[next(ends, len(whole)) :])

    def given(self, row: Row) -> list[list[int]] | None:
        """The tokens of the completions of a row in a scoring job. Raises RowError."""
        if not self.job.reads or self.job.embeds:
            return None
        source = f"column {self.job.given!r}" if self.job.given else "choices"
        values = self.job.completions(self._values(row))
        if not isinstance(values, list) or not values:
            raise RowError(f"{source}: expected a list of choices, not {'null' if values is None else shown(values)}")
        return [self._completion(value, source) for value in values]

    def _completion(self, value: Any, source: str) -> list[int]:
        """The tokens of a completion: those of its text without special tokens, or the given ones."""
        if isinstance(value, list) and value and all(map(_is_token, value)):
            return value
        if not isinstance(value, str) or not value:
            given = "null" if value is None else shown(value)
            raise RowError(f"{source}: expected a non-empty text or list of token ids, not {given}")
        if self.space and len(value) > (most := LONG * self.space.capacity):
            raise RowError(f"{source}: a completion has {len(value)} characters; expected at most {most}")
        if not (tokens := self._encoded(self._marked(value), source, special=False)):
            raise RowError(f"{source}: a completion has no tokens")
        return tokens

    def request(self, row: Row, shard: Shard, number: int) -> Request:
        """The engine request of a row, identified by shard and row number. Raises RowError."""
        job, own = self.job, self.settings(row, shard, number)
        tokens, _ = self.fitted(row, own.max_new_tokens)
        try:
            sampling = Sampling(**job.sampling | own.sampling)
        except ValueError as error:
            raise RowError(str(error)) from error
        return Request(
            id=(shard.name, number),
            prompt=tokens,
            max_new_tokens=own.max_new_tokens,
            sampling=sampling,
            stop=StopStrings(self.tokenizer, own.stop, job.min_new_tokens) if own.stop else None,
            logprobs=own.logprobs,
            adapter=own.adapter,
            **asked(self.answers),
        )

    def settings(self, row: Row, shard: Shard, number: int) -> RowSettings:
        """The settings of a row: the job's, overridden by columns. Raises RowError."""
        job, row = self.job, self._values(row)
        seed = _override(row, job.seed_column, row_seed(job.seed, shard, number), _is_seed, "a whole number of 63 bits")
        length = _override(row, job.max_new_tokens_column, job.max_new_tokens, _is_length, "a whole number from 1 up")
        temperature = _override(row, job.temperature_column, job.temperature, _is_temperature, "0 or more")
        if self.answers.longest:  # the label decides the length
            length = self.answers.longest
        if self.json_stop and isinstance(text := row[str(job.stop_column)], str):
            row = row | {str(job.stop_column): _json(job.stop_column, text, "texts")}
        stop = _override(row, job.stop_column, job.stop, are_texts, "non-empty texts", read=lambda value: value)
        if stop and self.answers.constraint:
            raise RowError("stop does not apply to labels, JSON of a schema, or thinking budgets; leave it out")
        sampling = {"temperature": float(temperature), "seed": seed, **(row["sampling"] if self.batch else {})}
        expected = f"a whole number from 0 to {MOST_LIKELY}"
        default = None if self.batch else job.logprobs  # a batch request asks by itself
        logprobs = _override(row, job.logprobs_column, default, _is_likeliest, expected)
        given = self.given(row)
        if given is not None:
            length, logprobs = max(map(len, given)), logprobs or 0
        if self.batch and job.logprobs is None and logprobs is not None:
            raise RowError("body.logprobs: the job keeps no log-probabilities; the setting logprobs turns them on")
        samples = _override(row, job.n_column, job.n or 1, _is_count, f"a whole number from 1 to {MOST_SAMPLES}")
        if self.batch and job.n is None and samples > 1:
            raise RowError("body.n: the job keeps one sample; the setting n turns lists of samples on")
        if job.best_of:
            samples, logprobs = job.best_of if temperature > 0 else 1, logprobs or 0
        if samples > 1 and temperature == 0:
            raise RowError(f"all {samples} samples would be the same; expected a temperature above 0, not 0")
        stops, adapter = [stop] if isinstance(stop, str) else list(stop), self._adapter(row)
        return RowSettings(length, sampling, stops, logprobs, given, samples, adapter)

    def _adapter(self, row: dict[str, Any]) -> int:
        """The number of a row's adapter. Raises RowError."""
        if not self.job.adapters:
            return 0
        names, target = list(self.job.adapters), anonymous(self.job.target)
        name = row[str(self.job.adapter_column)]
        if name is None or (self.batch and name in (target, target.rsplit("/", 1)[-1])):
            return 0
        if name not in names:
            source = "body.model" if self.batch else f"column {self.job.adapter_column!r}"
            expected = ", ".join([*names, target if self.batch else "null"])
            raise RowError(f"{source}: expected one of {expected}, not {shown(name)}")
        return names.index(name) + 1


def _marks(tokenizer: Any) -> dict[str, str]:
    """The tokenizer's control tokens by mark, the longest first, because one may be a prefix of another.

    A mark is one character, so a template cannot cut it in two.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = sorted(added | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text))
    return {chr(MARK + i): text for i, text in enumerate(texts)}


def prompt_column(job: Job, schema: pa.Schema) -> str:
    """The prompt column. Raises JobError with the columns that the input has."""
    if job.prompt_column is None:
        column = next((c for c in DEFAULT_COLUMNS if c in schema.names), None)
        if column is None:
            found, expected = ", ".join(schema.names), ", ".join(DEFAULT_COLUMNS)
            raise JobError(f"prompt_column: none of {expected} is in the input, which has {found}")
    else:
        column = job.prompt_column
        if column not in schema.names:
            raise JobError(f"prompt_column: {no_column(column, schema.names)}")
    kind = schema.field(column).type
    if not (is_text(kind) or is_list(kind) or is_json(kind) or pa.types.is_null(kind)):
        raise JobError(f"prompt_column: {column!r} is {kind}, expected text or a list of messages")
    return column


def row_seed(seed: int, shard: Shard, number: int) -> int:
    """63 bits from the job's seed and the row's identity, so that a retry samples the same tokens."""
    digest = hashlib.sha256(f"{seed} {shard.name} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _number(value: Any) -> Any:
    """Parse a number that is text, as in CSV. Other values stay as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _override(
    row: dict[str, Any],
    column: str | None,
    default: Any,
    good: Callable[[Any], bool],
    expected: str,
    read: Callable[[Any], Any] = _number,
) -> Any:
    """The value of a column in a row, or the default if it is null. Raises RowError."""
    value = read(row[column]) if column else None
    if value is None:
        return default
    if not good(value):
        raise RowError(f"column {column!r}: expected {expected}, not {shown(value)}")
    return value


def _is_seed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_token(value: Any) -> bool:
    return _is_seed(value) and value < 2**31


def _is_count(value: Any) -> bool:
    return _is_seed(value) and 1 <= value <= MOST_SAMPLES


def _is_likeliest(value: Any) -> bool:
    return _is_seed(value) and value <= MOST_LIKELY


def _is_length(value: Any) -> bool:
    return _is_seed(value) and 1 <= value < 2**31


def _is_temperature(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value <= LARGEST


def _template(source: str, columns: Sequence[str]) -> tuple[jinja2.Template, set[str]]:
    """A template and the names that it uses. Raises JobError for invalid syntax and unknown columns."""
    environment = Sandbox(undefined=jinja2.StrictUndefined)
    try:
        parsed = environment.parse(source)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise JobError(f"prompt_template, line {error.lineno}: {error.message}") from error
    names = jinja2.meta.find_undeclared_variables(parsed)
    strange = sorted(names - set(columns) - set(environment.globals) - _optional(parsed))
    if strange:
        raise JobError(*(f"prompt_template: {no_column(n, columns)}" for n in strange))
    # A column goes before a Jinja global of the same name.
    return template, names | set(environment.globals)


def _optional(parsed: nodes.Template) -> set[str]:
    """The names that may be undefined: the template tests for them, or has a default."""
    tests = [test.node for test in parsed.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    defaults = [found.node for found in parsed.find_all(nodes.Filter) if found.name in ("default", "d")]
    return {node.name for node in (*tests, *defaults) if isinstance(node, nodes.Name)}


def _json(column: str | None, text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"column {column!r}: expected JSON of {expected}, not {shown(text)}: {error}") from error
