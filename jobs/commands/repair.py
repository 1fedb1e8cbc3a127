"""Failed rows as input rows: writes them to a file, and puts corrected ones into the plan of their job.

A repair does not touch the input. The corrected rows are in the plan (`Shard.repairs`) and replace what the file has
wherever the input is read: by the run that repairs, by retries, by runs that restore lost files, and by audits.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from exspec.actors.engine.faults import first_line
from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.input.batch import BODY, ID
from exspec.pipeline.input.plan import Plan, Shard, decode_schema, encode_row
from exspec.pipeline.input.reading import Unreadable, read_ranges
from exspec.pipeline.input.rows import RowError, as_json, values
from exspec.pipeline.input.schemas import is_json, is_text
from exspec.pipeline.output.contents import read_range
from exspec.pipeline.output.owner import Output, read_output
from exspec.pipeline.storage import Folder

SHARD, ROW, NAME, ERROR = OWN = "exspec_shard", "exspec_row", "exspec_id", "exspec_error"  # beside the input's columns
Row = dict[str, Any]
Key = tuple[int, int]  # index of a shard in the plan, and number of a row in it


def export(output: str, file: str, options: dict[str, Any]) -> int:
    """Write the failed rows of a job to a JSON Lines file: where each is from, its error, and the input's columns.

    A value that JSON cannot express is null. Returns the number of rows. Raises JobError if they cannot be read.
    """
    if not file.endswith(".jsonl"):
        raise JobError(f"{file}: expected a name that ends with .jsonl, which failed rows are written to")
    done, count, unread = read_output(Folder(output, options)), 0, list[str]()
    plan, (folder, _, base) = done.state.plan, file.rpartition("/")
    schema = _schema(plan)
    with (
        Folder(folder or ".", options).writing(base) as path,
        path.open("w", encoding="utf-8", errors="backslashreplace") as text,
    ):
        for number, group in groupby(_failed(done), key=lambda failed: failed[0][0]):
            shard, failed = plan.shards[number], list(group)
            tables = _read(shard, [row for (_, row), *_ in failed], schema, options)
            for ((_, row), name, error), table in zip(failed, tables, strict=True):
                if isinstance(table, str):
                    unread.append(table)
                    continue
                own = dict(zip(OWN, (shard.name, row, name, error), strict=True))
                text.write(f"{as_json(own | _shown(table))}\n")
                count += 1
    if unread:
        print(f"not written: {counted(len(unread), 'row')} that cannot be read, such as {unread[0]}")
    return count


def repaired(file: Path, options: dict[str, Any], output: Output, plan: Plan) -> Plan:
    """The plan with the rows of a file that `export` wrote and the user corrected. Unchanged rows stay as they are.

    options: of the input's file systems. Raises JobError naming every row that is not valid or has no error.
    """
    schema, problems, shards = _schema(plan), list[str](), list(plan.shards)
    failed = {key: name for key, name, _ in _failed(output)}
    by_id: dict[str, list[Key]] = defaultdict(list)
    for key, name in failed.items():
        by_id[name].append(key)
    given: dict[Key, tuple[str, Row]] = {}
    for place, row in _lines(file):
        with _told(place, problems):
            key = _find(row, by_id, plan)
            if wrong := [name for name in schema.names if name not in row]:
                raise JobError(f"column {wrong[0]!r} is missing")
            if wrong := [name for name in row if name not in (*schema.names, *OWN)]:
                raise JobError(f"column {wrong[0]!r} is not in the input")
            if key in given:
                raise JobError(f"is the same row as {given[key][0]}")
            given[key] = place, row
    for number, group in groupby(sorted(given), key=itemgetter(0)):
        keys, new, shard = list(group), dict[str, str](), shards[number]
        for key, table in zip(keys, _read(shard, [row for _, row in keys], schema, options), strict=True):
            place, row = given[key]
            with _told(place, problems):
                if isinstance(table, str):
                    raise JobError(table)
                if (corrected := _corrected(table, row)) is not None:
                    if key not in failed:
                        raise JobError("this row was repaired before, and has no error now")
                    new[str(key[1])] = encode_row(corrected.combine_chunks().to_batches()[0])
        shards[number] = replace(shard, repairs=shard.repairs | new)
    if problems:
        raise JobError(*problems)
    return replace(plan, shards=shards)


@contextmanager
def _told(place: str, problems: list[str]) -> Iterator[None]:
    """Collect the problems of a row."""
    try:
        yield
    except JobError as error:
        problems += [f"{place}: {problem}" for problem in error.problems]


def _find(row: Row, by_id: dict[str, list[Key]], plan: Plan) -> Key:
    """The failed row that a row of the file stands for: by its id and, if they are given, by shard and number.

    Raises JobError if there is not exactly one.
    """
    if NAME not in row:
        raise JobError(f"has no {NAME}; expected a row that `exspec convert --errors` wrote")

    def agrees(shard: int, number: int) -> bool:
        name = plan.shards[shard].name
        return bool(row.get(SHARD, name) == name and row.get(ROW, number) == number)

    found = [key for key in by_id.get(str(row[NAME]), []) if agrees(*key)]
    if not found:  # an earlier run with this file may have repaired the row before it broke off
        before = [(n, int(r)) for n, shard in enumerate(plan.shards) for r in shard.repairs]
        found = [key for key in before if SHARD in row and ROW in row and agrees(*key)]
    if len(found) != 1:
        raise JobError(
            f"{len(found)} rows with an error have this id; give {SHARD} and {ROW} too"
            if found
            else "no row with an error has this id"
        )
    return found[0]


def _schema(plan: Plan) -> pa.Schema:
    schema = decode_schema(plan.schema)
    if taken := [name for name in OWN if name in schema.names]:
        raise JobError(f"the input has a column {taken[0]!r}, which files of failed rows need for themselves")
    return schema


def _failed(output: Output) -> Iterator[tuple[Key, str, str]]:
    """The failed rows of an output, in order, with id and error."""
    for chunk, file, start in output.state.chunks("errors"):
        tables = read_range(output.folder, output.place(file), start, chunk.rows, ["id", "error"])
        for i, row in enumerate(row for table in tables for row in table.to_pylist()):
            if row["error"] is not None:
                yield (chunk.number, chunk.first + i), row["id"], row["error"]


def _read(shard: Shard, rows: Sequence[int], schema: pa.Schema, options: dict[str, Any]) -> Iterator[pa.Table | str]:
    """Rows of the input, each as a table, or as the reason why it cannot be read."""
    found = read_ranges(shard, [(row, 1) for row in rows], None, options, schema)
    for row, table in zip(rows, found, strict=True):
        if isinstance(table, Unreadable):
            yield f"{shard.published().url}, row {row}: {table.reason}"
        else:
            yield table.select(schema.names)


def _lines(file: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a JSON Lines file, each with its place for messages. Raises JobError."""
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise JobError(f"{file}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise JobError(f"{file}, line {number}: expected an object, not {type(row).__name__}")
            yield f"{file}, line {number}{f', id {row[NAME]!r}' if NAME in row else ''}", row


def _shown(table: pa.Table) -> Row:
    """A row of the input as JSON has it, with the body of a batch request as an object."""
    row = {name: _as_read(values(table, name)[0]) for name in table.column_names}
    if {BODY, ID} <= row.keys() and isinstance(row[BODY], str):
        row[BODY] = _as_read(row[BODY], lambda body: json.loads(as_json(json.loads(body))))  # text if nested too deep
    return row


def _as_read(value: Any, read: Any = lambda value: json.loads(as_json(value))) -> Any:
    try:
        return None if isinstance(value, RowError) else read(value)
    except (ValueError, RecursionError):
        return value if isinstance(value, str) else None


def _corrected(table: pa.Table, row: Row) -> pa.Table | None:
    """A row of the input with the values that were changed in the file, in the input's types. The others stay: JSON
    cannot express all of them. None if no value was changed."""
    before = _shown(table)
    changed = [name for name in before if as_json(before[name]) != as_json(row[name])]
    for name in changed:
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        try:
            table = table.set_column(place, field, _array(row[name], field.type))
        except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise JobError(f"column {name!r}: expected {field.type}: {first_line(error)}") from error
    return table if changed else None


def _array(value: Any, kind: pa.DataType) -> pa.Array:
    """One value that was read from JSON, as an array. Raises what pyarrow raises, or ValueError."""
    if isinstance(value, dict | list) and (is_text(kind) or is_json(kind)):
        value = json.dumps(value)
    if isinstance(value, str) and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        value = bytes.fromhex(value)  # as it was written
    try:
        return pa.array([value], kind)
    except (pa.ArrowException, TypeError):
        return pa.array([value]).cast(kind)
