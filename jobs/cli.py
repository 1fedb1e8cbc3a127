"""The command line. Every command imports what it needs when it runs, so that `--help` loads neither torch nor Ray."""

import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from exspec.jobs.benchmarks.settings import SHAPE, BenchSettings, SyntheticSettings
from exspec.jobs.options import GroupedCommand, with_flags, with_settings
from exspec.pipeline.cluster.connect import show_token
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.labels import LabelJob
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
    """Register a command. Its help is its docstring, whose paragraphs the terminal wraps, and ends with examples."""

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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Large offline LLM generation with exact batch speculative decoding."""


Restart = Annotated[bool, typer.Option(help="Move the output aside and start over.")]
RetryErrors = Annotated[bool, typer.Option(help="Run rows again that have an error.")]
Price = Annotated[float | None, typer.Option(min=0, help="Of one GPU, to tell what tokens cost.")]
Quiet = Annotated[bool, typer.Option(help="Show no progress.")]


@command(
    "exspec run --input messages/ --output out/",
    "exspec run --job job.yaml --limit 100",
    "exspec run --job job.yaml --retry-errors",
)
@with_settings(Job)
def run(
    job: Job,
    restart: Restart = False,
    retry_errors: RetryErrors = False,
    quiet: Quiet = False,
) -> None:
    """Generate completions for all rows of the input. Run it again to resume: only what is missing runs.

    Exit codes: 0 all rows done (row errors included), 1 rows are missing (chunks set aside, or broken off: run it
    again), 2 refused before starting, 3 a fault of exspec, 130 interrupted.
    """
    with Progress(quiet) as progress:
        progress.stage("checking the job")
        show_token()
        from exspec.jobs.commands import run as jobs

        raise typer.Exit(jobs.run(job, restart, retry_errors, progress))


@command(
    "exspec plan --input messages/ --output out/",
    "exspec plan --job job.yaml --estimate --price-per-gpu-hour 3",
)
@with_settings(Job)
def plan(
    job: Job,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Decode some rows here, and tell what all of them will take.")
    ] = False,
    price_per_gpu_hour: Price = None,
) -> None:
    """Show what a job would do, and everything that is wrong with it. Writes nothing.

    Exit codes: 0 the job may start, 2 it would be refused, or none of the rows looked at could be decoded.
    """
    from exspec.jobs.commands.plan import plan as show

    raise typer.Exit(show(job, estimate, price_per_gpu_hour))


@command(
    "exspec tune --input messages/ --output out/ --batch-size 8",
    "exspec tune --job job.yaml --tune-seconds 60",
)
@with_settings(Job)
def tune(job: Job) -> None:
    """Measure the shape that a job should decode in, on this machine: the settings that are auto."""
    from exspec.jobs.commands import run as jobs

    jobs.tune(job)


@command(
    "exspec label --input messages/ --output labels/ --fields urgency=high,low",
    "exspec label --job nightly.yaml --since last --review-share 0.02",
    "exspec label --job job.yaml --labels yes --labels no --gold-column answer",
)
@with_settings(LabelJob)
def label(
    job: LabelJob,
    plan: Annotated[bool, typer.Option("--plan", help="Show what the job would do, and run nothing.")] = False,
    restart: Restart = False,
    retry_errors: RetryErrors = False,
    quiet: Quiet = False,
) -> None:
    """Label the rows of the input: one label of a list, one of each of several fields, or JSON of a schema.

    Run it every night over a folder that grows: each row is labeled once.

    Exit codes: 0 all rows done (row errors included), 1 rows are missing (chunks set aside, or broken off: run it
    again), 2 refused before starting, 3 a fault of exspec, 130 interrupted.
    """
    if plan:
        from exspec.jobs.commands.plan import plan as show

        raise typer.Exit(show(job))
    with Progress(quiet) as progress:
        progress.stage("checking the job")
        show_token()
        from exspec.jobs.commands import label as jobs

        raise typer.Exit(jobs.label(job, restart, retry_errors, progress))


Options = Annotated[
    str | None, typer.Option("--storage-options", help="JSON of the file system's options, as fsspec takes them.")
]


def _options(text: str | None) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--storage-options: not JSON: {error}") from error
    if not isinstance(options, dict):
        raise ValueError("--storage-options: expected a JSON object")
    return options


@command(
    "exspec audit out/",
    "exspec audit out/ --share 0.01 --seed 7 --no-generate",
)
def audit(
    output: Annotated[str, typer.Argument(help="Output folder of a job, a path or an fsspec URL.")],
    count: Annotated[int, typer.Option(min=1, help="Rows to decode again, spread over the shards.")] = 64,
    share: Annotated[float | None, typer.Option(min=0, max=1, help="Share of all rows, in place of a count.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    generate: Annotated[bool, typer.Option(help="Compare with transformers' generate in float32 too.")] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors.")
    ] = False,
    storage_options: Options = None,
) -> None:
    """Decode a sample of a finished job again by plain decoding, and compare.

    Writes _audit.json and a section of the report.

    Exit codes: 0 all equal in the job's own shape, 1 some differ, 2 refused.
    """
    from exspec.jobs.commands import audit as job

    permissions = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    raise typer.Exit(job.audit(output, _options(storage_options), count, share, seed, generate, permissions))


@command(
    "exspec report out/",
    "exspec report out/plain out/exspec --price-per-gpu-hour 3",
)
def report(
    outputs: Annotated[list[str], typer.Argument(help="Output folders of jobs, paths or fsspec URLs.")],
    price_per_gpu_hour: Price = None,
    storage_options: Options = None,
) -> None:
    """Build the report of a job again from its parts, and compare jobs side by side.

    The last line is JSON: a list with an object for each output.
    """
    from exspec.jobs.commands import report as job

    job.report(outputs, _options(storage_options), price_per_gpu_hour)


def _size(text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is no size, expected bytes with a unit such as 256MiB or 1GB")
    return size


@command(
    "exspec compact out/",
    "exspec compact s3://bucket/out/ --target-size 1GiB",
)
def compact(
    output: Annotated[str, typer.Argument(help="Output folder of a finished job, a path or an fsspec URL.")],
    target_size: Annotated[
        int, typer.Option(parser=_size, metavar="SIZE", help="Size of a file, at most, about: 256MiB, 1GB.")
    ] = "256MiB",  # type: ignore[assignment]
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of who is at work on the output.")] = False,
    storage_options: Options = None,
) -> None:
    """Merge the small parts of a finished job into larger files.

    The rows and their order stay, and so does what works on an output: run, report and audit. A killed compaction
    loses nothing: run it, or the job, again. A reader of the folder never sees a row twice; the rows of one file at
    a time may be missing for a moment while _SUCCESS is away. Where a job is at work on the output, it leaves.

    Exit codes: 0 done, 2 refused.
    """
    from exspec.jobs.commands import compact as job

    job.compact(output, _options(storage_options), target_size, wait)


@command(
    "exspec convert out/ out.jsonl",
    "exspec convert s3://bucket/out/ s3://bucket/out.csv.gz --columns id --columns completion",
    "exspec convert out/ by-label/ --partition-by label",
)
def convert(
    output: Annotated[str, typer.Argument(help="Output folder of a finished job, a path or an fsspec URL.")],
    file: Annotated[
        str, typer.Argument(help="File to write: NAME.jsonl or NAME.csv, perhaps with .gz; or a new folder.")
    ],
    columns: Annotated[list[str] | None, typer.Option(help="Columns to write. Default: all.")] = None,
    partition_by: Annotated[
        list[str] | None, typer.Option(help="Write Parquet into folders by the values of this column.")
    ] = None,
    storage_options: Options = None,
) -> None:
    """Write the rows of a finished job into one file of JSON Lines or CSV, in their order, or into folders of Parquet.

    Where the input was a file of the batch API, JSON Lines are its answers, unless columns are named.

    Exit codes: 0 written, 2 refused.
    """
    from exspec.jobs.commands import convert as job

    options = _options(storage_options)
    if partition_by:
        rows = job.partition(output, file, options, partition_by, columns)
    else:
        rows = job.convert(output, file, options, columns)
    print(f"{rows} rows in {redacted(file)}")


@command(
    "exspec messages messages/",
    "exspec messages messages/ --rows 10000 --shards 16 --seed 1",
)
def messages(
    output: Annotated[Path, typer.Argument(help="Folder for the shards.")],
    rows: Annotated[int, typer.Option(min=1, help="Messages in all.")] = 512,
    shards: Annotated[int, typer.Option(min=1, help="Files to spread them over.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the messages.")] = 5,
) -> None:
    """Write demo messages as Parquet shards, to try a job with."""
    from exspec.jobs.demo.shards import write_shards

    write_shards(output, rows, shards, seed)


@command(
    "exspec bench --limit 16 --repeats 1",
    "exspec bench --methods plain,exspec:3,exspec:8 --batch-size 4",
    "exspec bench --methods plain,exspec@model,exspec@suffix:12",
    "exspec bench --target model/ --draft small/ --draft head/ --methods plain,exspec@model,exspec@eagle3",
)
@with_flags(BenchSettings, SHAPE)
def bench(settings: BenchSettings) -> None:
    """Time the methods against each other and compare their tokens. The last line is one JSON object."""
    from exspec.jobs.benchmarks import bench as job

    job.run(settings)


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
    """Measure a device with random weights in the shapes of known models. Nothing is downloaded.

    Checks that tokens are exact and times plain decoding, speculation and transformers, within a number of seconds.
    """
    from exspec.jobs.benchmarks import synthetic as job

    job.measure(replace(settings, pair=pair), output)


Address = Annotated[
    str | None,
    typer.Option(
        help="URL of the cluster's dashboard. Default: RAY_API_SERVER_ADDRESS, RAY_DASHBOARD_ADDRESS or RAY_ADDRESS."
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        help="The cluster's token. Default: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."
    ),
]


@command(
    "exspec submit --address http://head:8265 run --job job.yaml",
    "exspec submit --detach --env AWS_ENDPOINT_URL label --job nightly.yaml",
    "exspec submit --gpus 1 audit s3://bucket/out",
    context_settings={"allow_interspersed_args": False},
)
def submit(
    context: typer.Context,
    command: Annotated[str, typer.Argument(help="run, label or audit.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The command's own arguments.", show_default=False)
    ] = None,
    address: Address = None,
    token: Token = None,
    name: Annotated[str | None, typer.Option(help="Id of the job, which no other job may have.")] = None,
    detach: Annotated[bool, typer.Option(help="Print the job's id and do not follow it.")] = False,
    wheel: Annotated[
        bool, typer.Option(help="Send this exspec along as a wheel, or use the one in the cluster's image.")
    ] = True,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE, or NAME as it is here: a variable for the job. All who have the token can read it."
        ),
    ] = None,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs of the command's own process: an audit decodes there.")] = 0,
) -> None:
    """Send a command to a Ray cluster as a job, and follow its log. Its own options come before the command's name.

    The arguments are checked here first. Paths are URLs, or folders that all nodes share; a job file is sent along.
    Ctrl-C leaves the job running.

    Exit codes: those of the command (0, 1, 2; 2 also where it could not be sent), 3 the job failed otherwise, 4 it was
    stopped, 130 left running by Ctrl-C.
    """
    from exspec.jobs.cluster import submit as job
    from exspec.jobs.cluster.client import Cluster

    assert context.parent is not None
    known: dict[str, Any] = context.parent.command.commands  # type: ignore[attr-defined]
    if command not in job.COMMANDS or command not in known:
        expected = ", ".join(name for name in job.COMMANDS if name in known)
        raise ValueError(f"submit {command}: expected one of {expected}, after the options of submit itself")
    parsed = known[command].make_context(command, list(arguments or []), parent=context)
    call = job.check(known[command], parsed.params, arguments or [])
    raise typer.Exit(job.submit(call, Cluster(address, token), name, detach, wheel, env or [], gpus))


JobId = Annotated[str, typer.Argument(metavar="ID", help="Id of the job, as submit printed it.", show_default=False)]


@command(
    "exspec status",
    "exspec status exspec-run-20260101-120000-ab12",
)
def status(
    job: Annotated[str | None, typer.Argument(metavar="[ID]", help="Id of a job. Default: all of them.")] = None,
    address: Address = None,
    token: Token = None,
) -> None:
    """Show a submitted job, or all that exspec submitted to a cluster."""
    from exspec.jobs.cluster import client as cluster

    cluster.show_status(cluster.Cluster(address, token), job)


@command(
    "exspec logs exspec-run-20260101-120000-ab12 --follow",
)
def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option(help="Go on until the job ends, and end as it did.")] = False,
    address: Address = None,
    token: Token = None,
) -> None:
    """Print the log of a submitted job.

    Exit codes: 0, or with --follow those of submit.
    """
    from exspec.jobs.cluster.client import Cluster

    cluster = Cluster(address, token)
    if follow:
        raise typer.Exit(cluster.follow(job))
    print(cluster.logs(job), end="")


@command(
    "exspec cancel exspec-run-20260101-120000-ab12",
)
def cancel(job: JobId, address: Address = None, token: Token = None) -> None:
    """Stop a submitted job and wait until it has stopped. What it finished is kept; the same command again resumes."""
    from exspec.jobs.cluster.client import Cluster

    print(Cluster(address, token).cancel(job))


def main() -> None:
    """Entry point: an error that a person can act on becomes a sentence, or a line for each problem, and exit code 2,
    a fault of exspec 3.

    A ValueError raised here was worded for a person; one raised in a library was not, and is a fault.
    """
    try:
        app()
    except Exception as error:
        if isinstance(error, OSError) and error.filename and error.strerror:
            problems = [f"{error.filename}: {error.strerror}"]
        elif isinstance(error, JobError):
            problems = list(error.problems)
        elif isinstance(error, OSError) or (isinstance(error, ValueError) and _is_ours(error)):
            problems = [str(error)]
        else:
            traceback.print_exception(error)
            print("exspec: this is a fault of exspec; nothing that is committed is lost", file=sys.stderr)
            sys.exit(3)
        said = [redacted(" ".join(problem.split())) for problem in problems]
        print("exspec:", said[0] if len(said) == 1 else f"{len(said)} problems", file=sys.stderr)
        for problem in said if len(said) > 1 else ():
            print(f"  {problem}", file=sys.stderr)
        sys.exit(getattr(error, "code", 2))


def _is_ours(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("exspec.")
