"""`exspec check`: compares every file of an output with the log."""

from typing import Any

from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.output.contents import check as compare
from exspec.pipeline.output.owner import SUCCESS, Output, read_output
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import anonymous, redacted
from exspec.pipeline.storage import Folder


def check(output: str, options: dict[str, Any]) -> int:
    """Read all files of an output and print those that are not as the log says. Returns 1 if there are any, else 0."""
    folder = Folder(output, options)
    done, place = read_output(folder), anonymous(folder.url)
    names = done.state.names()
    with Progress(quiet=False) as progress:
        progress.stage(f"reading {counted(len(names), 'file')}")
        problems = folder.each(lambda name: _problem(done, name), names)
    stray, state = done.foreign(), done.state  # another process may have replaced files meanwhile
    lines = [problem for name, problem in zip(names, problems, strict=True) if problem and state.has(name)]
    lines += [f"{place}/{n}: is not in the log; move it away, because readers of the folder read it" for n in stray]
    if state.done is not None and not folder.exists(SUCCESS):
        lines.append(f"{place}/{SUCCESS}: is missing; run the job again")
    for line in lines or [f"{place}: {counted(len(names), 'file')}, all as the log says"]:
        print(line)
    return int(bool(lines))


def _problem(output: Output, name: str) -> str | None:
    """What is wrong with a file of the log, and what to do."""
    try:
        compare(output, name, output.place(name))
    except JobError as error:
        return redacted(str(error))
    return None
