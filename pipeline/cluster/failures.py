"""Says in one sentence why Ray failed. What Ray itself prints is in its logs."""

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from exspec.pipeline.cluster.connect import logs
from exspec.pipeline.errors import counted

CAUSE = re.compile(r"^([\w.]*(?:Error|Exception|Interrupt|Exit)): (.*)", re.MULTILINE)
NODE = re.compile(r"^\[Node ([\w.:]+)\]", re.MULTILINE)  # in Ray's message about a node without the package of a job
MEMORY = "low on memory"  # in Ray's message about a process that its memory monitor killed
KILLED = "its process was killed, or Ray ended it because a part of Ray died"
WATCH = 0.2  # seconds between looks at Ray's processes
# Prints the last line that it was sent, unless the process that sent it says that all is well.
HELPER = 'while read -r line; do last=$line; done; [ "$last" = well ] || echo "$last" >&2'


def cause(error: Exception) -> str:
    """The sentence. In a text of Ray with several exceptions, the first one is the cause of the others."""
    text = str(error)
    if MEMORY in text:
        return short_of_memory() or _memory(text, 1)
    node = f"node {found[1]} cannot start a process: " if (found := NODE.search(text)) else ""
    for name, message in CAUSE.findall(text):
        if not name.endswith("UserCodeException"):
            return message if name.startswith("exspec.") else f"{node}{name.rsplit('.')[-1]}: {message}"
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


def short_of_memory() -> str:
    """A sentence on this job's processes that Ray's memory monitor has killed; empty if there are none."""
    import ray
    from ray._private import state  # the public way needs Ray's dashboard
    from ray.core.generated import common_pb2, gcs_pb2
    from ray.exceptions import RayError

    read = gcs_pb2.WorkerTableData.FromString  # type: ignore[attr-defined]
    short = common_pb2.WorkerExitType.NODE_OUT_OF_MEMORY  # type: ignore[attr-defined]
    try:
        job = ray.get_runtime_context().get_job_id()
        table = state.state._connect_and_get_accessor().get_worker_table()
    except (RayError, RuntimeError):  # Ray is gone
        return ""
    workers = sorted(map(read, table), key=lambda worker: worker.end_time_ms)
    killed = [w.exit_detail for w in workers if w.exit_type == short and w.job_id.hex() == job]
    return _memory(killed[-1], len(killed)) if killed else ""


def _memory(text: str, killed: int) -> str:
    """The sentence for a message of Ray's memory monitor, which lists the processes that hold the most memory."""
    used = re.search(r"was ([\d.]+)GB used / ([\d.]+)GB", text)
    most = re.search(r"COMMAND\s*\n(\d+)\s+([\d.]+)\s+(.*)", text)
    sentence = f"Ray's memory monitor killed {counted(killed, 'process')}, because the memory ran short"
    sentence += f" ({used[1]} of {used[2]} GB were used)" if used else ""
    sentence += f"; process {most[1]} held the most, {most[2]} GB ({most[3].strip()})" if most else ""
    return f"{sentence}; free memory, lower actors or set memory_gib"


@contextmanager
def last_words() -> Iterator[None]:
    """If this process dies inside the block, a helper process prints why.

    Ray's C++ code calls `_exit` when the raylet or the GCS is gone, and the system kills a process that takes too much
    memory. Nothing of this process can run then.
    """
    helper = subprocess.Popen(["/bin/sh", "-c", HELPER], stdin=subprocess.PIPE, start_new_session=True)
    over, place = threading.Event(), logs()

    def send(line: str) -> None:
        assert helper.stdin is not None
        with suppress(OSError):  # somebody has ended the helper
            helper.stdin.write(f"{line}\n".encode())
            helper.stdin.flush()

    def expect(died: str) -> None:
        send(f"exspec: the job broke off: {died}; committed rows are kept; run it again to resume; Ray's logs: {place}")

    def watch() -> None:
        nonlocal place
        while not over.wait(WATCH):
            if (now := logs()) != place:  # Ray has started
                place = now
                expect(KILLED)
            if dead := _dead():
                expect(f"Ray's {dead} died")
                return

    expect(KILLED)
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        send("well")
        helper.communicate()


def _dead() -> str:
    """The name of a process of the local Ray that has died; empty if all live, or if Ray is elsewhere."""
    from ray._private import worker

    node = worker._global_node
    processes: dict[str, list[Any]] = node.all_processes if node else {}
    needed = [(name, process) for name in ("gcs_server", "raylet") for process in processes.get(name, [])]
    return next((name for name, process in needed if process.process.poll() is not None), "")
