"""Functions of the user's over Arrow tables. The source of the file that one stands in is part of the job, so that it
runs on every node, and a job that is run again with other code is another job."""

import hashlib
import importlib.util
import json
import linecache
import re
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator


class FunctionError(ValueError):
    """A function that cannot be called, failed, or gave what it must not."""


class Function(BaseModel):
    """`module:function`, from a table to a table of as many rows. What its file imports has to be installed."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    source: str

    @model_validator(mode="before")
    @classmethod
    def _found(cls, value: Any) -> Any:
        """From `module:function`, whose file is looked for below this folder and where Python finds modules; or as it
        was written into a job."""
        if isinstance(value, str) and value.startswith("{"):
            return json.loads(value)
        if isinstance(value, str):
            return {"name": value, "source": _source(value)}
        return value

    @property
    def identity(self) -> str:
        """Its name, and a digest of its source."""
        return f"{self.name} ({hashlib.sha256(self.source.encode()).hexdigest()[:12]})"

    def makes(self, schema: pa.Schema) -> pa.Schema:
        """The columns that it makes of such: it is called with an empty table. Raises FunctionError."""
        return self._called(schema.empty_table()).schema

    def __call__(self, table: pa.Table) -> pa.Table:
        """What it makes of a table: the columns that it makes of an empty one. Raises FunctionError."""
        made, expected = self._called(table), self.makes(table.schema)
        try:
            return made.select(expected.names).cast(expected)
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise FunctionError(
                f"{self.name}: gave other columns than for an empty table, {_told(made.schema)} where it was "
                f"{_told(expected)}: {error}"
            ) from error

    def _called(self, table: pa.Table) -> pa.Table:
        try:
            made = _load(self.name, self.source)(table)
        except FunctionError:
            raise
        except Exception as error:  # whatever somebody's code may raise
            raise FunctionError(f"{self.name}: {type(error).__name__}: {error}") from error
        if not isinstance(made, pa.Table):
            raise FunctionError(f"{self.name}: gave {type(made).__name__}, expected a pyarrow Table")
        if made.num_rows != table.num_rows:
            raise FunctionError(f"{self.name}: gave {made.num_rows} rows for {table.num_rows}, expected as many")
        if twice := [name for name in made.column_names if made.column_names.count(name) > 1]:
            raise FunctionError(f"{self.name}: gave two columns {twice[0]!r}")
        return made.replace_schema_metadata()


def _told(schema: pa.Schema) -> str:
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
            raise ValueError(f"there is no {place} below {Path.cwd()}, nor a module of that name")
        place = Path(str(spec.origin))
    return place.read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _load(name: str, source: str) -> Any:
    """The function of a module that is made of the source, under a name of its own."""
    of, _, function = name.partition(":")
    module = module_from_spec(ModuleSpec(f"exspec_{of.replace('.', '_')}", None))
    module.__file__ = f"<{of}>"
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    sys.modules[module.__name__] = module  # where dataclasses and pickles look for it
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    if not callable(found := getattr(module, function, None)):
        raise FunctionError(f"{of} has no function {function!r}")
    return found
