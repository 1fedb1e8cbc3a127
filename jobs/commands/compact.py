"""`exspec compact`: merges the parts of a finished job into larger files."""

from typing import Any

from exspec.pipeline.errors import counted
from exspec.pipeline.output.compact import compact as merge
from exspec.pipeline.storage import Folder


def compact(output: str, options: dict[str, Any], target_size: int, wait: bool) -> None:
    """Compact an output and print the result."""
    done = merge(Folder(output, options), target_size, wait)
    if not done.written:
        print(f"nothing to do: {output} has {counted(done.before, 'file')}, and no two consecutive files fit into one")
        return
    print(f"{output}: {counted(done.after, 'file')} instead of {done.before}, {done.written} of them merged")
