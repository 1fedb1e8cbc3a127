"""A job in a separate process with its own Ray: `python -m tests.pipeline.driver JOB.json SECONDS`."""

import sys
from pathlib import Path

from exspec.pipeline.job.settings import Job
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs

if __name__ == "__main__":
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    sys.exit(execute(prepare(job), load=jobs.ArithmeticLoader(float(sys.argv[2]))))
