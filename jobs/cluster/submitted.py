"""The entry point of a submitted job: `python -m exspec.jobs.cluster.submitted FILE` runs the command in FILE.

FILE holds the command line as JSON. It is a file because everyone who can open the cluster's dashboard can read the
command line of a job.
"""

import json
import sys
import traceback
from pathlib import Path

CRASHED = 70  # exit code. Python itself would exit with 1, which has a meaning for every command


def main() -> None:
    try:
        sys.argv = ["exspec", *json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))]
        from exspec.jobs import cli  # imported here because the cluster's image may lack its dependencies

        cli.main()
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)


if __name__ == "__main__":
    main()
