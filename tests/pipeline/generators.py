"""The processes that decode."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil


def generators(of: psutil.Process) -> list[psutil.Process]:
    """Those of the generator actors that a process has started, itself or through others."""
    found = []
    for process in of.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("MapWorker(MapBatches(Generator))" in word for word in process.cmdline()[:1]):
                found.append(process)
    return found


@contextmanager
def held(of: psutil.Process) -> Iterator[None]:
    """Holds those that decode now, so that a job waits for what is done to it, however fast it is."""
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
