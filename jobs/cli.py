"""The command line. Commands import what they need when they run, so that `--help` loads neither torch nor Ray."""

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, cast

import typer
from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from exspec.actors.engine.faults import first_line
from exspec.jobs.benchmarks.settings import SHAPE, BenchSettings, SyntheticSettings
from exspec.jobs.options import GroupedCommand, with_flags, with_settings
from exspec.jobs.training.settings import ScaleSettings, TrainSettings
from exspec.pipeline.cluster.connect import leave, show_token
from exspec.pipeline.errors import JobError, counted, kept_traceback
from exspec.pipeline.job.embeddings import EmbedJob
from exspec.pipeline.job.labels import LabelJob
from exspec.pipeline.job.scores import ScoreJob
from exspec.pipeline.job.settings import Job
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import redacted

app = typer.Typer(
    name="exspec",
    help="Large offline LLM generation with exact batch speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Command = Callable[..., Any]


def command(*examples: str, **settings: Any) -> Callable[[Command], Command]:
    """Register a command. Its help is its docstring with the paragraphs unwrapped, followed by the examples."""

    def register(function: Command) -> Command:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(p.splitlines()) for p in paragraphs)
        epilog = "\n".join(["Examples:", *(f"  {example}" for example in examples)])
        return app.command(help=text, epilog=epilog, cls=GroupedCommand, **settings)(function)

    return register


def _version(asked: bool) -> None:
    if asked:
        print(f"exspec {version('exspec')}")
        raise typer.Exit


