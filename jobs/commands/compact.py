"""`exspec compact`: the parts of a finished job merged into files of a size that readers like."""

from typing import Any

from exspec.pipeline.output.compact import compact as merge
from exspec.pipeline.storage import Folder


def compact(output: str, options: dict[str, Any], target_size: int, wait: bool) -> None:
    """Compact an output and print what came of it."""
    done = merge(Folder(output, options), target_size, wait)
    if not done.written:
        print(f"nothing to do: {output} holds {done.before} files, and no two neighbours fit into one")
        return
    print(f"{done.before} files are {done.after} now in {output}, {done.written} of them merged")
