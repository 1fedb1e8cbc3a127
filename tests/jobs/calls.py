"""Calls of the command line in this process, and the rows that they write."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from exspec.jobs import cli
from tests.pipeline.jobs import record

MAIN = "from exspec.jobs.cli import main; main()"  # for `python -c`


def call(*words: object) -> Any:
    """Run a command on a wide terminal. Raises what the command raises."""
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"}, catch_exceptions=False)


def succeed(*words: object) -> str:
    """Run a command that must exit with 0, and return its output."""
    result = call(*words)
    assert result.exit_code == 0, result.output
    return str(result.output)


def rows_of(output: Path) -> list[dict[str, Any]]:
    """All rows of an output, part by part."""
    return [row for path in sorted(output.glob("part-*")) for row in pq.read_table(path).to_pylist()]


def overwrite(part: Path, column: str, row: int, value: Any) -> dict[str, Any]:
    """Change one value of a part, as if the job had written another one. Returns the row as it was."""
    table = pq.read_table(part)
    values, place = table[column].to_pylist(), table.schema.get_field_index(column)
    before: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
    values[row] = value
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array(values, field.type)), part)
    record(part)
    return before
