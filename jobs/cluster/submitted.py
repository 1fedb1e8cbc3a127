"""What runs on the cluster, as `python -m exspec.jobs.cluster.submitted`: the command whose arguments were sent along.

They come in a file and not on the command line, which everyone who can see the cluster's dashboard can read.
"""

import json
import sys
import traceback
from pathlib import Path

ARGUMENTS = "arguments.json"
CRASHED = 70  # exit code; Python's own for an error, 1, has a meaning for every command


def main() -> None:
    sys.argv = ["exspec", *json.loads(Path(ARGUMENTS).read_text(encoding="utf-8"))]
    try:
        from exspec.jobs import cli  # here: what it needs may be missing in the cluster's image

        cli.main()
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)


if __name__ == "__main__":
    main()
