"""What a job is: its settings, checked once."""

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator

from exspec.actors.engine.config import SETTINGS
from exspec.actors.engine.settings import Later, Setting
from exspec.pipeline.errors import JobError, meant
from exspec.pipeline.job.functions import Function
from exspec.pipeline.secrets import anonymous

if TYPE_CHECKING:
    import pyarrow as pa

    from exspec.actors.answers.answers import Answers

J = TypeVar("J", bound="Job")


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


AUTO = tuple(name for name, known in SETTINGS.items() if known.measured)  # settings that may be measured
Auto = int | Literal["auto"]
# The headings of the help, in order.
GROUPS = (
    "Models", "Input and output", "Prompts", "Sampling", "Decoding", "Cluster", "Chunks and failures", "Labels",
)  # fmt: skip
# What the engine can compute in float32; its own limits are the same (actors/engine/request.py).
CHUNK, LEAST_CHUNK, ROUNDS = 64, 8, 4  # rows of a chunk, at most and at least; chunks that an actor is to have
SMALLEST, LARGEST, LARGEST_INT, HIGHEST = 1e-6, 1e6, 2**31 - 1, 100
# Of how tokens are chosen, what all rows share.
SHARED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100  (a glob is no path that exists)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def setting(group: str, default: Any, help: str, later: Later = "the same", **limits: Any) -> Any:
    """A field of a job. group: the heading that its option has in the help. later: what it may be in a later run of the
    job."""
    extra = limits.pop("json_schema_extra", {})
    return Field(default, description=help, json_schema_extra={"group": group, "later": later, **extra}, **limits)


def _engines(known: Setting) -> tuple[Any, Any]:
    """A setting of the engine as a job has it: auto where it may be measured, None where that has no default of it."""
    kind, default = known.kind, known.default
    if known.measured:
        default = "auto"
        kind = Literal["auto", *known.choices] if known.choices else kind if kind is str else kind | Literal["auto"]
    elif known.unset or default is None:
        kind, default = kind | None, None
    limits = {} if known.measured else known.limits
    return kind, setting("Decoding", default, known.help, known.later, **limits)


if TYPE_CHECKING:

    class Decoding(BaseModel):
        def __getattr__(self, name: str) -> Any: ...
else:
    Decoding = create_model("Decoding", **{name: _engines(known) for name, known in SETTINGS.items()})


