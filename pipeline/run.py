"""Runs a prepared job: decode what is missing, check, report, and write `_SUCCESS`."""

import os
import platform
import shutil
import signal
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from typing import Any, Literal

import torch
from ray.exceptions import RayError

from exspec.actors.engine import EngineConfig
from exspec.pipeline.cluster.connect import actors_that_fit, check_cluster, connect, device, lacking, logs, on_a_device
from exspec.pipeline.cluster.failures import cause, last_words
from exspec.pipeline.cluster.graph import LATEST, PairLoader, results
from exspec.pipeline.cluster.ray_ledger import RayLedger
from exspec.pipeline.errors import BrokenOffError, JobError, StoppedError, counted, kept_traceback, started
from exspec.pipeline.input.plan import Plan, Shard, Task
from exspec.pipeline.input.snapshot import changed
from exspec.pipeline.job.settings import Job
from exspec.pipeline.learning import Learning, Phase, up_to
from exspec.pipeline.output.collect import Collector, StopError, collect
from exspec.pipeline.output.columns import carried_schema
from exspec.pipeline.output.contents import samples, tables
from exspec.pipeline.output.owner import SUCCESS, Output, Writer, take
from exspec.pipeline.output.parts import PartSink, read_staged
from exspec.pipeline.output.report import Report, stored_occupancy, write_report
from exspec.pipeline.output.state import FORMAT, PART, State
from exspec.pipeline.prepare import Prepared
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import anonymous
from exspec.pipeline.shape import (
    Settled,
    Shape,
    measurements,
    recalled,
    sample,
    settle,
    stored_shape,
)
from exspec.pipeline.storage import STAGED

Repair = Callable[[Output, Plan], Plan]
SAMPLES = 2  # completions printed at the end


def execute(
    prepared: Prepared,
    retry_errors: bool = False,
    load: Any = None,
    progress: Progress | None = None,
    repair: Repair | None = None,
    learning: Learning | None = None,
) -> int:
    """Run what is missing, and with retry_errors the rows that failed. Returns the exit code.

    load: makes engine and tokenizer in an actor; default: the job's pair. progress: default is quiet. repair: adds
    corrected rows to the plan; they are decoded again, with the other error rows of their chunks. learning: decides
    what the job does between phases.
    Raises BusyError if another run owns the output, BrokenOffError if the job did not finish, StoppedError if it was
    interrupted.
    """
    if (retry_errors or repair) and prepared.job.since:
        option = "--repair" if repair else "--retry-errors"
        raise JobError(f"since: skips finished shards, but {option} reads them again; use one of the two")
    output, plan, progress = prepared.output, prepared.plan, progress or Progress()
    if not (prepared.restart or retry_errors or repair) and finished(output, plan):
        progress.tell(_nothing_to_do(output.state, anonymous(prepared.folder.url)))
        return 0
    if prepared.note:
        progress.say(f"note: {prepared.note}")
    action = "restart" if prepared.restart else "repair" if repair else "retry" if retry_errors else "run"
    stop_on_signals()
    run = _Run(prepared, load, progress, learning or Learning())
    try:
        with last_words():
            if output.state.job is None and output.state.taken is None:
                run.connect(plan.rows)  # a cluster that lacks something refuses the job before its log begins
            with take(output, action, prepared.job.wait) as writer:
                return run.run(writer, retry_errors, repair)
    except KeyboardInterrupt:
        kept = f"{output.state.rows} of {plan.rows} rows are kept"
        raise StoppedError(f"stopped; {kept}; run the job again to resume") from None
    except OSError as error:
        raise BrokenOffError(
            f"output {prepared.folder.url}: {type(error).__name__}: {error}; committed rows are kept; run the job again"
        ) from error


def finished(output: Output, plan: Plan) -> bool:
    """Whether the output is marked as done, for these rows, and all its files have their sizes.

    An owner has something to do if there are more files: those of an earlier owner that died, or came back.
    """
    if output.state.done is None or not output.state.plan.same(plan):
        return False
    shown = output.folder.sizes()
    whole = [shown.get(name) == size for name, size in output.state.sizes()]
    parts = sum(bool(PART.fullmatch(name)) for name in shown)
    return SUCCESS in shown and all(whole) and parts == len(whole) and not output.folder.names(STAGED)


def _nothing_to_do(state: State, place: str) -> str:
    line = f"nothing to do: all {state.rows} rows are in {place}"
    return f"{line}, {errors} of them with an error" if (errors := state.errors) else line


