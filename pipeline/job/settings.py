"""The settings of a job, checked once."""

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from exspec.actors.engine.config import SETTINGS
from exspec.actors.engine.request import HIGHEST, LARGEST, LARGEST_INT, MOST_LIKELY, SMALLEST
from exspec.actors.engine.settings import Later, Setting
from exspec.pipeline.errors import JobError, did_you_mean
from exspec.pipeline.job.functions import Function
from exspec.pipeline.secrets import anonymous, no_url

if TYPE_CHECKING:
    import pyarrow as pa

    from exspec.actors.answers.answers import Answers
    from exspec.actors.samples import Draws

J = TypeVar("J", bound="Job")


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


AUTO = tuple(name for name, known in SETTINGS.items() if known.measured)  # settings that calibration can choose
Auto = int | Literal["auto"]
FROM = "from:"  # a draft that another job has trained; its output follows
RULES = "\n"  # between the messages of rules that a job breaks, in one error of pydantic
# The headings of the help, in order.
GROUPS = (
    "Models", "Input and output", "Prompts", "Sampling", "Decoding", "Cluster", "Chunks and failures", "Labels",
    "Scores", "Embeddings",
)  # fmt: skip
CHUNK, LEAST_CHUNK = 64, 8  # rows of a chunk: maximum and minimum where rows_per_chunk is auto
ROUNDS = 4  # chunks that each actor should get
MOST_SAMPLES = 1024  # of a row
ALIKE = "n and best_of need a temperature above 0: without it all samples of a row are the same"
LONGEST_THINKING = 2**20  # tokens
# Sampling settings that all rows share.
SHARED = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _absolute(path: str) -> str:
    if reason := no_url(path):
        raise ValueError(reason)
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100  (a glob does not exist as a path)


def _local(name: str) -> str:
    """A folder of this machine as an absolute path; hub ids and URLs as they are."""
    return _absolute(name) if Path(name).is_dir() else name


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def setting(group: str, default: Any, help: str, later: Later = "the same", **limits: Any) -> Any:
    """A field of a job. group: the heading of its option in the help. later: its value in a later run of the job."""
    extra = limits.pop("json_schema_extra", {})
    return Field(default, description=help, json_schema_extra={"group": group, "later": later, **extra}, **limits)


_models, _files, _prompts, _sampling, _decoding, _cluster, _chunks, *_ = (partial(setting, name) for name in GROUPS)


def _engines(known: Setting) -> tuple[Any, Any]:
    """Type and field of an engine setting in a job. The default is auto if calibration can choose it, None if unset."""
    kind, default = known.kind, known.default
    if known.measured:
        default = "auto"
        kind = Literal["auto", *known.choices] if known.choices else kind if kind is str else kind | Literal["auto"]
    elif known.unset or default is None:
        kind, default = kind | None, None
    limits = {} if known.measured else known.limits
    return kind, _decoding(default, known.help, known.later, **limits)


if TYPE_CHECKING:

    class Decoding(BaseModel):
        def __getattr__(self, name: str) -> Any: ...
else:
    Decoding = create_model("Decoding", **{name: _engines(known) for name, known in SETTINGS.items()})


