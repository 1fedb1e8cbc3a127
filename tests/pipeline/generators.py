"""The processes of generator actors."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


def generators(of: psutil.Process) -> list[psutil.Process]:
    """The generator processes among the descendants of a process."""
    found = []
    for process in of.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("MapWorker(MapBatches(Generator))" in word for word in process.cmdline()[:1]):
                found.append(process)
    return found


@contextmanager
def held(of: psutil.Process) -> Iterator[None]:
    """Suspends the present generators, so that a fast job waits."""
    stopped = generators(of)
    assert stopped, "nothing decodes"
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()
