"""The command line with the arithmetic model, for a separate process with its own Ray.

`python -m tests.pipeline.driver SECONDS run --job JOB.json`: every step of the model takes so many seconds.
"""

import sys
from functools import partial

from exspec.jobs import cli
from exspec.jobs.commands import run as command
from tests.pipeline import jobs

if __name__ == "__main__":
    _, seconds, *words = sys.argv
    sys.argv = ["exspec", *words]
    command.execute = partial(command.execute, load=jobs.ArithmeticLoader(float(seconds)))
    cli.main()
