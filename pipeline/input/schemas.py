"""One schema for all shards: differences in layout are reconciled, differences in type are errors."""

from collections import Counter

import pyarrow as pa

from exspec.pipeline.errors import JobError
from exspec.pipeline.input.rows import BAD

DEEPEST = 64  # levels of lists and records in a column


def nullable(schema: pa.Schema) -> pa.Schema:
    """The schema with nulls allowed in every field, nested ones too."""
    return pa.schema([_nullable(field) for field in schema])


def _nullable(field: pa.Field) -> pa.Field:
    return field.with_type(_inside(field.type)).with_nullable(True)


def _inside(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_nullable(field) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_nullable(kind.value_field), kind.list_size)
    for is_list, make in LISTS:
        if is_list(kind):
            return make(_nullable(kind.value_field))
    return kind


LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def is_text(kind: pa.DataType) -> bool:
    """Whether this is a text type of any layout."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether this is a list type of any layout."""
    return any(is_kind(kind) for is_kind, _ in LISTS) or bool(pa.types.is_fixed_size_list(kind))


def is_json(kind: pa.DataType) -> bool:
    """Whether this is text of JSON type."""
    return isinstance(kind, pa.JsonType)


def common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both; None if they differ in more than layout."""
    if one.equals(other):
        return one
    if pa.types.is_null(one) or pa.types.is_null(other):  # a shard in which the column has no values
        return other if pa.types.is_null(one) else one
    if is_text(one) and is_text(other):
        large = pa.types.is_large_string(one) or pa.types.is_large_string(other)
        return pa.large_string() if large else pa.string()
    if is_list(one) and is_list(other):
        item = common(one.value_type, other.value_type)
        large = pa.types.is_large_list(one) or pa.types.is_large_list(other)
        return item and (pa.large_list(item) if large else pa.list_(item))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _common_struct(one, other)
    return None


def _common_struct(one: pa.StructType, other: pa.StructType) -> pa.DataType | None:
    if [field.name for field in one] != [field.name for field in other]:
        return None
    kinds = [common(a.type, b.type) for a, b in zip(one, other, strict=True)]
    return None if None in kinds else pa.struct([f.with_type(k) for f, k in zip(one, kinds, strict=True)])


def unified(schema: pa.Schema, first: str, url: str, other: pa.Schema, fixed: bool) -> pa.Schema:
    """The schema that fits both. fixed: `schema` must not change.

    Raises JobError naming the file `url` and the column that differs from the file `first`.
    """
    names, found = dict.fromkeys(schema.names), dict.fromkeys(other.names)
    if lacking := [name for name in names if name not in found]:
        raise JobError(f"{url}: has no column {lacking[0]!r}, which {first} has")
    if extra := [name for name in found if name not in names]:
        raise JobError(f"{url}: column {extra[0]!r} is not in {first}; expected one schema for all shards")
    fields = []
    for field in schema:
        kind = common(field.type, other.field(field.name).type)
        if kind is None or (fixed and pa.types.is_null(field.type) and not kind.equals(field.type)):
            raise JobError(
                f"{url}: column {field.name!r} is {other.field(field.name).type}, but {field.type} in {first}"
            )
        fields.append(field if fixed else field.with_type(kind))
    return pa.schema(fields)


def refuse_deep(url: str, schema: pa.Schema) -> None:
    """Raises JobError if a column is nested too deeply for Parquet and for Python's recursion."""
    for column in schema:
        kinds, depth = [column.type], 0
        while kinds := [kind.field(i).type for kind in kinds for i in range(kind.num_fields)]:
            depth += 1
            if depth > DEEPEST:
                raise JobError(f"{url}: column {column.name!r} is nested more than {DEEPEST} levels deep")


def refuse_duplicates(url: str, schema: pa.Schema) -> None:
    """Raises JobError if two columns have the same name, or if one has a reserved name."""
    counts = Counter(schema.names)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise JobError(f"{url}: {counts[twice[0]]} columns are called {twice[0]!r}; expected unique names")
    if BAD in counts:
        raise JobError(f"{url}: the column name {BAD!r} is reserved; rename the column")