class Job(Decoding):
    """The settings of a job, including those of the engine. Job files (YAML) and flags have the same names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    kind: ClassVar[str] = "generate"
    reads: ClassVar[bool] = False  # whether nothing is generated: completions are given, or prompts are embedded
    embeds: ClassVar[bool] = False

    target: str = _models(..., "Target model: hub id, folder or fsspec URL. Default: the demo pair.")
    draft: str | None = _models(None, "Draft or head: hub id, folder, fsspec URL, or from:OUTPUT.", "any if exact")
    # Revisions may change: the fingerprint holds the commits that they stand for.
    target_revision: str | None = _models(None, "Revision of the target on the hub.", "any")
    draft_revision: str | None = _models(None, "Revision of the draft on the hub.", "any")
    adapter: str | None = _models(None, "LoRA adapter of all rows, as peft saves it: a folder or fsspec URL.")
    adapters: dict[str, str] = _models(
        {}, "LoRA adapters for adapter_column, each as NAME=FOLDER.", json_schema_extra={"flag": True}
    )
    adapter_column: str | None = _models(None, "Column of the names of adapters. A row with null has none.")
    trust_remote_code: bool = _models(False, "Run Python code that comes with a model.", "any")
    allow_pickle: bool = _models(False, "Load weights that are not safetensors. Such a file can run code.", "any")

    input: list[str] = _files(
        ..., "Parquet, JSONL, CSV or Arrow files: paths, folders, globs, or fsspec URLs such as s3://bucket/in.", "any"
    )
    output: str = _files(..., "Output folder, or a file such as NAME.jsonl. A path or fsspec URL.", "any")
    storage_options: dict[str, Any] = _files({}, "Options of the file systems, as fsspec takes them.", "any")

    prompt_column: str | None = _prompts(
        None, "Column of prompts: text, or a list of messages. Default: the first of messages, prompt, message, text."
    )
    prompt_template: str | None = _prompts(None, "Jinja template of the prompt, over the row's columns.")
    chat: bool | None = _prompts(None, "Apply the tokenizer's chat template. Default: on if the tokenizer has one.")
    system_prompt: str | None = _prompts(None, "System message for every chat that has none.")
    template_arguments: dict[str, Any] = _prompts(
        {}, "Chat template arguments as NAME=VALUE, such as enable_thinking=false.", json_schema_extra={"flag": True}
    )
    truncate_prompt: bool = _prompts(False, "Cut the start of a prompt that is too long, instead of rejecting the row.")
    allow_special: bool = _prompts(False, "Read control tokens in a row's text as control tokens.")
    id_column: str | None = _files(
        None, "Column of row ids; an empty name means none. Default: id if the input has it, else shard and row number."
    )
    carry: list[str] | None = _files(None, "Input columns to copy to the output. Default: all.")
    bad_lines: Literal["refuse", "error"] = _files(
        "refuse",
        "A line of JSONL or CSV that cannot be read: refuse the job, or write an error row in its place.",
        "any",
    )
    max_new_tokens_column: str | None = _sampling(None, "Column that overrides max_new_tokens per row.")
    temperature_column: str | None = _sampling(None, "Column that overrides temperature per row.")
    seed_column: str | None = _sampling(None, "Column that overrides the seed per row.")
    stop_column: str | None = _sampling(None, "Column that overrides stop per row: text, or a list of texts.")
    logprobs_column: str | None = _sampling(None, "Column that overrides logprobs per row.")
    n_column: str | None = _sampling(None, "Column that overrides n per row.")

    max_new_tokens: int = _sampling(256, "Maximum tokens of a completion.", ge=1, le=LARGEST_INT)
    temperature: float = _sampling(0.0, "Sampling temperature; 0 is greedy.", ge=0, le=LARGEST)
    top_p: float = _sampling(1.0, "Keep the smallest set of tokens whose probabilities add up to this.", gt=0, le=1)
    top_k: int = _sampling(0, "Keep the k likeliest tokens; 0 keeps all.", ge=0, le=LARGEST_INT)
    repetition_penalty: float = _sampling(1.0, "As in transformers; 1 is off.", ge=SMALLEST, le=LARGEST)
    presence_penalty: float = _sampling(
        0.0, "As in OpenAI's API, subtracted from logits of tokens in the completion.", ge=-HIGHEST, le=HIGHEST
    )
    frequency_penalty: float = _sampling(0.0, "Like presence_penalty, per occurrence.", ge=-HIGHEST, le=HIGHEST)
    min_p: float = _sampling(0.0, "Drop tokens below this fraction of the highest probability.", ge=0, le=1)
    min_new_tokens: int = _sampling(0, "Minimum tokens of a completion.", ge=0, le=LARGEST_INT)
    ignore_eos: bool = _sampling(False, "Generate max_new_tokens tokens, past any end token.")
    bad_words: list[str] = _sampling([], "Texts whose token sequences a completion must not contain.")
    bad_words_ids: list[list[Annotated[int, Field(ge=0, strict=True)]]] = _sampling(
        [], "Like bad_words, as lists of token ids."
    )
    model_sampling: bool = _sampling(False, "Use the target's generation config for unset sampling settings.", "any")
    seed: int = _sampling(0, "Seed of the job. Each row's seed is derived from it.", ge=0)
    stop: list[str] = _sampling([], "Strings that end a completion. They are not part of the output.")
    logprobs: int | None = _sampling(
        None, "Keep the log-probability of each token, and of the N likeliest ones.", ge=0, le=MOST_LIKELY
    )

    max_thinking_tokens: int | None = _sampling(
        None,
        "Longest section of thinking, in tokens. It goes to the column thinking.",
        ge=0,
        le=LONGEST_THINKING,
    )
    thinking_markers: list[str] = _sampling(
        [], "The texts that begin and end thinking. Default: <think> and </think>, if the chat template has them."
    )
    thinking_sentence: str | None = _sampling(None, "Text to write before the end marker where thinking is cut off.")
    n: int | None = _sampling(None, "Samples of each row, in the column samples.", ge=1, le=MOST_SAMPLES)
    best_of: int | None = _sampling(
        None, "Draw this many samples of each row, and keep the likeliest, or the n likeliest.", ge=2, le=MOST_SAMPLES
    )

    learn: Literal["off", "auto", "model", "eagle3", "clover", "dflash"] = _decoding(
        "off", "Train a drafter during the job if that saves time: auto, off, or which drafter.", "any"
    )
    tune_seconds: float = _decoding(120.0, "Longest time of a calibration.", "any", gt=0)
    tune_from: int = _decoding(1000, "Calibrate jobs of this many rows or more; others use defaults.", "any", ge=1)
    memory_gib: float | None = _decoding(
        None, "Memory of an actor in GiB, on each of its devices. Default: what is free.", "any", gt=0
    )
    dtype: Dtype = _models(Dtype.float32, "Data type of weights and KV cache.")

    device: str = _cluster("auto", "cpu, cuda, or auto: cuda if there is a GPU.", "any", pattern="^(auto|cpu|cuda)$")
    threads: int = _cluster(1, "CPU threads per actor.", "any", ge=1)
    actors: Annotated[str, Field(pattern=r"^(auto|\d+(:\d+)?)$")] = _cluster(
        "auto", "A number of actors, MIN:MAX, or auto: one per GPU, or as many as cores and memory allow.", "any"
    )
    num_gpus: float | None = _cluster(
        None, "GPUs per actor; they share the target's layers. Default: 1 on cuda, 0 on cpu.", "any", ge=0
    )
    rows_per_chunk: Auto = _chunks("auto", f"Maximum rows per chunk. auto: {CHUNK}, or fewer in small jobs.", "any")
    chunks_in_flight: int = _chunks(4, "Minimum number of chunks that an actor works on at once.", "any", ge=1)
    attempts: int = _chunks(6, "Attempts at a chunk before it is set aside.", "any", ge=1)
    max_error_share: float | None = _chunks(
        None, "Stop and fail above this share of error rows. Default: fail if all rows have one.", "any", ge=0, le=1
    )
    wait: bool = _chunks(False, "If another run works on the output, wait until it ends.", "any")
    map: Function | None = _files(None, "MODULE:FUNCTION over pyarrow Tables, applied to the input first.")
    map_output: Function | None = _files(None, "MODULE:FUNCTION over pyarrow Tables of output rows, to add columns.")
    limit: int | None = _files(None, "Only the first N rows.", "any if exact", ge=1)
    since: str | None = _files(
        None, "last: skip finished shards, even if their files are gone. A date: skip older shards too.", "any"
    )
    ray_address: str | None = _cluster(None, "Address of a Ray cluster. Default: RAY_ADDRESS, or a local Ray.", "any")

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads yes, no, on and off as truth values, which Python counts as 1 and 0."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (kind, *get_args(kind)):
            raise ValueError("expected a number or text; YAML reads yes, no, on and off as true or false")
        return value

    @field_validator("input", "stop", "bad_words", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator(*(n for n in AUTO if SETTINGS[n].kind is int), "rows_per_chunk", mode="before")
    @classmethod
    def _auto(cls, value: Any, info: ValidationInfo) -> Any:
        number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
        known = SETTINGS.get(str(info.field_name))
        least = int(known.limits["ge"]) if known else 1
        if number != "auto" and (not isinstance(number, int) or isinstance(number, bool) or number < least):
            raise ValueError(f"expected a whole number from {least} up, or auto")
        return number

    @field_validator("template_arguments", "adapters", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: ValidationInfo) -> Any:
        """From the command line as NAME=VALUE. The VALUE of a template argument is parsed if it is JSON."""
        if not isinstance(value, list):
            return value
        pairs = [str(text).partition("=") for text in value]
        if bad := [name for name, equals, _ in pairs if not (name and equals)]:
            raise ValueError(f"expected NAME=VALUE, not {bad[0]!r}")
        names = [name for name, _, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"expected every name once, but {twice[0]!r} is there twice")
        return {name: text if info.field_name == "adapters" else _json(text) for name, _, text in pairs}

    @field_validator("adapters")
    @classmethod
    def _sorted(cls, value: dict[str, str]) -> dict[str, str]:
        """With absolute folders, and in the order of names: numbers must not depend on how the job was written."""
        return {name: _local(value[name]) for name in sorted(value)}

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
            raise ValueError("expected non-empty strings")
        return value

    @field_validator("bad_words_ids")
    @classmethod
    def _no_empty_word(cls, value: list[list[int]]) -> list[list[int]]:
        if not all(value):
            raise ValueError("expected non-empty lists of token ids")
        return value

    @field_validator("input", "output")
    @classmethod
    def _absolute(cls, value: Any) -> Any:
        """Local paths are relative to where the job was started, not to where its processes run."""
        if not value or not all(value):
            raise ValueError("expected a path or URL")
        return [_absolute(v) for v in value] if isinstance(value, list) else _absolute(value)

    @field_validator("target", "draft", "adapter")
    @classmethod
    def _absolute_folder(cls, value: Any) -> Any:
        if value is not None and value.startswith(FROM):
            return f"{FROM}{_absolute(value.removeprefix(FROM))}"
        return None if value is None else _local(value)

    @field_validator("since", mode="before")
    @classmethod
    def _since(cls, value: Any) -> Any:
        value = value.isoformat() if isinstance(value, date) else value  # YAML parses dates
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
        if broken := list(self._broken()):
            raise ValueError(RULES.join(broken))
        return self

    def _broken(self) -> Iterator[str]:
        """What is wrong between settings."""
        if self.prompt_column and self.prompt_template:
            yield "expected prompt_column or prompt_template, not both"
        if self.min_new_tokens > self.max_new_tokens:
            yield f"min_new_tokens is {self.min_new_tokens}, above max_new_tokens ({self.max_new_tokens})"
        if "auto" not in (self.window, self.batch_size) and int(self.window) < int(self.batch_size):
            yield f"window is {self.window}, expected at least batch_size ({self.batch_size})"
        if self.thinking_markers and len(self.thinking_markers) != 2:
            yield f"thinking_markers: expected two texts, not {self.thinking_markers}"
        if self.max_thinking_tokens is None and (self.thinking_markers or self.thinking_sentence):
            yield "thinking_markers and thinking_sentence need max_thinking_tokens"
        limits = ("stop", "stop_column", "min_new_tokens", "ignore_eos", "bad_words", "bad_words_ids")
        if self.max_thinking_tokens is not None and (useless := [name for name in limits if getattr(self, name)]):
            yield f"{useless[0]} does not work with max_thinking_tokens"
        if self.adapter and self.adapters:
            yield "expected adapter or adapters, not both"
        if self.adapter_column and not self.adapters:
            yield "adapter_column needs adapters"
        more = [name for name in ("n", "n_column", "best_of", "max_thinking_tokens") if getattr(self, name) is not None]
        more += ["adapters"] if self.adapters else []
        if more and self.learn != "off":
            yield f"learn does not work with {more[0]}"
        several = (self.n or 1) > 1 or self.best_of
        if several and not (self.temperature or self.temperature_column or self.model_sampling):
            yield ALIKE
        if self.best_of and (self.n_column or (self.n or 1) > self.best_of):
            yield "best_of keeps n of its samples: expected n up to best_of, and no n_column"
        if (gpus := self.num_gpus or 0.0) > 1:
            if gpus != int(gpus):
                yield f"num_gpus is {gpus:g}, expected a whole number, or a share of one GPU"
            if self.learn != "off":
                yield f"learn does not work with num_gpus {gpus:g}: a drafter learns beside a target on one GPU"
            if self.method == "eqspec":
                yield f"method eqspec does not work with num_gpus {gpus:g}: it moves the KV of whole rows"
        if min(self.actor_range) < 1 or self.actor_range[0] > self.actor_range[1]:
            yield f"actors is {self.actors}, expected a number or MIN:MAX, from 1 up"

    def published(self) -> dict[str, Any]:
        """The settings that may be written next to the output: no secrets, and no permission to run code."""
        settings = self.model_dump(mode="json", exclude={"storage_options", *PERMISSIONS})
        named = {"output": anonymous(self.output), "input": [anonymous(url) for url in self.input]}
        models = {name: (url := getattr(self, name)) and anonymous(url) for name in ("target", "draft", "adapter")}
        adapters = {name: anonymous(url) for name, url in self.adapters.items()}
        return settings | named | models | {"adapters": adapters}

    @property
    def functions(self) -> dict[str, Function]:
        """The user's functions, by setting."""
        return {name: given for name in ("map", "map_output") if (given := getattr(self, name))}

    @property
    def inlined(self) -> dict[str, str]:
        """Settings whose content was in a file, with that content: another machine does not have the file."""
        return {name: function.model_dump_json() for name, function in self.functions.items()}

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling settings that all rows share."""
        return {name: getattr(self, name) for name in SHARED}

    def answers(self, tokenizer: Any, ends: frozenset[int] = frozenset()) -> "Answers":
        """How completions are constrained and parsed. ends: end tokens of the target. Raises AnswerError if the
        tokenizer cannot express it."""
        from exspec.actors.answers.thinking import Thoughtful

        form = self.form(tokenizer)
        if self.max_thinking_tokens is None:
            return form
        markers, sentence = self.thinking_markers, self.thinking_sentence
        return Thoughtful(tokenizer, form, self.max_thinking_tokens, markers, sentence, ends)

    def form(self, tokenizer: Any) -> "Answers":
        """The form of the answers, without thinking. Raises AnswerError."""
        from exspec.actors.answers.answers import FreeText

        words = FreeText(tokenizer, self.min_new_tokens, self.ignore_eos, self.bad_words)
        limits: dict[str, Any] = words.limits
        limits["bad_words"] += tuple(map(tuple, self.bad_words_ids))
        return words

    def answer_columns(self) -> "pa.Schema":
        """The columns that answers fill."""
        import pyarrow as pa

        from exspec.actors.answers.logprobs import COLUMNS

        note = {"description": "what the target thought before the completion"}
        thinking = [] if self.max_thinking_tokens is None else [pa.field("thinking", pa.string(), metadata=note)]
        columns = [*thinking, *self.form_columns(), *(COLUMNS if self.keeps_logprobs else [])]
        return pa.schema([*columns, *([_samples(columns)] if self.listed else [])])

    @property
    def draws(self) -> "Draws":
        """What is kept of a row's samples."""
        from exspec.actors.samples import Draws

        best = (self.n or 1) if self.best_of else None
        return Draws(self.best_of or self.n or 1, best, self.listed)

    @property
    def listed(self) -> bool:
        """Whether rows have the column of samples."""
        return self.n is not None or self.n_column is not None

    @property
    def given(self) -> str | None:
        """The column that the given completions are in."""
        return None

    def completions(self, row: dict[str, Any]) -> Any:  # noqa: ARG002
        """The given completions of a row: a list, unless the row is wrong."""
        return None

    @property
    def keeps_logprobs(self) -> bool:
        """Whether rows may have log-probabilities."""
        return not (self.logprobs is None and self.logprobs_column is None and self.best_of is None)

    def form_columns(self) -> "pa.Schema":
        """The columns that the form of the answers has."""
        import pyarrow as pa

        return pa.schema([])

    @property
    def kept_columns(self) -> dict[str, list[str]]:
        """Input columns that the output must contain, by the setting that names them."""
        return {}

    @property
    def value_columns(self) -> list[str]:
        """The answer columns that an audit computes again and compares."""
        return [] if self.max_thinking_tokens is None else ["thinking"]

    def evaluate(self, read: "Callable[[list[str]], Iterator[pa.Table]]") -> dict[str, Any]:  # noqa: ARG002
        """Figures of the answers, by field. read: reads the given columns of all parts."""
        return {}

    @property
    def newer_than(self) -> datetime | None:
        """New shards must have been written after this time. A time without a zone is UTC."""
        if self.since in (None, "last"):
            return None
        time = datetime.fromisoformat(str(self.since))
        return time if time.tzinfo else time.replace(tzinfo=UTC)

    @property
    def actor_range(self) -> tuple[int, int]:
        """Minimum and maximum number of actors. auto: as many as this machine has cores for."""
        if self.actors == "auto":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            return (max(1, cores // self.threads),) * 2
        low, _, high = self.actors.partition(":")
        return int(low), int(high or low)

    def chunk_rows(self, rows: int) -> int:
        """Rows of a chunk in a job of this many rows."""
        if self.rows_per_chunk != "auto":
            return int(self.rows_per_chunk)
        at_once = min(CHUNK, max(1, MOST_SAMPLES // self.draws.count))  # an actor holds all samples
        return min(at_once, max(LEAST_CHUNK, -(-rows // (ROUNDS * self.actor_range[1]))))


# Permissions to run code that comes with a model.
PERMISSIONS = {"trust_remote_code", "allow_pickle"}


def _samples(columns: "list[pa.Field]") -> "pa.Field":
    """The column of a row's samples. columns: those that answers fill."""
    import pyarrow as pa

    own = {
        "completion": pa.string(), "finish_reason": pa.string(), "error": pa.string(), "completion_tokens": pa.int32(),
        "seed": pa.int64(),
    }  # fmt: skip
    kind = pa.list_(pa.struct([*(pa.field(name, kind) for name, kind in own.items()), *columns]))
    return pa.field("samples", kind, metadata={"description": "all samples that are kept, with their own columns"})


def load_job(kind: type[J], file: Path | None, flags: dict[str, Any], pair: dict[str, str] | None = None) -> J:
    """A job from a YAML file and the flags that override it. pair: target and draft if neither names one.

    Raises JobError with all problems at once. Each names the key, and the file if the key is from the file.
    """
    settings = read_job_file(file) | flags
    if not {"target", "draft"} & set(settings):
        settings |= pair or {}
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        wrong = [e for e in error.errors() if e["loc"]]
        rules = _broken_rules(kind, settings, {str(e["loc"][0]) for e in wrong}) if wrong else error.errors()
        found: list[Any] = [*wrong, *({**e, "msg": line} for e in rules for line in e["msg"].split(RULES))]
        flagged = [e["loc"][0] in flags if e["loc"] else bool(flags) for e in found]
        problems = [problem(e, None if flag else file, kind) for e, flag in zip(found, flagged, strict=True)]
        raise JobError(*problems) from error


def _broken_rules(kind: type[J], settings: dict[str, Any], wrong: set[str]) -> list[Any]:
    """The errors of rules between the other settings: pydantic tries no rule if a setting is wrong by itself."""
    sound = {"target": "none", "input": "none", "output": "none"}
    sound |= {name: value for name, value in settings.items() if name not in wrong}
    try:
        kind.model_validate(sound)
    except ValidationError as error:
        return [e for e in error.errors() if not any(name in e["msg"] for name in wrong)]
    return []


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML itself would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := [key for i, (key, _) in enumerate(node.value) if key.value in keys[:i]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0].value} is given twice", twice[0].start_mark)
        return super().construct_mapping(node, deep)


def read_job_file(file: Path | None) -> dict[str, Any]:
    """The unchecked settings of a job file. Raises JobError if it cannot be read."""
    if file is None:
        return {}
    try:
        settings = yaml.load(file.read_text(encoding="utf-8"), _Loader) or {}  # a SafeLoader
    except OSError as error:
        raise JobError(f"job file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"job file {file}: not UTF-8 text (byte {error.start})") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        reason = "" if isinstance(error, yaml.constructor.ConstructorError) else "not YAML: "
        raise JobError(f"job file {file}{place}: {reason}{' '.join(problem.split())}") from error
    if not isinstance(settings, dict):
        raise JobError(f"job file {file}: expected a mapping of settings, not {type(settings).__name__}")
    return settings


def problem(error: Any, file: Path | None, kind: type[Job]) -> str:
    """The message for a wrong setting. error: from pydantic. file: the job file, if the setting is from it."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = kind.model_fields
        message = "unknown setting" + (did_you_mean(key, known) or f", expected one of {', '.join(known)}")
    elif error["type"] == "missing":
        message = "is not set" + ("; a draft needs a target" if key == "target" else "")
    elif error["type"] == "string_pattern_mismatch":
        expected = str(Job.model_fields[key].description).removesuffix(".")
        message = f"expected {expected[0].lower()}{expected[1:]}, not {error['input']!r}"
    else:
        message = error["msg"].removeprefix("Value error, ")
        complete = error["type"] == "value_error" and (", not " in message or not message.startswith("expected"))
        if key and not complete and not key.startswith("storage_options"):  # may hold a secret
            message += f", not {error['input']!r}"
    place = f"{file}: " if file else ""
    return f"{place}{key}: {message}" if key else f"{place}{message}"


def grouped(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields in the order of the headings."""
    return dict(sorted(fields.items(), key=lambda item: GROUPS.index(item[1].json_schema_extra["group"])))
