"""A child process of the synthetic benchmark that fails, in a module that a child process can import."""

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from exspec.jobs.benchmarks.settings import SyntheticSettings
from exspec.jobs.benchmarks.synthetic import GRACE, Message


def failing(_: SyntheticSettings, names: Sequence[str], end: float, to: Connection) -> None:
    """Each of the first three stages fails in its own way: the process ends, it hangs, an exception."""
    to.send(Message("setup", {"names": list(names)}, end, {"seconds": 0}))
    for name in names:
        to.send(Message(name, deadline=time.monotonic() - GRACE if name == "profile" else end))
        to.send(Message(name, {"result": name}))
        if name == "independence":
            os._exit(7)
        if name == "profile":
            time.sleep(600)
        to.send(Message(name, ending={"error": "RuntimeError: no" if name == "exact" else None}))
        if name == "exact":
            return
