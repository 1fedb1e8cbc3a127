"""Texts that the target writes on from places inside a job's rows, to be learned beside the rows.

A drafter soon knows a few thousand rows by heart, and they hold little of what their target knows of such texts. The
target's own samples hold the rest.
"""

import random
import time
from collections.abc import Sequence

from transformers import PreTrainedModel

from exspec.actors.engine import Engine, EngineConfig, Request, Sampling
from exspec.jobs.training.examples import Example

AT_ONCE = 64  # texts
KV_COLUMNS = 2**14  # of all texts that are being written


def write_texts(target: PreTrainedModel, rows: Sequence[Example], tokens: int, seconds: float) -> list[list[int]]:
    """Texts with about so many tokens of the target's own in all, or as many as it writes in so many seconds. None is
    longer than the longest row."""
    whole = [[*prompt, *completion] for prompt, completion in rows]
    longest = max(map(len, whole))
    count = max(1, min(AT_ONCE, KV_COLUMNS // longest))
    engine = Engine(target, None, EngineConfig(method="plain", batch_size=count, window=count, capacity=longest))
    draw, end = random.Random(0), time.monotonic() + seconds
    begun, made, number = dict[object, list[int]](), list[list[int]](), 0
    while tokens > 0 and time.monotonic() < end:
        while len(begun) < 2 * count:  # some wait, so that no slot is empty
            row = draw.choice(whole)
            begun[number] = row[: draw.randrange(1, len(row))]
            room = longest - len(begun[number])
            engine.submit(Request(number, begun[number], room, sampling=Sampling(temperature=1.0, seed=number)))
            number += 1
        engine.step()
        for done in engine.take():
            made.append([*begun.pop(done.id), *done.tokens])
            tokens -= len(done.tokens)
    rest = [[*running.request.prompt, *running.committed] for running in engine.pool.running]
    return made + rest  # without them short texts would be too many
