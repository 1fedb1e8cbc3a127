"""What a process of a measurement is replaced by; in a module that such a process can import."""

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from exspec.jobs.benchmarks.synthetic import GRACE, Message, Plan


def failing(_: Plan, names: Sequence[str], end: float, to: Connection) -> None:
    """Stands in for a process: its first stage fails in the way of its name."""
    to.send(Message("setup", {"names": list(names)}, end, {"seconds": 0}))
    for name in names:
        to.send(Message(name, deadline=time.monotonic() - GRACE if name == "profile" else end))
        to.send(Message(name, {"piece": name}))
        if name == "places":
            os._exit(7)
        if name == "profile":
            time.sleep(600)
        to.send(Message(name, ending={"error": "RuntimeError: no" if name == "exact" else None}))
        if name == "exact":
            return
