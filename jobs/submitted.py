"""What runs on the cluster: the command whose arguments were sent with the job, `python -m exspec.jobs.submitted`.

They come in a file and not on the command line, which everyone who can see the cluster's dashboard can read.
"""

import json
import sys
from pathlib import Path

from exspec.jobs import cli

ARGUMENTS = "arguments.json"

if __name__ == "__main__":
    sys.argv = ["exspec", *json.loads(Path(ARGUMENTS).read_text(encoding="utf-8"))]
    cli.main()
