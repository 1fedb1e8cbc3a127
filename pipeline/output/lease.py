"""The owner of an output writes a heartbeat file every few seconds, so that others can tell whether it is alive.

A wrong guess costs work, not rows: an owner that was believed dead and goes on learns from the log that it lost.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from exspec.pipeline.output.log import LOG
from exspec.pipeline.storage import PROBE, Folder

BEAT = 5.0  # seconds between heartbeats
PATIENCE = 60.0  # seconds without a heartbeat after which an owner counts as dead


class Lease:
    """The heartbeat of a process that takes an output. It starts before the process takes it."""

    def __init__(self, folder: Folder, nonce: str) -> None:
        self.folder, self.name = folder, sign_name(nonce)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._sign(0)
        self._thread.start()

    def _sign(self, count: int) -> None:
        self.folder.write(self.name, str(count).encode())

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(BEAT):
            count += 1
            try:
                self._sign(count)
            except Exception:  # the store fails for a while; if for long, another process may take the output
                continue

    def clear(self, dead: dict[str, Any]) -> None:
        """Remove the heartbeat file of a dead owner."""
        self.folder.remove(sign_name(dead["lease"]))

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self.folder.remove(self.name)


def sign_name(nonce: str) -> str:
    return f"{LOG}/alive-{nonce}"


def owner(action: str) -> dict[str, Any]:
    """Identifies this process, for others to print and to check whether it is alive."""
    process = psutil.Process()
    return {
        "action": action,
        "host": os.uname().nodename,
        "machine": _machine(),
        "pid": process.pid,
        "started": process.create_time(),
        "ticks": _ticks(process.pid),
    }


def _machine() -> str:
    """Equal for two processes that can see each other: the boot of the machine, and the PID namespace."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return os.uname().nodename


def _ticks(pid: int) -> int | None:
    """When a process started, in ticks since the boot: no change of the clock moves it. None without /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def dead(folder: Folder, taken: dict[str, Any]) -> bool:
    """Whether the owner of the output is dead. Waits for a heartbeat if necessary."""
    if taken["machine"] == _machine():
        try:
            process = psutil.Process(taken["pid"])
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            if taken.get("ticks") is None:  # an older version's, or no Linux
                return bool(process.create_time() != taken["started"])
            return bool(_ticks(process.pid) != taken["ticks"])
        except psutil.NoSuchProcess:
            return True
    name = sign_name(taken["lease"])
    first, since = _last_sign(folder, name), time.monotonic()
    if first is None:
        return True
    # The store's clock may have jumped, so a heartbeat that looks old has the time for two more.
    patience = 2 * BEAT if _silent(folder, name) > PATIENCE else PATIENCE
    while time.monotonic() - since < patience:
        time.sleep(min(BEAT, 1))
        if _last_sign(folder, name) != first:
            return False
    return True


def _last_sign(folder: Folder, name: str) -> bytes | None:
    try:
        return folder.read(name)
    except FileNotFoundError:
        return None


def _silent(folder: Folder, name: str) -> float:
    """Seconds since the last heartbeat by the store's clock; 0 if the store has none."""
    probe = f"{PROBE}-clock-{os.getpid()}"
    folder.write(probe, b"")
    try:
        now, then = folder.modified(probe), folder.modified(name)
    except FileNotFoundError:
        return PATIENCE
    finally:
        folder.remove(probe)
    return 0.0 if now is None or then is None else now - then