class Job(Decoding):
    """The settings of a job: its own, and those of the engine. A job file (YAML) and the command line have the same
    names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    kind: ClassVar[str] = "generate"

    target: str = setting("Models", ..., "Hub id, folder or fsspec URL of the target model. Default: the demo pair.")
    draft: str | None = setting(
        "Models",
        None,
        "Hub id, folder or fsspec URL of the draft: a small model, or a head for the target.",
        later="any if exact",
    )
    # They may change: what they stand for, a commit, is in the fingerprint.
    target_revision: str | None = setting("Models", None, "Revision of the target on the hub.", later="any")
    draft_revision: str | None = setting("Models", None, "Revision of the draft on the hub.", later="any")
    trust_remote_code: bool = setting("Models", False, "Run Python code that comes with a model.", later="any")
    allow_pickle: bool = setting(
        "Models", False, "Load weights that are no safetensors; such a file can run code.", later="any"
    )

    input: list[str] = setting(
        "Input and output",
        ...,
        "Files, folders or globs, of Parquet, JSONL, CSV or Arrow; fsspec URLs such as s3://bucket/folder.",
        later="any",
    )
    output: str = setting(
        "Input and output",
        ...,
        "Folder for the completions, or a file NAME.jsonl or NAME.csv; an fsspec URL.",
        later="any",
    )
    storage_options: dict[str, Any] = setting(
        "Input and output", {}, "Options of the file systems, as fsspec takes them.", later="any"
    )

    prompt_column: str | None = setting(
        "Prompts",
        None,
        "Column of the prompts: text, or a list of messages. Default: the first of messages, prompt, message, text.",
    )
    prompt_template: str | None = setting("Prompts", None, "Jinja template of the prompt over a row's columns.")
    chat: bool | None = setting(
        "Prompts", None, "Wrap the prompt in the tokenizer's chat template. Default: where it has one."
    )
    system_prompt: str | None = setting("Prompts", None, "System message before every chat that has none of its own.")
    template_arguments: dict[str, Any] = setting(
        "Prompts",
        {},
        "Arguments of the chat template, as NAME=VALUE: enable_thinking=false of Qwen3.",
        json_schema_extra={"flag": True},
    )
    truncate_prompt: bool = setting(
        "Prompts", False, "Cut off the beginning of a prompt that is too long, instead of refusing the row."
    )
    allow_special: bool = setting(
        "Prompts", False, "Read control tokens in a row's own text as such; unless allowed they are text."
    )
    id_column: str | None = setting(
        "Input and output",
        None,
        "Column of the ids; an empty name is none. Default: id where there is one, else shard and row number.",
    )
    carry: list[str] | None = setting("Input and output", None, "Input columns to carry through. Default: all.")
    max_new_tokens_column: str | None = setting("Sampling", None, "Column that overrides max_new_tokens by row.")
    temperature_column: str | None = setting("Sampling", None, "Column that overrides temperature by row.")
    seed_column: str | None = setting("Sampling", None, "Column that overrides a row's seed.")
    stop_column: str | None = setting("Sampling", None, "Column that overrides stop by row: text, or a list of texts.")

    max_new_tokens: int = setting("Sampling", 256, "Tokens of a completion, at most.", ge=1, le=LARGEST_INT)
    temperature: float = setting("Sampling", 0.0, "0 is greedy.", ge=0, le=LARGEST)
    top_p: float = setting(
        "Sampling", 1.0, "Keep the smallest set of tokens whose probability reaches this.", gt=0, le=1
    )
    top_k: int = setting("Sampling", 0, "Keep the k likeliest tokens; 0 is all.", ge=0, le=LARGEST_INT)
    repetition_penalty: float = setting("Sampling", 1.0, "As in transformers; 1 is off.", ge=SMALLEST, le=LARGEST)
    presence_penalty: float = setting(
        "Sampling",
        0.0,
        "Taken off the logits of tokens that the completion has, as in OpenAI's API.",
        ge=-HIGHEST,
        le=HIGHEST,
    )
    frequency_penalty: float = setting(
        "Sampling", 0.0, "The same, for every time that it has them.", ge=-HIGHEST, le=HIGHEST
    )
    min_p: float = setting("Sampling", 0.0, "Drop tokens less likely than this share of the likeliest.", ge=0, le=1)
    min_new_tokens: int = setting("Sampling", 0, "Tokens of a completion, at least.", ge=0, le=LARGEST_INT)
    ignore_eos: bool = setting("Sampling", False, "Go on after an end token, up to max_new_tokens.")
    bad_words: list[str] = setting("Sampling", [], "Texts whose tokens a completion never has in a row.")
    bad_words_ids: list[list[Annotated[int, Field(ge=0)]]] = setting(
        "Sampling", [], "The same by token: lists of token ids that a completion never has in a row."
    )
    model_sampling: bool = setting(
        "Sampling",
        False,
        "Take sampling settings that are not given from the target's generation config, as generate of transformers.",
        later="any",
    )
    seed: int = setting("Sampling", 0, "Seed of the job; every row's own comes from it and the row's identity.", ge=0)
    stop: list[str] = setting("Sampling", [], "Strings that end a completion; it is cut before them.")

    tune_seconds: float = setting("Decoding", 20.0, "Seconds to measure what is auto, about.", later="any", gt=0)
    tune_from: int = setting(
        "Decoding", 1000, "Rows from which on auto is measured; a smaller job takes defaults.", later="any", ge=1
    )
    memory_gib: float | None = setting(
        "Decoding", None, "Memory of an actor in GiB. Default: what the device has free.", later="any", gt=0
    )
    dtype: Dtype = setting("Models", Dtype.float32, "Dtype of weights and KV.")

    device: str = setting(
        "Cluster", "auto", "cpu, cuda, or auto: cuda where there is one.", later="any", pattern="^(auto|cpu|cuda)$"
    )
    threads: int = setting("Cluster", 1, "CPU threads of an actor.", later="any", ge=1)
    actors: Annotated[str, Field(pattern=r"^(auto|\d+(:\d+)?)$")] = setting(
        "Cluster",
        "auto",
        "A number of actors, MIN:MAX, or auto: one a GPU, or as many as cores and memory carry.",
        later="any",
    )
    num_gpus: float | None = setting(
        "Cluster", None, "GPUs of an actor. Default: 1 on cuda, 0 on cpu.", later="any", ge=0
    )
    rows_per_chunk: Auto = setting(
        "Chunks and failures",
        "auto",
        f"Rows of a chunk: the unit of dispatch, commit and resume. auto: {CHUNK}, fewer where actors would be idle.",
        later="any",
    )
    chunks_in_flight: int = setting(
        "Chunks and failures", 4, "Chunks that an actor works on at once, at least.", later="any", ge=1
    )
    attempts: int = setting("Chunks and failures", 6, "Attempts at a chunk before it is set aside.", later="any", ge=1)
    max_error_share: float | None = setting(
        "Chunks and failures",
        None,
        "Share of rows with an error from which on the job stops and has failed. Default: only where all rows fail.",
        later="any",
        ge=0,
        le=1,
    )
    max_write_failures: int = setting(
        "Chunks and failures",
        3,
        "Chunks whose part could not be written, after which the job stops.",
        later="any",
        ge=1,
    )
    wait: bool = setting(
        "Chunks and failures",
        False,
        "Wait where another run is at work on the output, and go on when it is done.",
        later="any",
    )
    notify: str | None = setting(
        "Chunks and failures",
        None,
        "URL that is told how the job ended: its code and figures, as JSON.",
        later="any",
        pattern="^https?://",
    )
    map: Function | None = setting(
        "Input and output", None, "MODULE:FUNCTION, from a pyarrow Table of rows to one of as many, before all else."
    )
    map_output: Function | None = setting(
        "Input and output", None, "The same over the output's rows: the new columns that it makes are written too."
    )
    limit: int | None = setting("Input and output", None, "Take the first rows only.", later="any if exact", ge=1)
    since: str | None = setting(
        "Input and output",
        None,
        "Leave out shards that are done, even where they have vanished: last; and older ones: a date.",
        later="any",
    )
    ray_address: str | None = setting(
        "Cluster", None, "Address of a Ray cluster. Default: RAY_ADDRESS, or a local one.", later="any"
    )

    @field_validator("input", "stop", "bad_words", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator(*(n for n in AUTO if SETTINGS[n].kind is int), "rows_per_chunk", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        if number != "auto" and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError("expected a whole number from 1 up, or auto")
        return number

    @field_validator("template_arguments", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """From the line, as NAME=VALUE, where a value that is JSON is what it says."""
        if not isinstance(value, list):
            return value
        pairs = [str(text).partition("=") for text in value]
        if bad := [name for name, equals, _ in pairs if not (name and equals)]:
            raise ValueError(f"expected NAME=VALUE, not {bad[0]!r}")
        return {name: _json(text) for name, _, text in pairs}

    @field_validator("temperature")
    @classmethod
    def _computable(cls, value: float) -> float:
        if 0 < value < SMALLEST:
            raise ValueError(f"expected 0 (greedy), or {SMALLEST:g} or more")
        return value

    @field_validator("stop", "bad_words")
    @classmethod
    def _no_empty_text(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("expected strings that are not empty")
        return value

    @field_validator("bad_words_ids")
    @classmethod
    def _no_empty_word(cls, value: list[list[int]]) -> list[list[int]]:
        if not all(value):
            raise ValueError("expected lists of one token id or more")
        return value

    @field_validator("input", "output")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        """Local paths count from where the job was started, not from where its processes run."""
        if not value or not all(value):
            raise ValueError("expected a path or URL")
        return [_absolute(v) for v in value] if isinstance(value, list) else _absolute(value)

    @field_validator("target", "draft")
    @classmethod
    def _absolute_folder(cls, value: Any) -> Any:
        return _absolute(value) if value is not None and Path(value).is_dir() else value

    @field_validator("since", mode="before")
    @classmethod
    def _since(cls, value: Any) -> Any:
        value = value.isoformat() if isinstance(value, date) else value  # as YAML reads one
        if value not in (None, "last"):
            try:
                datetime.fromisoformat(str(value))
            except ValueError as error:
                raise ValueError("expected last, or a date such as 2026-01-31 or 2026-01-31T06:00:00+00:00") from error
        return value

    @field_validator("actors", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _consistent(self) -> "Job":
        if self.prompt_column and self.prompt_template:
            raise ValueError("prompt_column and prompt_template exclude each other")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens is {self.min_new_tokens}, above max_new_tokens ({self.max_new_tokens})")
        if "auto" not in (self.window, self.batch_size) and int(self.window) < int(self.batch_size):
            raise ValueError(f"window is {self.window}, expected at least batch_size ({self.batch_size})")
        if min(self.actor_range) < 1 or self.actor_range[0] > self.actor_range[1]:
            raise ValueError(f"actors is {self.actors}, expected a number or MIN:MAX, from 1 up")
        return self

    def published(self) -> dict[str, Any]:
        """The settings as they may be written beside the output: without what may hold a secret, and without leave to
        run code, which whoever reads that output has to give anew."""
        settings = self.model_dump(mode="json", exclude={"storage_options", "notify", *PERMISSIONS})
        named = {"output": anonymous(self.output), "input": [anonymous(url) for url in self.input]}
        models = {"target": anonymous(self.target), "draft": self.draft and anonymous(self.draft)}
        return settings | named | models

    @property
    def functions(self) -> dict[str, Function]:
        """The user's functions, by setting."""
        return {name: given for name in ("map", "map_output") if (given := getattr(self, name))}

    @property
    def inlined(self) -> dict[str, str]:
        """Settings that stood in files of their own, which another machine does not have."""
        return {name: function.model_dump_json() for name, function in self.functions.items()}

    @property
    def sampling(self) -> dict[str, Any]:
        """Of how tokens are chosen, what all rows share."""
        return {name: getattr(self, name) for name in SHARED}

    def answers(self, tokenizer: Any) -> "Answers":
        """What completions are held to and read as. Raises AnswerError where the tokenizer cannot write it."""
        from exspec.actors.answers.answers import FreeText

        words = FreeText(tokenizer, self.min_new_tokens, self.ignore_eos, self.bad_words)
        limits: dict[str, Any] = words.limits
        limits["bad_words"] += tuple(map(tuple, self.bad_words_ids))
        return words

    def answer_columns(self) -> "pa.Schema":
        """The columns that answers fill."""
        import pyarrow as pa

        return pa.schema([])

    @property
    def kept_columns(self) -> dict[str, list[str]]:
        """Input columns that the output must have, by the setting that names them."""
        return {}

    @property
    def value_columns(self) -> list[str]:
        """Those of them that follow from the completion's text alone."""
        return []

    def evaluate(self, read: "Callable[[list[str]], Iterator[pa.Table]]") -> dict[str, Any]:  # noqa: ARG002
        """Figures of the answers, by field. read: columns of all parts, one table after the other."""
        return {}

    @property
    def newer_than(self) -> datetime | None:
        """The time after which a new shard must have been written; without a zone, it is UTC."""
        if self.since in (None, "last"):
            return None
        time = datetime.fromisoformat(str(self.since))
        return time if time.tzinfo else time.replace(tzinfo=UTC)

    @property
    def actor_range(self) -> tuple[int, int]:
        """How many actors there are to be, at least and at most; auto is as many as the cores of this machine carry."""
        if self.actors == "auto":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            return (max(1, cores // self.threads),) * 2
        low, _, high = self.actors.partition(":")
        return int(low), int(high or low)

    def chunk_rows(self, rows: int) -> int:
        """Rows of a chunk, where a job has so many."""
        if self.rows_per_chunk != "auto":
            return int(self.rows_per_chunk)
        return min(CHUNK, max(LEAST_CHUNK, -(-rows // (ROUNDS * self.actor_range[1]))))


# Leave to run code that comes with a model.
PERMISSIONS = {"trust_remote_code", "allow_pickle"}


def load_job(kind: type[J], file: Path | None, flags: dict[str, Any], pair: dict[str, str] | None = None) -> J:
    """A job of a kind from a YAML file and the flags that override it; `pair` is the target and draft if it names none.

    Raises JobError with every problem at once, each with the path of its key, and with the file where that has it.
    """
    settings = read_job_file(file) | flags
    if not {"target", "draft"} & set(settings):
        settings |= pair or {}
    try:
        return kind(**settings)
    except ValidationError as error:
        found = [(e, bool(flags) if not e["loc"] else e["loc"][0] in flags) for e in error.errors()]
        raise JobError(*(problem(e, None if flagged else file, kind) for e, flagged in found)) from error


def read_job_file(file: Path | None) -> dict[str, Any]:
    """The settings as the file has them, unchecked; none without a file. Raises JobError naming what is wrong."""
    if file is None:
        return {}
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise JobError(f"job file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"job file {file}: not UTF-8 text (byte {error.start})") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise JobError(f"job file {file}{place}: not YAML: {' '.join(problem.split())}") from error
    if not isinstance(settings, dict):
        raise JobError(f"job file {file}: expected settings by name, not {type(settings).__name__}")
    return settings


def problem(error: Any, file: Path | None, kind: type[Job]) -> str:
    """What is wrong with a setting of a job, with the path of its key. error: as pydantic has it. file: that has it."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = kind.model_fields
        message = "unknown setting" + (meant(key, known) or f", expected one of {', '.join(known)}")
    elif error["type"] == "missing":
        message = "is missing"
        message += "; where draft is given, so has target to be" if key == "target" else ""
    elif key == "notify":  # its path may be a secret
        message = "expected http://HOST/... or https://HOST/..."
    elif error["type"] == "string_pattern_mismatch":
        told = str(Job.model_fields[key].description).removesuffix(".")
        message = f"expected {told[0].lower()}{told[1:]}, not {error['input']!r}"
    else:
        message = error["msg"].removeprefix("Value error, ")
        complete = error["type"] == "value_error" and (", not " in message or not message.startswith("expected"))
        if key and not complete and not key.startswith("storage_options"):  # they may hold a secret
            message += f", not {error['input']!r}"
    place = f"{file}: " if file else ""
    return f"{place}{key}: {message}" if key else f"{place}{message}"


def settings() -> dict[str, Any]:
    """The fields of all kinds of jobs, by name."""
    return {name: field for kind in _kinds(Job) for name, field in kind.model_fields.items()}


def grouped(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields in the order of their headings."""
    return dict(sorted(fields.items(), key=lambda item: GROUPS.index(item[1].json_schema_extra["group"])))


def defaults() -> dict[str, Any]:
    """The default of every setting that has one."""
    return {n: getattr(f.default, "value", f.default) for n, f in settings().items() if not f.is_required()}


def _kinds(kind: type[Job]) -> Iterator[type[Job]]:
    yield kind
    for special in kind.__subclasses__():
        yield from _kinds(special)
