"""Labeling jobs: the possible answers, their columns, and their comparison with known labels."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pydantic import field_validator

from exspec.pipeline.job.settings import Job, setting
from exspec.pipeline.output.columns import carried_as

if TYPE_CHECKING:
    from exspec.actors.answers.answers import Answers

_TYPES = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_CHOICE = {
    "": (pa.string(), "the label"),
    "_confidence": (pa.float32(), "the label's probability among the labels"),
    "_runner_up": (pa.string(), "the likeliest other label, or labels if they share a prefix"),
    "_runner_up_confidence": (pa.float32(), "the runner-up's probability among the labels"),
}


_labels = partial(setting, "Labels")


class LabelJob(Job):
    """A job whose completions are a label of a list, a label for each of several fields, or JSON of a schema."""

    kind: ClassVar[str] = "label"

    labels: list[str] = _labels([], "The labels; each row gets one of them.")
    fields: dict[str, list[str]] = _labels(
        {}, "Labels by field, for several labels per row, each as NAME=LABEL,LABEL.", json_schema_extra={"flag": True}
    )
    json_schema: str | None = _labels(None, "JSON schema of the answer, or a file with it.")
    json_spaces: bool = _labels(True, 'Write {"a": 1, "b": 2}, as most models do, not {"a":1,"b":2}.')
    label_column: str = _labels("label", "Column of the label, or prefix of the columns of several fields.")
    gold_column: list[str] = _labels([], "Column of known labels. With fields: FIELD=COLUMN.", "any")
    review_share: float | None = _labels(None, "Share of rows, the least certain, for _review.csv.", "any", gt=0, le=1)

    @field_validator("gold_column", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("labels", mode="before")
    @classmethod
    def _label_texts(cls, value: Any) -> Any:
        return as_texts([value] if isinstance(value, str) else value)

    @field_validator("fields", mode="before")
    @classmethod
    def _by_field(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: as_texts(labels) for name, labels in value.items()}
        if not isinstance(value, list):
            return value
        pairs = [str(text).partition("=") for text in value]
        if bad := [name for name, _, labels in pairs if not (name and labels)]:
            raise ValueError(f"expected NAME=LABEL,LABEL, not {bad[0]!r}")
        names = [name for name, _, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]} is given twice; expected one NAME=LABEL,LABEL with all labels")
        return {name: [label.strip() for label in labels.split(",")] for name, _, labels in pairs}

    @field_validator("json_schema", mode="before")
    @classmethod
    def _content(cls, value: Any) -> Any:
        """The schema itself, so that the job does not need the file."""
        if isinstance(value, str) and not value.lstrip().startswith("{"):
            try:
                value = Path(value).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot be read: {error}") from error
        try:
            schema = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        if schema is not None and not isinstance(schema, dict):
            raise ValueError("expected a JSON object")
        return None if schema is None else json.dumps(schema)

    def _broken(self) -> Iterator[str]:
        yield from super()._broken()
        given = [name for name in ("labels", "fields", "json_schema") if getattr(self, name)]
        if len(given) != 1:
            yield f"expected one of labels, fields and json_schema, not {' and '.join(given) or 'none'}"
            return
        for name, labels in self.choices.items():
            place = f"fields.{name}" if name else "labels"
            if len(labels) < 2 or len(set(labels)) < len(labels) or not all(labels):
                hint = "; give --labels once per label" if not name and "," in "".join(labels) else ""
                yield f"{place}: expected two or more distinct, non-empty labels, not {labels}{hint}"
        names = self.answer_columns().names
        if twice := [name for name in names if names.count(name) > 1]:
            yield f"two answers would have the column {twice[0]!r}; rename a field or property"
        limits = ("min_new_tokens", "ignore_eos", "bad_words", "bad_words_ids")
        if useless := [name for name in limits if getattr(self, name)]:
            yield f"{useless[0]} does not apply to a labeling job: its answers are constrained"
        if self.stop or self.stop_column:
            yield "stop and stop_column do not apply to a labeling job: an answer ends when it is complete"
        if self.choices and self.max_new_tokens_column:
            yield "max_new_tokens_column does not apply to labels: an answer is as long as its label"
        if not self.classes and (self.gold_column or self.review_share):
            yield "gold_column and review_share need labels, fields, or a schema property with an enum"
        elif unknown := [name for name in self.gold if name not in self.classes]:
            expected = "a column" if self.labels else f"FIELD=COLUMN with one of {', '.join(self.classes)}"
            wrong = next(text for text in self.gold_column if text.rpartition("=")[0] == unknown[0])
            yield f"gold_column: expected {expected}, not {wrong!r}"

    @property
    def choices(self) -> dict[str, list[str]]:
        """Labels by field. The field of a plain list of labels is called ''."""
        return {"": self.labels} if self.labels else self.fields

    @property
    def classes(self) -> dict[str, list[str]]:
        """Labels by field, or by property of the schema that is an enum of texts."""
        kinds = {name: kind for name, kind in self._properties.items() if isinstance(kind, dict)}
        return self.choices or {name: kind["enum"] for name, kind in kinds.items() if _are_labels(kind.get("enum"))}

    @property
    def gold(self) -> dict[str, str]:
        """Columns of known labels, by field."""
        pairs = [text.rpartition("=") for text in self.gold_column]
        return {name: column for name, _, column in pairs}

    @property
    def kept_columns(self) -> dict[str, list[str]]:
        return {"gold_column": list(self.gold.values())}

    def column(self, field: str) -> str:
        return f"{self.label_column}_{field}" if field else self.label_column

    @property
    def inlined(self) -> dict[str, str]:
        return super().inlined | ({"json_schema": self.json_schema} if self.json_schema else {})

    def form_columns(self) -> pa.Schema:
        columns = [
            pa.field(f"{self.column(name)}{suffix}", kind, metadata={"description": text})
            for name in self.classes
            for suffix, (kind, text) in _CHOICE.items()
        ]
        columns += [
            pa.field(self.column(name), _type(declared), metadata={"description": f"the answer's {name}"})
            for name, declared in self._properties.items()
            if name not in self.classes
        ]
        return pa.schema(columns)

    @property
    def value_columns(self) -> list[str]:
        return super().value_columns + [self.column(name) for name in self.choices or self._properties]

    def form(self, tokenizer: Any) -> "Answers":
        from exspec.actors.answers.choices import Choices
        from exspec.actors.answers.json_schema import Json

        if self.choices:
            columns = {name: self.column(name) for name in self.choices}
            return Choices(tokenizer, self.choices, columns, self.json_spaces)
        typed = {name: (self.column(name), _type(declared)) for name, declared in self._properties.items()}
        return Json(tokenizer, json.loads(str(self.json_schema)), typed, self.json_spaces, self.classes)

    def evaluate(self, read: Callable[[list[str]], Iterator[pa.Table]]) -> dict[str, Any]:
        """Counts of the labels, and their comparison with known labels."""
        if not self.classes:
            return {}
        known = {name: carried_as(self, column) for name, column in self.gold.items()}
        pairs = {name: [self.column(name), *filter(None, [known.get(name)])] for name in self.classes}
        counts: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in pairs}
        for table in read(list(dict.fromkeys(column for pair in pairs.values() for column in pair))):
            for name, pair in pairs.items():
                counts[name].update(zip(*(_texts(table[column]) for column in pair), strict=True))
        return {name or self.label_column: _evaluation(counts[name], self.classes[name]) for name in pairs}

    @property
    def _properties(self) -> dict[str, Any]:
        schema = json.loads(self.json_schema or "{}")
        return dict(schema.get("properties", {})) if schema.get("type") == "object" else {}


def _are_labels(values: Any) -> bool:
    return isinstance(values, list) and len(values) > 1 and all(isinstance(v, str) and v for v in values)


def as_texts(labels: Any) -> Any:
    """Labels of a job file as texts: numbers are labels too."""
    if not isinstance(labels, list):
        return labels
    if any(isinstance(label, bool) for label in labels):
        raise ValueError("YAML reads yes, no, on and off as booleans; put such a label in quotes")
    return [str(label) if isinstance(label, int | float) else label for label in labels]


NONE = "(none)"  # the label of an error row, or a missing gold label
OTHER = "(other)"  # a gold label that is not one of the job's labels


def _texts(column: pa.ChunkedArray) -> list[str]:
    return [_text(value) for value in column.to_pylist()]


def _text(value: Any) -> str:
    """A known label as text. Integers may have become floats, as in tables with missing values."""
    if value is None or value != value:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _evaluation(counts: Counter[tuple[str, ...]], labels: list[str]) -> dict[str, Any]:
    """Figures of counts by (label) or (label, gold): rows by label and, over the rows with a gold label, accuracy,
    precision and recall by class, and the confusion matrix [gold, label]. An error row counts as wrong."""
    given: Counter[str] = Counter()
    for key, count in counts.items():
        given[key[0]] += count
    found: dict[str, Any] = {"rows_by_label": {label: given[label] for label in [*labels, NONE] if given[label]}}
    known = {key: count for key, count in counts.items() if len(key) == 2 and key[1] != NONE}
    if not known:
        return found
    cells: Counter[tuple[str, str]] = Counter()
    for (label, gold), count in known.items():
        cells[label, gold if gold in labels else OTHER] += count
    seen = {name for cell in cells for name in cell}
    classes = [*labels, *(name for name in (OTHER, NONE) if name in seen)]
    matrix = [[cells[label, gold] for label in classes] for gold in classes]
    right, total = [matrix[i][i] for i in range(len(classes))], sum(known.values())
    by_label = [sum(row[i] for row in matrix) for i in range(len(classes))]
    return found | {
        "rows_with_gold": total,
        "accuracy": round(sum(right) / total, 4),
        "classes": [
            {
                "label": label,
                "precision": round(right[i] / by_label[i], 4) if by_label[i] else None,
                "recall": round(right[i] / sum(matrix[i]), 4) if sum(matrix[i]) else None,
                "rows": sum(matrix[i]),
            }
            for i, label in enumerate(classes)
        ],
        "matrix": matrix,
    }


def _type(declared: Any) -> pa.DataType:
    """The column type of a property: that of a JSON scalar or a list of scalars, or text for anything else."""
    kinds = declared.get("type") if isinstance(declared, dict) else None
    named = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    if named == ["array"]:
        items = _type(declared.get("items"))
        return pa.list_(items) if not pa.types.is_list(items) else pa.string()
    return _TYPES.get(str(named[0]), pa.string()) if len(named) == 1 else pa.string()
