"""`generate`: a job on a table that is at hand, for notebooks. Imports what it needs when it is called."""

import json
import tempfile
from typing import Any

REASONS = 5  # why a job failed, that are told
WRITTEN = "_INPUT.json"  # beside an input whose rows are all there: how many, and their columns


def generate(data: Any, folder: str | None = None, **settings: Any) -> Any:
    """Generate a completion for every row, as `exspec run` does, and return the rows with the columns of its output.

    data: a pyarrow table, a pandas DataFrame or a Ray Dataset; what comes back is of the same kind. The rows of a table
        keep their order.
    folder: where input and output lie, a path or an fsspec URL. A table needs none; the same table with the same folder
        resumes a job that broke off there. A Ray Dataset needs one that every node can reach; it resumes where all of
        its rows were written.
    settings: those of `exspec run`, such as `target`, `draft`, `max_new_tokens`. Without a pair: the demo pair.

    Raises JobError where the job is refused or chunks were set aside. Rows that cannot be generated have an `error`.

    Example: generate(pa.table({"prompt": ["Hello"]}), max_new_tokens=16)
    """
    import pyarrow as pa

    if isinstance(data, pa.Table):
        return _table(data, folder, settings)
    kind = f"{type(data).__module__}.{type(data).__name__}"
    if kind.startswith("pandas."):
        return _table(pa.Table.from_pandas(data, preserve_index=False), folder, settings).to_pandas()
    if kind.startswith("ray.data."):
        return _dataset(data, folder, settings)
    raise TypeError(f"generate: expected a pyarrow table, a pandas DataFrame or a Ray Dataset, not {kind}")


def _table(table: Any, folder: str | None, settings: dict[str, Any], kept: bool = True) -> Any:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    from exspec.pipeline.errors import JobError
    from exspec.pipeline.output.contents import tables
    from exspec.pipeline.output.owner import read_output
    from exspec.pipeline.secrets import anonymous
    from exspec.pipeline.storage import Folder

    if folder is None:
        with tempfile.TemporaryDirectory(prefix="exspec-") as temporary:
            return _table(table, temporary, settings, kept=False)
    source = Folder(f"{folder}/input", settings.get("storage_options"))
    if source.names() - {"rows.parquet"}:
        raise JobError(f"generate: {anonymous(source.url)} holds other files; give another folder")
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    if not source.create("rows.parquet", buffer.getvalue()):
        raise JobError(f"generate: {anonymous(source.url)} holds other rows; give another folder")
    output = _run(folder, settings, kept)
    return pa.concat_tables(tables(read_output(output), None)).replace_schema_metadata()


def _dataset(dataset: Any, folder: str | None, settings: dict[str, Any]) -> Any:
    import ray

    from exspec.pipeline.errors import JobError

    if folder is None:
        raise JobError("generate: a Ray Dataset needs a folder that every node can reach")
    _write_rows(dataset, folder, settings.get("storage_options"))
    output = _run(folder, settings)
    parts = sorted(f"{output.path}/{name}" for name in output.names() if name.startswith("part-"))
    return ray.data.read_parquet(parts, filesystem=output.fs)


def _write_rows(dataset: Any, folder: str, options: dict[str, Any] | None) -> None:
    """Write the rows as the job's input, unless an earlier call has written them all."""
    import ray

    from exspec.pipeline.errors import JobError
    from exspec.pipeline.secrets import anonymous
    from exspec.pipeline.storage import Folder

    beside, source = Folder(folder, options), Folder(f"{folder}/input", options)
    place = anonymous(source.url)
    if WRITTEN in beside.names():
        if json.loads(beside.read(WRITTEN)) != _described(dataset):
            raise JobError(f"generate: {place} holds other rows; give another folder")
        return
    if source.names():
        raise JobError(
            f"generate: {place} is not empty, and not all rows of a dataset were written there; "
            "give another folder, or remove that one"
        )
    dataset.write_parquet(source.path, filesystem=source.fs)
    if names := source.names():
        written = ray.data.read_parquet([f"{source.path}/{name}" for name in sorted(names)], filesystem=source.fs)
        beside.write(WRITTEN, json.dumps(_described(written)).encode())


def _described(dataset: Any) -> dict[str, Any]:
    """What tells a dataset from most others without reading its rows twice."""
    return {"rows": dataset.count(), "columns": dataset.columns()}


def _run(folder: str, settings: dict[str, Any], kept: bool = True) -> Any:
    """Run the job between the folder's input and output; returns the output's folder.

    kept: the folder stays, so that it makes sense to speak of it.
    """
    from exspec.jobs.demo import DEMO_PAIR
    from exspec.pipeline.errors import JobError
    from exspec.pipeline.job.settings import Job, load_job
    from exspec.pipeline.output.owner import REPORT
    from exspec.pipeline.output.reasons import Reasons
    from exspec.pipeline.prepare import prepare
    from exspec.pipeline.progress import Progress, Silent
    from exspec.pipeline.run import execute

    job = load_job(Job, None, {**settings, "input": f"{folder}/input", "output": f"{folder}/output"}, DEMO_PAIR)
    prepared = prepare(job)
    if execute(prepared, progress=(Progress if kept else Silent)(quiet=False)) != 0:
        figures = json.loads(prepared.folder.read(REPORT))
        failed = Reasons()
        failed.merge(figures["errors_by_reason"])
        reasons = [*(f"set aside: {chunk}" for chunk in figures["set_aside"]), *failed.lines()]
        raise JobError("generate: the job failed", *reasons[:REASONS])
    return prepared.folder
