"""Measures how an actor starts: `python -m tests.tools.start [KERNELS]`. KERNELS: as in a job; default: compiled.

Prints a JSON line: seconds by stage, for the first actor of a job (cold), for the next one on its host (warm), and for
one on another host of its kind (shared). The demo pair decodes one prompt. What Ray does before is not counted.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil


def actor(kernels: str, code: Path) -> dict[str, float]:
    """Start as an actor does, up to the first token and to the end of the prompt. code: a file with what another actor
    has compiled; if it does not exist, this actor writes it."""
    last, seconds = psutil.Process().create_time(), dict[str, float]()

    def lap(stage: str) -> None:
        nonlocal last
        seconds[stage], last = round(time.time() - last, 2), time.time()

    lap("interpreter")
    import torch

    lap("torch")
    from exspec.actors.engine import Engine, EngineConfig, Request, shared_code
    from exspec.actors.generator import Generator  # noqa: F401
    from exspec.jobs.demo import DRAFT, TARGET
    from exspec.pipeline.cluster.graph import PairLoader  # noqa: F401
    from exspec.pipeline.job.settings import Job
    from exspec.pipeline.shape import pair_of

    lap("other imports")
    if code.exists():
        shared_code.keep(pickle.loads(code.read_bytes()))
    lap("code of others")
    torch.set_num_threads(1)
    job = Job(target=str(TARGET), draft=str(DRAFT), input=["in"], output="out")
    pair = pair_of(job, "cpu", draft=True)
    lap("weights")
    engine = Engine(pair.target, pair.draft, EngineConfig(attention="in_place", kernels=kernels, batch_size=8))
    lap("engine")
    engine.submit(Request("first", tuple(range(3, 40)), 20))
    while not engine.statistics.tokens:
        engine.step()
    lap("first token")
    engine.run()
    lap("other tokens")
    if not code.exists():
        code.write_bytes(pickle.dumps(shared_code.read(shared_code.names())))
    return seconds


def main(kernels: str = "compiled") -> None:
    from exspec.actors.engine.layers.programs import FOLDER  # not in the actors: it imports torch

    with tempfile.TemporaryDirectory() as place:
        figures = {}
        for start, host, code in (("cold", "one", "code"), ("warm", "one", "unused"), ("shared", "other", "code")):
            words = [sys.executable, "-m", "tests.tools.start", kernels, f"{place}/{code}"]
            (Path(place) / host).mkdir(exist_ok=True)  # torch precompiles headers into TMPDIR
            environment = os.environ | {"EXSPEC_CACHE": f"{place}/{host}", "TMPDIR": f"{place}/{host}"}
            environment.pop(FOLDER, None)
            figures[start] = json.loads(subprocess.check_output(words, env=environment, stderr=subprocess.DEVNULL))
        print(json.dumps(figures))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(actor(sys.argv[1], Path(sys.argv[2]))))
    else:
        main(*sys.argv[1:])
