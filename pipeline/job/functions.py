"""User functions over Arrow tables.

The source file of a function is part of the job. So the function runs on every node, and other code means another job.
"""

import hashlib
import importlib.util
import json
import linecache
import re
import sys
from collections import Counter
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator


class FunctionError(ValueError):
    """A function that cannot be called, failed, or returned something invalid."""


class Function(BaseModel):
    """`module:function`, from a table to a table with as many rows. The modules that it imports must be installed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    source: str

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        """From `module:function`, searched below the current folder and then like any module; or from a job's JSON."""
        if isinstance(value, str) and value.startswith("{"):
            return json.loads(value)
        if isinstance(value, str):
            return {"name": value, "source": _source(value)}
        return value

    @property
    def identity(self) -> str:
        """The name, and a digest of the source."""
        return f"{self.name} ({hashlib.sha256(self.source.encode()).hexdigest()[:12]})"

    def makes(self, schema: pa.Schema) -> pa.Schema:
        """The output columns for these input columns, from a call with an empty table. Raises FunctionError."""
        return self._call(schema.empty_table()).schema

    def __call__(self, table: pa.Table) -> pa.Table:
        """Apply the function. The columns are those that it returns for an empty table. Raises FunctionError."""
        made, expected = self._call(table), self.makes(table.schema)
        try:
            return made.select(expected.names).cast(expected)
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise FunctionError(
                f"{self.name}: returned columns {_listed(made.schema)}, but for an empty table {_listed(expected)}: "
                f"{error}"
            ) from error

    def _call(self, table: pa.Table) -> pa.Table:
        try:
            made = _load(self.name, self.source)(table)
        except FunctionError:
            raise
        except Exception as error:  # user code may raise anything
            raise FunctionError(f"{self.name}: {type(error).__name__}: {error}") from error
        if not isinstance(made, pa.Table):
            raise FunctionError(f"{self.name}: returned {type(made).__name__}, expected a pyarrow Table")
        if made.num_rows != table.num_rows:
            raise FunctionError(f"{self.name}: returned {made.num_rows} rows for {table.num_rows}, expected as many")
        if twice := [name for name, count in Counter(made.column_names).items() if count > 1]:
            raise FunctionError(f"{self.name}: returned two columns {twice[0]!r}")
        return made.replace_schema_metadata()


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _source(name: str) -> str:
    module, _, function = name.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module) or not function.isidentifier():
        raise ValueError("expected module:function")
    place = Path(*module.split(".")).with_suffix(".py")
    if not place.is_file():
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        if spec is None or not str(spec.origin).endswith(".py"):
            raise ValueError(f"no file {place} below {Path.cwd()}, and no module {module}")
        place = Path(str(spec.origin))
    return place.read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _load(name: str, source: str) -> Any:
    """The function, from a new module that is made from the source."""
    stem, _, function = name.partition(":")
    module = module_from_spec(ModuleSpec(f"exspec_{stem.replace('.', '_')}", None))
    module.__file__ = f"<{stem}>"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    sys.modules[module.__name__] = module  # dataclasses and pickle look it up there
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    if not callable(found := getattr(module, function, None)):
        raise FunctionError(f"{stem} has no function {function!r}")
    return found
