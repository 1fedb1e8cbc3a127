"""The log of a job: numbered entries below the output folder, which are created only once and never changed.

A process that writes an entry has read all entries before it. If two processes write to one output, one of them finds
its number taken and learns that it is no longer the owner. Nothing else is needed to keep them apart.
"""

import gzip
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

from exspec.pipeline.errors import JobError, job_errors
from exspec.pipeline.storage import STREAMS, Folder

LOG = "_log"
NAME = re.compile(r"[0-9]{10,}\.json\.gz")
Entry = dict[str, Any]


class Log:
    """The log of a folder. length: number of entries read or written so far."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.length = folder, 0

    def read(self) -> Iterator[Entry]:
        """The entries since the last call, in order. Raises JobError if one is damaged or missing."""
        known = sum(bool(NAME.fullmatch(name)) for name in self.folder.names(LOG)) if self.length == 0 else 0
        for first in range(1, known + 1, 4 * STREAMS):
            names = [entry_name(n) for n in range(first, min(first + 4 * STREAMS, known + 1))]
            for content in self.folder.each(self._known, names):
                yield self._next(content)
        while True:
            try:
                content = self.folder.read(entry_name(self.length + 1))
            except FileNotFoundError:
                return
            yield self._next(content)

    def append(self, entry: Entry) -> bool:
        """Add an entry; False if another process has added one since the last read."""
        content = json.dumps(entry | {"nonce": uuid.uuid4().hex}, separators=(",", ":")).encode()
        if not self.folder.create(entry_name(self.length + 1), gzip.compress(content, 5, mtime=0)):
            return False
        self.length += 1
        return True

    def _known(self, name: str) -> bytes:
        try:
            return self.folder.read(name)
        except FileNotFoundError as error:
            raise JobError(
                f"{self.folder.url}/{name}: is missing, but there are later log entries; put it back, or use another "
                "output"
            ) from error

    def _next(self, content: bytes) -> Entry:
        with job_errors(f"{self.folder.url}/{entry_name(self.length + 1)}: damaged log entry"):
            entry: Entry = json.loads(gzip.decompress(content))
        self.length += 1
        return entry


def entry_name(number: int) -> str:
    """File name of a log entry. Numbers start at 1."""
    return f"{LOG}/{number:010d}.json.gz"