@app.callback()
def _root(
    shown: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Large offline LLM generation with exact batch speculative decoding."""


def _json_object(text: str) -> dict[str, Any]:
    try:
        return TypeAdapter(dict[str, Any]).validate_json(text)
    except ValidationError as error:
        raise typer.BadParameter(f"expected a JSON object: {error.errors()[0]['msg']}") from error


def _size(text: str) -> int:
    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(ge=1)]).validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(f"expected bytes with a unit, such as 256MiB or 1GB, not {text!r}") from error


PlanOnly = Annotated[bool, typer.Option("--plan", help="Show what the job would do, and run nothing.")]
Restart = Annotated[bool, typer.Option(help="Copy the output aside and start over.")]
RetryErrors = Annotated[bool, typer.Option(help="Run rows again whose error a retry may cure.")]
Repair = Annotated[Path | None, typer.Option(help="Decode corrected rows of a file that convert --errors wrote.")]
Price = Annotated[float | None, typer.Option(min=0, help="Price of a GPU for an hour, to print the cost.")]
Quiet = Annotated[bool, typer.Option(help="Show no progress.")]
OutputFolder = Annotated[str, typer.Argument(help="Output folder of a finished job: a path or an fsspec URL.")]
StorageOptions = Annotated[
    Any, typer.Option(parser=_json_object, metavar="JSON", help="Options of the file system, as fsspec takes them.")
]
Address = Annotated[
    str | None,
    typer.Option(help="URL of the dashboard. Default: RAY_API_SERVER_ADDRESS, RAY_DASHBOARD_ADDRESS or RAY_ADDRESS."),
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="Id of the job, as submit printed it.", show_default=False)]


@command(
    "exspec run --input messages/ --output out/",
    "exspec run --job job.yaml --limit 100",
    "exspec run --job job.yaml --retry-errors",
    "exspec run --job job.yaml --repair bad.jsonl",
)
@with_settings(Job)
def run(
    job: Job,
    restart: Restart = False,
    retry_errors: RetryErrors = False,
    repair: Repair = None,
    quiet: Quiet = False,
) -> None:
    """Generate completions for all rows of the input. To resume, run the same command again: only missing rows run.

    Exit codes: 0 all rows are done, including rows with an error; 1 rows are missing, because chunks were set aside
    or the job broke off (run it again), or too many rows have an error; 2 the job was refused before it started;
    3 a bug in exspec; 130 interrupted.
    """
    _run(job, restart, retry_errors, repair, quiet)


def _run(job: Job, restart: bool, retry_errors: bool, repair: Path | None, quiet: bool, plan: bool = False) -> NoReturn:
    if plan:
        _plan(job)
    with Progress(quiet) as progress:
        progress.stage("checking the job")  # before the slow imports
        show_token()
        from exspec.jobs.commands import run as jobs

        raise typer.Exit(jobs.run(job, restart, retry_errors, repair, progress))


def _plan(job: Job, gpus: bool = False, estimate: bool = False, price: float | None = None) -> NoReturn:
    from exspec.jobs.commands.plan import plan as show

    raise typer.Exit(show(job, gpus, estimate, price))


@command(
    "exspec plan --input messages/ --output out/",
    "exspec plan --job job.yaml --gpus",
    "exspec plan --job job.yaml --estimate --price-per-gpu-hour 3",
)
@with_settings(Job)
def plan(
    job: Job,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Compute where drafting pays, by GPU and length of text.")
    ] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Decode some rows here to estimate the time.")] = False,
    price_per_gpu_hour: Price = None,
) -> None:
    """Show what a job would do and every problem with it. Writes nothing.

    Exit codes: 0 the job can start; 2 the job would be refused, or no row that was checked can be decoded.
    """
    _plan(job, gpus, estimate, price_per_gpu_hour)


@command(
    "exspec tune --input messages/ --output out/ --batch-size 8",
    "exspec tune --job job.yaml --tune-seconds 300",
)
@with_settings(Job)
def tune(job: Job) -> None:
    """Measure the best values of a job's auto settings on this machine."""
    from exspec.jobs.commands import run as jobs

    jobs.tune(job)


EXITS = """
Exit codes: 0 all rows are done, including rows with an error; 1 rows are missing, because chunks were set aside
or the job broke off (run it again), or too many rows have an error; 2 the job was refused before it started;
3 a bug in exspec; 130 interrupted.
"""


def starts(kind: type[Job], *examples: str) -> Callable[[Callable[[], None]], None]:
    """Make a command that runs jobs of a kind. The decorated function names it, and its docstring says what it does."""

    def make(described: Callable[[], None]) -> None:
        def start(
            job: Job,
            plan: PlanOnly = False,
            restart: Restart = False,
            retry_errors: RetryErrors = False,
            repair: Repair = None,
            quiet: Quiet = False,
        ) -> None:
            _run(job, restart, retry_errors, repair, quiet, plan)

        start.__name__, start.__doc__ = described.__name__, f"{described.__doc__}\n{EXITS}"
        command(*examples)(with_settings(kind)(start))

    return make


@starts(
    LabelJob,
    "exspec label --input messages/ --output labels/ --fields urgency=high,low,normal --no-json-spaces",
    "exspec label --job nightly.yaml --since last --review-share 0.02",
    "exspec label --job job.yaml --labels yes --labels no --gold-column answer",
)
def label() -> None:
    """Label the rows of the input: one label from a list, one for each of several fields, or JSON of a schema."""


@starts(
    ScoreJob,
    "exspec score --input answers/ --output scores/ --completion-column answer",
    "exspec score --job job.yaml --choices yes --choices no --choose-by mean",
)
def score() -> None:
    """Compute the log-probabilities of given completions, or choose the likeliest of several."""


@starts(
    EmbedJob,
    "exspec embed --input messages/ --output vectors/",
    "exspec embed --job job.yaml --pooling mean --dimensions 256",
)
def embed() -> None:
    """Compute the embedding of each prompt: a vector of the target's hidden states."""


@command(
    "exspec audit out/",
    "exspec audit out/ --share 0.01 --seed 7 --no-generate",
)
def audit(
    output: OutputFolder,
    count: Annotated[int, typer.Option(min=1, help="Rows to decode again, spread over the shards.")] = 64,
    share: Annotated[float | None, typer.Option(min=0, max=1, help="Share of all rows, instead of a count.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    generate: Annotated[bool, typer.Option(help="Also compare with generate of transformers in float32.")] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors.")
    ] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Decode a sample of a finished job again by plain decoding, and compare the completions.

    Exit codes: 0 all rows are equal in the job's own shape; 1 some rows differ; 2 refused.
    """
    from exspec.jobs.commands import audit as job

    permissions = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    raise typer.Exit(job.audit(output, storage_options or {}, count, share, seed, generate, permissions))


@command(
    "exspec report out/",
    "exspec report out/plain out/exspec --price-per-gpu-hour 3",
)
def report(
    outputs: Annotated[list[str], typer.Argument(help="Output folders of jobs: paths or fsspec URLs.")],
    price_per_gpu_hour: Price = None,
    storage_options: StorageOptions = None,
) -> None:
    """Rebuild the report of a job from its parts, or compare several jobs side by side.

    The last printed line is JSON: a list with an object for each output.
    """
    from exspec.jobs.commands import report as job

    job.report(outputs, storage_options or {}, price_per_gpu_hour)


@command(
    "exspec compact out/",
    "exspec compact s3://bucket/out/ --target-size 1GiB",
)
def compact(
    output: OutputFolder,
    target_size: Annotated[
        int, typer.Option(parser=_size, metavar="SIZE", help="Approximate maximum size of a file: 256MiB, 1GB.")
    ] = "256MiB",  # type: ignore[assignment]
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no other process works on the output.")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Merge the small parts of a finished job into larger files.

    Rows and their order do not change, and run, report and audit work as before. If compaction is killed, nothing is
    lost: run it, or the job, again. Readers of the folder never see a row twice. While _SUCCESS is absent, the rows of
    one file at a time may be missing for a moment.

    Exit codes: 0 done; 2 refused.
    """
    from exspec.jobs.commands import compact as job

    job.compact(output, storage_options or {}, target_size, wait)


@command(
    "exspec check out/",
)
def check(output: OutputFolder, storage_options: StorageOptions = None) -> None:
    """Read every file of an output, and compare it with the digest in the log.

    Names every damaged or missing file, and every file that is not in the log. Changes nothing.

    Exit codes: 0 all files are as the log says; 1 some are not; 2 refused.
    """
    from exspec.jobs.commands import check as job

    raise typer.Exit(job.check(output, storage_options or {}))


@command(
    "exspec convert out/ out.jsonl",
    "exspec convert s3://bucket/out/ s3://bucket/out.csv.gz --columns id --columns completion",
    "exspec convert out/ by-label/ --partition-by label",
    "exspec convert out/ bad.jsonl --errors",
    "exspec convert out/ samples.jsonl --explode",
)
def convert(
    output: OutputFolder,
    file: Annotated[str, typer.Argument(help="File to write, such as NAME.jsonl or NAME.csv.gz. Or a new folder.")],
    columns: Annotated[list[str] | None, typer.Option(help="Columns to write. Default: all.")] = None,
    partition_by: Annotated[
        list[str] | None, typer.Option(help="Write Parquet into folders by the values of this column.")
    ] = None,
    quote_formulas: Annotated[
        bool, typer.Option("--quote-formulas", help="In CSV, put ' before text that a spreadsheet would run.")
    ] = False,
    errors: Annotated[
        bool, typer.Option("--errors", help="Write the input rows that failed, to correct them for run --repair.")
    ] = False,
    explode: Annotated[
        bool, typer.Option("--explode", help="Write a row for each sample, of a job that drew several.")
    ] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Write the rows of a finished job, in order, to one file, or to folders of Parquet.

    If the input was a file of the batch API, JSON Lines holds its answers, unless columns are named.

    Exit codes: 0 written; 2 refused.
    """
    from exspec.jobs.commands import convert as job
    from exspec.jobs.commands.repair import export

    options = storage_options or {}
    if quote_formulas and (errors or partition_by or not file.endswith((".csv", ".csv.gz"))):
        raise JobError(f"--quote-formulas: expected a file of CSV, not {file}")
    if errors:
        if columns or partition_by or explode:
            raise JobError("--errors: writes all input columns; leave out --columns, --partition-by and --explode")
        rows = export(output, file, options)
    elif partition_by:
        rows = job.partition(output, file, options, partition_by, columns, explode)
    else:
        rows = job.convert(output, file, options, columns, quote_formulas, explode)
    print(f"{counted(rows, 'row')} in {file}")


@command(
    "exspec messages messages/",
    "exspec messages messages/ --rows 10000 --shards 16",
)
def messages(
    output: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    rows: Annotated[int, typer.Option(min=1, help="Total number of messages.")] = 512,
    shards: Annotated[int, typer.Option(min=1, help="Number of files.")] = 4,
) -> None:
    """Write demo messages as Parquet shards, as input for a first job."""
    from exspec.jobs.demo.shards import write_shards

    write_shards(output, rows, shards)


@command(
    "exspec bench --methods plain,exspec,generate --kernels eager --limit 16 --repeats 1",
    "exspec bench --methods plain,exspec:3,exspec:8 --batch-size 4",
    "exspec bench --methods plain,exspec@model,exspec@suffix:12",
    "exspec bench --target model/ --draft small/ --draft head/ --methods plain,exspec@model,exspec@eagle3",
)
@with_flags(BenchSettings, SHAPE)
def bench(settings: BenchSettings) -> None:
    """Time the methods against each other and compare their tokens. The last printed line is a JSON object."""
    progress = Progress(quiet=False)
    progress.stage("importing torch and transformers")
    from exspec.jobs.benchmarks import bench as job

    job.run(settings, progress)


@command(
    "exspec synthetic Qwen/Qwen3-8B:Qwen/Qwen3-0.6B out.json",
    "exspec synthetic Qwen/Qwen3-8B:Qwen/Qwen3-0.6B out.json --seconds 240 --batch-sizes 8,64 --draft-tokens 5",
)
@with_flags(SyntheticSettings)
def synthetic(
    settings: SyntheticSettings,
    pair: Annotated[str, typer.Argument(metavar="TARGET:DRAFT", help="Shapes of known models.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.json", help="File for the report.")],
) -> None:
    """Measure a device with random weights in the shapes of known models, without downloading anything."""
    from exspec.jobs.benchmarks import synthetic as job

    job.measure(replace(settings, pair=pair), output)


@command(
    "exspec train out/ head/ --drafter dflash",
    "exspec train out/ draft/ --drafter model --rows 2000 --minutes 20",
    "exspec train messages.parquet head/ --regenerate --target Qwen/Qwen3-8B --drafter eagle3",
)
@with_flags(TrainSettings)
def train(
    settings: TrainSettings,
    output: Annotated[str, typer.Argument(help="Output folder of a job, or with --regenerate an input: path or URL.")],
    folder: Annotated[Path, typer.Argument(help="New or empty folder for the drafter.")],
    storage_options: StorageOptions = None,
) -> None:
    """Train a drafter for a job's target on the rows that the job has finished. To go on with a training that was
    stopped, run the same command again.

    The last printed line is a JSON object. Its accept length is that of rows that were held out, as they are decoded.

    Exit codes: 0 the drafter is written; 2 refused.
    """
    from exspec.jobs.commands import train as job

    job.train(output, storage_options or {}, folder, settings)


@command(
    "exspec scale out/ laws/",
    "exspec scale out/ laws/ --drafters model,dflash --layers 1,2,4 --job-rows 1000000",
)
@with_flags(ScaleSettings)
def scale(
    settings: ScaleSettings,
    output: Annotated[str, typer.Argument(help="Output folder of a job: path or URL.")],
    folder: Annotated[Path, typer.Argument(help="New or empty folder for the drafters and the page.")],
    storage_options: StorageOptions = None,
) -> None:
    """Find out which drafter pays for a job, from small drafters that are trained on its finished rows. To go on after
    the command was stopped, run it again.

    The last printed line is a JSON object with the fits, the choice and R2.

    Exit codes: 0 done; 2 refused.
    """
    from exspec.jobs.commands import scale as job

    job.scale(output, storage_options or {}, folder, settings)


@command(
    "exspec submit --address http://head:8265 run --job job.yaml",
    "exspec submit --detach --env AWS_ENDPOINT_URL label --job nightly.yaml",
    "exspec submit --gpus 1 audit s3://bucket/out",
    context_settings={"allow_interspersed_args": False},
)
def submit(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="run, label, score, embed or audit.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)] = None,
    address: Address = None,
    name: Annotated[str | None, typer.Option(help="Id of the job. It must be new to the cluster.")] = None,
    detach: Annotated[bool, typer.Option(help="Print the job's id and do not follow the job.")] = False,
    send: Annotated[bool, typer.Option(help="Send this exspec, or use the one in the image.")] = True,
    env: Annotated[
        list[str] | None,
        typer.Option(help="Environment variable: NAME=VALUE, or NAME to copy it. Everyone with the token can read it."),
    ] = None,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs for the command's own process. An audit decodes in it.")] = 0,
) -> None:
    """Send a command to a Ray cluster as a job, and follow its log. Options of submit come before the command's name.

    The arguments are checked before the job is sent. Paths must be URLs, or folders that all nodes share. A job file
    is sent with the job. Ctrl-C leaves the job running.

    Exit codes: those of the command (0, 1, 2); 2 also if the job could not be sent; 3 the job failed in another way;
    4 the job was stopped; 130 Ctrl-C left the job running.
    """
    from exspec.jobs.cluster import submit as job
    from exspec.jobs.cluster.client import Cluster

    call = job.parse(context, command, arguments or [])
    raise typer.Exit(job.submit(call, Cluster(address), name, detach, send, env or [], gpus))


@command(
    "exspec status",
    "exspec status exspec-run-20260101-120000-ab12",
)
def status(
    job: Annotated[str | None, typer.Argument(metavar="[ID]", help="Id of a job. Default: all jobs.")] = None,
    address: Address = None,
) -> None:
    """Show one submitted job, or all jobs that exspec submitted to a cluster."""
    from exspec.jobs.cluster.client import Cluster, show_status

    show_status(Cluster(address), job)


@command(
    "exspec logs exspec-run-20260101-120000-ab12 --follow",
)
def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option(help="Follow the log until the job ends, and exit with its code.")] = False,
    address: Address = None,
) -> None:
    """Print the log of a submitted job.

    Exit codes: 0; with --follow, those of submit.
    """
    from exspec.jobs.cluster.client import Cluster

    cluster = Cluster(address)
    if follow:
        raise typer.Exit(cluster.follow(job))
    print(cluster.logs(job), end="")


@command(
    "exspec cancel exspec-run-20260101-120000-ab12",
)
def cancel(job: JobId, address: Address = None) -> None:
    """Stop a submitted job and wait until it has stopped. Finished rows are kept. To resume, submit it again."""
    from exspec.jobs.cluster.client import Cluster

    print(Cluster(address).cancel(job))


class _Redacted:
    """A text stream that removes the secrets of URLs from what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(redacted(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def main() -> None:
    """Entry point. Prints an error that the user can fix as one line per problem and exits with 2. Of any other error
    it prints one line, which names the file with the traceback, and exits with 3. Prints no secret of a URL."""
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # else a thread of Ray's would start a second Ray at the end
    out, err = (cast(TextIO, _Redacted(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            _main()
        except SystemExit as end:
            leave(end.code)
            raise


def _main() -> None:
    try:
        app()
    except Exception as error:
        if (problems := _problems(error)) is None:
            said = f"{type(error).__name__}: {first_line(error)}"
            bug = f"this is a bug in exspec; committed rows are not lost; traceback: {kept_traceback(error)}"
            print(f"exspec: {said}; {bug}", file=sys.stderr)
            sys.exit(3)
        lines = [" ".join(problem.split()) for problem in problems]
        if len(lines) > 1:
            lines = [f"{len(lines)} problems", *(f"  {line}" for line in lines)]
        print("exspec:", "\n".join(lines), file=sys.stderr)
        sys.exit(getattr(error, "code", 2))


def _problems(error: Exception) -> list[str] | None:
    """What the user can fix, or None. A ValueError is a message to the user only if exspec raised it."""
    if isinstance(error, JobError):
        return list(error.problems)
    if isinstance(error, OSError):
        return [f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)]
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = str(frame.f_globals.get("__name__")).startswith("exspec.")
    return [str(error)] if isinstance(error, ValueError) and ours else None
