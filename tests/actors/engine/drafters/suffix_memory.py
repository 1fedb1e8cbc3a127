"""Memory of the suffix drafter, in a module that other processes can import."""

import random
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from exspec.actors.engine.drafters.suffix import Suffix


def alone(measure: Callable[..., Any], *values: int) -> Any:
    """Call it in a process of its own: tracemalloc counts what all threads of a process allocate."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *values).result()


def peak(size: int) -> int:
    """Bytes at most, while it learns completions of this size."""
    rng = random.Random(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    drafter = Suffix(1)
    for _ in range(150_000 // size):
        drafter.learn([], [rng.randrange(50_000) for _ in range(size)])
        while drafter.waiting:
            drafter.committed({})
    return tracemalloc.get_traced_memory()[1] - before


def filled(store: int) -> tuple[int, int, int]:
    """Bytes of what it learned at most, the number of its nodes, and bytes of rows."""
    rng = random.Random(0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    drafter = Suffix(8, store=store)
    for _ in range(20_000):
        drafter.learn([], [rng.randrange(50_000) for _ in range(20)])
    learned = tracemalloc.get_traced_memory()[0] - before
    for _ in range(20_000):
        drafter.learn([], [1, 2, 3])
    alike = tracemalloc.get_traced_memory()[0] - before
    drafter.learn([], [rng.randrange(50_000) for _ in range(100_000)])
    long = tracemalloc.get_traced_memory()[0] - before
    learned = max(learned, alike, long)
    for slot in range(8):
        drafter.admit(slot, [rng.randrange(50_000) for _ in range(4000)])
        drafter.committed({slot: [rng.randrange(50_000) for _ in range(96)]})
    return learned, len(drafter.tree.children), tracemalloc.get_traced_memory()[0] - before - long