def stop_on_signals() -> None:
    """SIGTERM and SIGHUP (the terminal is closed) end the job as Ctrl-C does, unless they are ignored (nohup)."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _interrupt)


def _interrupt(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # a shell and the kernel may both send SIGHUP
    for output in (1, 2):
        with suppress(OSError):  # not open
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):  # a closed terminal
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    raise KeyboardInterrupt


class _Run:
    """One run on an output. From `run` on, this process owns it as `writer`."""

    writer: Writer

    def __init__(self, prepared: Prepared, load: Any, progress: Progress, learning: Learning) -> None:
        self.prepared, self.load, self.progress, self.learning = prepared, load, progress, learning
        self.job, self.folder, self.plan = prepared.job, prepared.folder, prepared.plan
        self.connected = self.early = False
        self.code: tuple[str, dict[str, bytes]] | None = None  # as `Ledger.share` takes it

    def run(self, writer: Writer, retry_errors: bool, repair: Repair | None) -> int:
        self.writer = writer
        fresh = self.prepared.restart or self.writer.state.job is None
        if fresh and repair:
            raise JobError(f"--repair: expected an output with rows that failed, but {self.folder.url} has no job")
        if not fresh:  # another run may have begun or extended the job since `prepare`
            self.prepared = self.prepared.resumed(self.writer.state)
            self.plan = self.prepared.plan
            self.writer.adopt(read_staged)
        self.writer.sweep()
        state = self.writer.state
        if repair:
            self.plan = repair(self.writer, self.plan)
        if not fresh:  # what `_begin` will write to the log
            state.decode_again(self.plan)
            if self.prepared.changed(state):
                state.decode_again()
        self.only: Literal["mendable", "again"] = "mendable" if retry_errors else "again"
        retries = retry_errors or state.failed("again")
        tried = (state.failed(self.only), sum(s.errors for s in state.summaries())) if retries else None
        if fresh:
            self.connect(self.plan.rows)
            self.plan = replace(self.plan, rows_per_chunk=self.job.chunk_rows(self.plan.rows))
        tasks, again = self._tasks(fresh)
        tasks = self.learning.arranged(tasks)
        first = next(tasks, None)
        if first is None:
            self._update(self.prepared.changed(state))
        elif not fresh:
            self.connect(self.plan.rows - self.writer.state.rows)
        if self.writer.lost:
            lost = counted(self.writer.lost, "row")
            self.progress.say(f"{lost} to decode again: the files that held them are gone or damaged")
        if not fresh and first is not None:
            self.progress.say(f"resuming the job: {self.writer.state.rows} of {self.plan.rows} rows are done")
        config = None if first is None else self._begin(fresh)
        self.writer.publish()
        report = Report(self.writer.state.description, self.plan.rows)
        stopped = None
        with started():
            if first is not None and config is not None:
                stopped = self._decode(chain([first], tasks), again, config, report)
            return self._finish(report, stopped, tried)

    def _tasks(self, fresh: bool) -> tuple[Iterator[Task], Counter[str]]:
        """Missing chunks and these chunks with errors; and the number of the latter by file."""
        if fresh:
            return (Task(chunk) for chunk in self.plan.chunks()), Counter()
        missing = (Task(chunk) for chunk in self.plan.chunks(self.writer.state.held()))
        found = self.writer.state.chunks(self.only)
        # URLs in the log have no secrets; read the shards by the URLs found now.
        failed = [Task(replace(c, shard=self.plan.shards[c.number]), file, start) for c, file, start in found]
        return chain(missing, failed), Counter(str(task.file) for task in failed)

    def connect(self, rows: int) -> None:
        """Join the cluster, and decide what depends on it. rows: to decode. Only the first call does something."""
        if self.connected:
            return
        self.connected = True
        self.progress.stage("joining the cluster" if self.job.ray_address else "starting Ray")
        connect(self.job)
        stop_on_signals()  # Ray has installed its own handler
        # Decided once: a GPU node that joins later must not change the resources of actors.
        self.job = self.job.model_copy(update={"device": device(self.job)})
        check_cluster(self.job)
        if self.job.actors == "auto":
            chunks = max(1, -(-rows // self.job.chunk_rows(rows)))
            self.job = self.job.model_copy(update={"actors": str(min(self._fitting(), chunks))})

    def _fitting(self) -> int:
        """Number of actors: one per GPU, or as many as cores and memory allow."""
        plans = replace(self.prepared, job=self.job).memory(self.prepared.shape.config)
        return actors_that_fit(self.job, sum(plan.total for plan in plans))

    def _begin(self, fresh: bool) -> EngineConfig:
        """Write to the log that the job begins or resumes. Returns the shape that it decodes in."""
        job, prepared = self.job, self.prepared
        if not fresh:
            prepared.refuse_other(self.writer.state, job.device)
        state = self.writer.state
        stored = None if fresh else (state.description | prepared.changed(state))["shape"]
        shape = prepared.shape_of(job, self.plan, stored)
        settled = self._settle(shape) if self.load is None else Settled(shape.config, [])
        if not fresh:
            self._update({"job": prepared.job.published()} | prepared.changed(state))
            return settled.config
        prompts = self.prepared.prompts.within(self.prepared.room(settled.config))
        config = self.learning.begin(job, settled, self.plan.rows, partial(sample, job, self.plan, prompts))
        description = {
            "format": 1,  # older versions can read it until rows are repaired
            "kind": job.kind,
            "job": prepared.job.published(),
            "fingerprint": prepared.fingerprint(job.device),
            "shape": stored_shape(config),
            "calibration": settled.candidates,
            "device": job.device,
            "versions": {n: version(n) for n in ("exspec", "torch", "transformers", "ray", "pyarrow")}
            | {"python": platform.python_version()},
        }
        if self.prepared.restart and self.writer.state.job is not None:
            self.progress.say(f"the old output is now in {anonymous(self.writer.keep_old().url)}")
        self.writer.begin(description, self.plan)
        return config

    def _update(self, description: dict[str, Any]) -> None:
        """Write to the log what this run changes in the description and the plan of the job."""
        again = "fingerprint" in description
        if again or any(shard.repairs for shard in self.plan.shards):
            description = description | {"format": FORMAT}
        self.writer.describe(description, again)
        self.writer.extend(self.plan)

    def _settle(self, shape: Shape) -> Settled:
        """The final shape, from calibration on a device, or fitted to its memory, if necessary."""
        job = self.job
        digests = self.prepared.models.digests
        if not shape.free and not shape.stored and job.memory_gib is None and job.device == "cpu":
            shape = recalled(shape, measurements(job, digests, job.device), self.prepared.models.configs)
            if shape.reason:
                self.progress.say(f"shape: {Settled(shape.config, [], reason=shape.reason)}")
            return Settled(shape.config, [])
        prompts = self.prepared.prompts.within(self.prepared.room(shape.config))
        requests = sample(job, self.plan, prompts) if shape.free else []
        self.progress.stage(
            f"calibrating, at most {job.tune_seconds:.0f} s" if shape.free else "fitting the shape into memory"
        )
        try:
            settled: Settled = on_a_device(job, settle, job, shape, requests, job.device, digests)
        except ValueError as error:
            raise JobError(str(error)) from error
        except (RayError, torch.OutOfMemoryError) as error:
            reason = cause(error)
            advice = "" if "memory_gib" in reason else "; set memory_gib"
            raise JobError(f"calibration failed: {reason}{advice}") from error
        self.progress.say(f"shape: {settled}")
        self.code = settled.code
        return settled

    def _decode(self, tasks: Iterator[Task], again: Counter[str], config: EngineConfig, report: Report) -> str | None:
        """Run the tasks in phases. Returns the reason if the job was stopped early."""
        writer, planned, learning = self.writer, self.plan.rows, self.learning
        finished = writer.state.rows
        self.job, config = learning.resume(self.job, config, writer)
        window = None
        while True:
            report.begin_phase()
            ledger, self.early = RayLedger(window), False
            if self.code:
                ledger.share(*self.code)
            part = up_to(tasks, learning.rows(writer.state.rows, planned))
            stopped = self._phase(part, again, config, report, finished, ledger)
            if self.early:
                tasks, again = self._tasks(False)
            ahead = next(tasks, None)
            if stopped or ahead is None:
                return stopped
            tasks, window = chain([ahead], tasks), ledger.window()
            tokens, seconds = report.phase["completion_tokens"], ledger.signs().seconds
            phase = Phase(self.job, config, planned, tokens, seconds)
            self.job, config = learning.pause(phase, writer, report)

    def _phase(
        self, tasks: Iterator[Task], again: Counter[str], config: EngineConfig, report: Report, finished: int,
        ledger: RayLedger,
    ) -> str | None:  # fmt: skip
        """Run the tasks and commit the results. Returns the reason if the job was stopped early. finished: rows that
        were done before this run."""
        job, schema, writer = self.job, self.prepared.schema, self.writer
        carried = carried_schema(job, self.prepared.mapped)
        answers, last = job.answer_columns(), job.map_output
        sink = PartSink(self.folder, str(writer.state.job), writer.prefix, carried, answers, last)
        make = self.load or PairLoader(job, config, job.device, writer.state.names()[-LATEST:])
        chunk = self.plan.rows_per_chunk
        room = self.prepared.room(config)
        watched = self.progress.decoding(report, finished, job.actor_range[0], ledger.signs, partial(lacking, job))
        with watched, closing(results(job, config, chunk, room, tasks, schema, sink, make, ledger)) as found:
            try:
                collect(job, self._watched(found, report, ledger), report, Collector(writer, again))
            except RayError as error:
                raise BrokenOffError(
                    f"the job broke off: {cause(error)}; committed rows are kept; run it again to resume; details: "
                    f"{kept_traceback(error)}; Ray's logs: {logs()}"
                ) from error
            except StopError as error:
                return str(error)
        return None

    def _watched(
        self, results: Iterator[dict[str, Any]], report: Report, ledger: RayLedger
    ) -> Iterator[dict[str, Any]]:
        """The results, until the phase ends early."""
        for result in results:
            ledger.end(result["task"].key)
            yield result
            if self.learning.ends(report.now):
                self.early = True
                return

    def _finish(self, report: Report, stopped: str | None, tried: tuple[int, int] | None) -> int:
        """Check that every planned row is in a file, write the report, and `_SUCCESS` if the job succeeded."""
        state = self.writer.state
        report.set_aside += [f"{name}: {why}" for name, why in changed(self._read(), self.job.storage_options).items()]
        if stopped:
            report.set_aside.append(stopped)
        report.occupancy = stored_occupancy(self.writer)
        report.complete(state, self.job.evaluate(partial(tables, self.writer, intact=False)))
        figures = report.figures()
        self.progress.stop()
        failed = _too_many(figures, self.job)
        whole = state.complete and not report.set_aside and not failed
        idle = whole and not report.engines
        place = anonymous(self.folder.url)
        lines = [_nothing_to_do(state, place)] if idle else report.closing_lines(figures, place)
        lines += [failed] if failed else []
        for line in lines:
            self.progress.tell(line)
        if figures["set_aside"]:
            self.progress.tell(f"Ray's logs, with the output of its processes: {logs()}")
        if tried is not None:
            self._tell_tried(*tried, figures["errors"])
        if not idle:
            self._show_samples()
        try:
            write_report(report, figures, self.writer)
            if whole and state.done is None:
                self.writer.finish()
        except OSError as error:  # the completions are committed
            self.progress.tell(f"output {anonymous(self.folder.url)}: cannot write the report: {error}")
            return 1
        return int(not whole)

    def _tell_tried(self, tried: int, before: int, errors: int) -> None:
        """Print how many rows were retried, and how many were not. before, errors: error rows before and now."""
        mended = min(tried, max(0, before - errors))
        if tried:
            failed = f"still with an error: {tried - mended}"
            self.progress.tell(f"retried: {counted(tried, 'row')}; done now: {mended}; {failed}")
        if alone := errors - (tried - mended):
            said = f"{counted(alone, 'row')} with an error that a retry would not help; convert --errors writes them"
            self.progress.tell(f"not retried: {said}")

    def _show_samples(self) -> None:
        width = shutil.get_terminal_size().columns
        for row in samples(self.writer, SAMPLES):
            self.progress.tell(cut(f"{row['id']}: {' '.join(row['completion'].split())}", width))

    def _read(self) -> list[Shard]:
        """The shards that this run may have read: all except those that `since` skips."""
        return [shard for shard in self.plan.shards if shard.name not in self.prepared.settled]


def cut(line: str, width: int) -> str:
    """A line of at most `width` characters. It is cut anywhere: some languages have no spaces."""
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _too_many(figures: dict[str, Any], job: Job) -> str:
    """A sentence if so many rows have an error that the job failed; empty if not."""
    rows, errors, most = figures["rows"], figures["errors"], job.max_error_share
    if most is None and errors == rows > 0:
        return (
            f"the job failed: no row has a completion, {errors} of {rows} have an error; correct the input or settings"
        )
    if most is not None and errors > most * rows:
        return f"the job failed: {errors} of {rows} rows have an error, more than max_error_share ({most:g}) allows"
    return ""
