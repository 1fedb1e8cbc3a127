"""`generate`: runs a job on a table in memory, for notebooks. Imports what it needs when it is called."""

import json
import tempfile
from typing import Any

REASONS = 5  # that the error of a failed job lists
WRITTEN = "_INPUT.json"  # marks an input whose rows are all written; holds their number and columns


def generate(data: Any, folder: str | None = None, **settings: Any) -> Any:
    """Generate a completion for every row, as `exspec run` does, and return the rows with the columns of its output.

    data: a pyarrow table, a pandas DataFrame or a Ray Dataset. The result is of the same type. Rows of a table keep
        their order.
    folder: a path or fsspec URL for the input and the output. Optional for a table; with the same table and folder, a
        job that broke off resumes. Required for a Ray Dataset, and every node must be able to reach it; the job resumes
        if all rows of the dataset were written.
    settings: settings of `exspec run`, such as `target`, `draft`, `max_new_tokens`. Default pair: the demo pair.

    Raises JobError if the job is refused or chunks were set aside. Rows that cannot be generated have an `error`.

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
        raise JobError(f"generate: {anonymous(source.url)} holds other files; choose another folder")
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    if not source.create("rows.parquet", buffer.getvalue()):
        raise JobError(f"generate: {anonymous(source.url)} holds other rows; choose another folder")
    output = _run(folder, settings, kept)
    return pa.concat_tables(tables(read_output(output), None)).replace_schema_metadata()


def _dataset(dataset: Any, folder: str | None, settings: dict[str, Any]) -> Any:
    import ray

    from exspec.pipeline.errors import JobError

    if folder is None:
        raise JobError("generate: a Ray Dataset needs `folder`, which every node must be able to reach")
    _write_rows(dataset, folder, settings.get("storage_options"))
    output = _run(folder, settings)
    parts = sorted(f"{output.path}/{name}" for name in output.names() if name.startswith("part-"))
    return ray.data.read_parquet(parts, filesystem=output.fs)


def _write_rows(dataset: Any, folder: str, options: dict[str, Any] | None) -> None:
    """Write the rows as the job's input, unless an earlier call wrote all of them."""
    import ray

    from exspec.pipeline.errors import JobError
    from exspec.pipeline.secrets import anonymous
    from exspec.pipeline.storage import Folder

    beside, source = Folder(folder, options), Folder(f"{folder}/input", options)
    place = anonymous(source.url)
    if WRITTEN in beside.names():
        if json.loads(beside.read(WRITTEN)) != _described(dataset):
            raise JobError(f"generate: {place} holds other rows; choose another folder")
        return
    if source.names():
        raise JobError(
            f"generate: {place} is not empty and does not hold all rows of a dataset; "
            "choose another folder, or remove this one"
        )
    dataset.write_parquet(source.path, filesystem=source.fs)
    if names := source.names():
        written = ray.data.read_parquet([f"{source.path}/{name}" for name in sorted(names)], filesystem=source.fs)
        beside.write(WRITTEN, json.dumps(_described(written)).encode())


def _described(dataset: Any) -> dict[str, Any]:
    """What identifies a dataset, cheaply: most other datasets differ in it."""
    return {"rows": dataset.count(), "columns": dataset.columns()}


def _run(folder: str, settings: dict[str, Any], kept: bool = True) -> Any:
    """Run the job on the folder's input, and return the output folder. kept: messages may name the folder."""
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
