"""`exspec synthetic TARGET:DRAFT OUT.json`: measures a device with models of known shapes and random weights.

    python -m exspec.jobs.benchmarks.synthetic TARGET:DRAFT OUT.json

is the same program, and needs only torch and transformers. It is the first program to run on a new GPU.

It runs in stages, each within its share of the seconds. Every result is written to the file at once. A slow stage is
cut short. If a stage fails or hangs, the file says why and the next stage runs. The stages run in a child process,
which is killed when it hangs and replaced when a stage fails.
"""

import argparse
import json
import multiprocessing
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from exspec.actors.engine.layers.programs import CODE, OutOfTimeError
from exspec.actors.engine.settings import settings_of
from exspec.jobs.benchmarks.decoding import check_device
from exspec.jobs.benchmarks.settings import SyntheticSettings
from exspec.jobs.benchmarks.shapes import SHAPES
from exspec.jobs.benchmarks.stages import STAGES, Measurement, Result

GRACE = 60.0  # seconds after its deadline at which a stage counts as hanging; tracing a long draft takes most of them
SETUP = "setup"


@dataclass
class Message:
    """From the child process: a stage begins until its deadline, has a result, or ends."""

    stage: str
    result: Result | None = None
    deadline: float | None = None
    ending: Result = field(default_factory=dict)


def work(settings: SyntheticSettings, names: Sequence[str], end: float, send: Callable[[Message], None]) -> None:
    """Run the setup and the stages. Stops at a failure, after which this process may be unable to use the device."""
    measurement = None
    for name in (SETUP, *names):
        stage, start = Measurement.setup if name == SETUP else STAGES[name][0], time.monotonic()
        budget = max(end - start, 0.0)
        if name != SETUP:
            shares = [STAGES[n][1] for n in names[names.index(name) :]]
            budget *= shares[0] / sum(shares)
        send(Message(name, deadline=start + budget))
        ending: Result = {"cut_short": False, "error": None}
        try:
            measurement = measurement or Measurement(settings)
            with CODE.until(start + budget):
                for result in stage(measurement, start + budget):
                    send(Message(name, result))
        except OutOfTimeError:
            ending["cut_short"] = True
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-6:]
            where = ", ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)
            ending["error"] = f"{type(error).__name__}: {error}"[:2000] + f" ({where})"
        seconds = round(time.monotonic() - start, 1)
        send(Message(name, ending={"budget_seconds": round(budget, 1), "seconds": seconds, **ending}))
        if measurement is None or ending["error"]:
            return
        measurement.forget()


def run_child(settings: SyntheticSettings, names: Sequence[str], end: float, to: Connection) -> None:
    """What the child process runs."""
    work(settings, names, end, to.send)


class StagedReport:
    """The report. It is written after every message; a stage is printed when it ends."""

    def __init__(self, settings: SyntheticSettings, output: Path) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self.output = output
        self.content: dict[str, Any] = {
            "settings": asdict(settings), "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version(), "stages": {},
        }  # fmt: skip

    def add(self, message: Message) -> None:
        stage = self.content["stages"].setdefault(message.stage, {"results": []})
        if message.result is not None:
            stage["results"].append(message.result)
        stage.update(message.ending)
        self.output.write_text(json.dumps(self.content) + "\n")
        if message.ending:
            print(json.dumps({message.stage: stage}), flush=True)


Child = Callable[[SyntheticSettings, Sequence[str], float, Connection], None]


def measure(settings: SyntheticSettings, output: Path, child: Child = run_child) -> dict[str, Any]:
    """Run all stages and return the report. Raises ValueError if the device is missing."""
    check_device(settings.device)
    end = time.monotonic() + settings.seconds
    report, names = StagedReport(settings, output), list(STAGES)
    while names and time.monotonic() < end:
        failed = _follow(settings, names, end, report, child)
        if failed == SETUP:  # it would fail again
            break
        names = names[names.index(failed) + 1 :] if failed else []
    for name in names:
        report.add(Message(name, ending={"error": "not run"}))
    return report.content


def _follow(
    settings: SyntheticSettings, names: Sequence[str], end: float, report: StagedReport, child: Child
) -> str | None:
    """Run a child process and record its messages. Returns the stage that failed, if one did."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(settings, tuple(names), end, sender))
    process.start()
    sender.close()
    stage, deadline = SETUP, end
    try:
        while receiver.poll(max(deadline + GRACE - time.monotonic(), 0.0)):
            message: Message = receiver.recv()
            report.add(message)
            stage, deadline = message.stage, message.deadline or deadline
            if message.ending.get("error"):
                return stage
            if message.ending and stage == names[-1]:
                return None
        reason = f"it hung, and was ended {GRACE:.0f} s past its deadline"
    except EOFError:
        process.join(GRACE)
        reason = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    report.add(Message(stage, ending={"error": reason}))
    return stage


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of `python -m`."""
    parser = argparse.ArgumentParser("python -m exspec.jobs.benchmarks.synthetic")
    parser.add_argument("pair", metavar="TARGET:DRAFT", help="shapes: " + ", ".join(SHAPES))
    parser.add_argument("output", metavar="OUT.json", type=Path, help="file for the report")
    for name, known in settings_of(SyntheticSettings).items():
        kind = str if known.choices else known.kind
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=known.default, choices=known.choices or None, help=known.help)
    given = vars(parser.parse_args(arguments))
    output = given.pop("output")
    try:
        measure(SyntheticSettings(**given), output)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
