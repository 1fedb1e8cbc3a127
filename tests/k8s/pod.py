"""Imitates a container of a pod with Linux namespaces.

It has a read-only root with only the system and Python, a user that is not root, and the manifest's mounts and
variables. When it is killed, all its processes die. The network, limits of CPU and memory, dropped capabilities and
seccomp are not imitated.
"""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.k8s.manifests import ROOT, Manifest

SETUP = r"""
set -eu
root=$1 user=$2 count=$3; shift 3
mount -t tmpfs -o mode=755 root "$root"
mkdir -p "$root/etc" "$root/proc" "$root/dev"
cp -a /etc/passwd /etc/group /etc/hosts /etc/nsswitch.conf /etc/ld.so.cache /etc/ssl "$root/etc/" 2>/dev/null || true
for top in /bin /sbin /lib /lib32 /lib64; do
  if [ -L "$top" ]; then cp -d "$top" "$root$top"; elif [ -d "$top" ]; then set -- "$@" "$top"; fi
done
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
# Triples: source, mount point, and ro, rw or memory.
while [ "$count" -gt 0 ]; do
  from=$1 at=$root$2 how=$3; shift 3; count=$((count - 1))
  [ "$how" = memory ] || mkdir -p "$at"
  case "$how" in
    memory) mount -t tmpfs -o "mode=1777,size=$from" memory "$at" ;;
    rw) mount --bind "$from" "$at" ;;
    ro) mount --bind "$from" "$at"; mount -o remount,bind,ro "$at" ;;
  esac
done
mount -o remount,ro "$root"
exec chroot --userspec="$user" "$root" "$@"
"""
VISIBLE = ("/usr",)  # of the machine, besides Python and this repository


@functools.cache
def obstacle() -> str | None:
    """Why this machine cannot imitate a container, or None if a trial works."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "only root on Linux can imitate a container"
    with tempfile.TemporaryDirectory(prefix="exspec-") as made:
        root, home = Path(made, "root"), Path(made, "home")
        root.mkdir()
        home.mkdir()
        trial = _inside(str(root), "10001:10001", [*_machine(), (str(home), "/tmp", "rw")], {}, "/tmp")
        done = subprocess.run([*trial, "python", "-c", "import exspec.jobs"], capture_output=True, text=True)
    return f"this machine cannot imitate a container: {done.stderr.strip()[-200:]}" if done.returncode else None


def _machine() -> list[tuple[str, str, str]]:
    """Mounts of the machine's files that a container sees."""
    prefixes = {str(ROOT), sys.prefix, sys.base_prefix}
    return [(path, path, "ro") for path in (*VISIBLE, *sorted(prefixes)) if Path(path).is_dir()]


def _inside(root: str, user: str, mounts: list[tuple[str, str, str]], env: dict[str, str], home: str) -> list[str]:
    """The start of a command line that runs inside a container."""
    variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "LANG": "C.UTF-8", **env}
    return [
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork"),
        *("sh", "-c", SETUP, "setup", root, user, str(len(mounts)), *(word for m in mounts for word in m)),
        *("env", "-i", f"--chdir={home}", *(f"{k}={v}" for k, v in variables.items())),
    ]


def command(
    template: Manifest, name: str, volumes: Path, files: dict[str, str], argv: list[str], env: Any
) -> list[str]:
    """The command line that runs `argv` like the named container of the template.

    volumes: a folder for the emptyDirs. files: the contents of the ConfigMaps, by file name.
    """
    spec = template["spec"]
    (container,) = (c for c in spec["containers"] if c["name"] == name)
    security = spec["securityContext"]
    mounts = _machine()
    for mount in sorted(container["volumeMounts"], key=lambda m: str(m["mountPath"])):
        (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            mounts.append((volume["emptyDir"]["sizeLimit"].removesuffix("i"), mount["mountPath"], "memory"))
            continue
        folder = volumes / mount["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for file, text in files.items():
                (folder / file).write_text(text)
        else:
            os.chown(folder, -1, security["fsGroup"])
            folder.chmod(0o2777)
        mounts.append((str(folder), mount["mountPath"], "ro" if mount.get("readOnly") else "rw"))
    root = volumes / "root"
    root.mkdir(parents=True, exist_ok=True)
    user = f"{security['runAsUser']}:{security['runAsGroup']}"
    return [*_inside(str(root), user, mounts, env, env["HOME"]), *argv]


class Running:
    """The first process of a container, in the background."""

    def __init__(self, argv: list[str], log: Path) -> None:
        with log.open("wb") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill all processes of the container. The kernel does it when the first process of a PID namespace is killed.

        Killing `unshare` is not enough: a process that changed its user does not die with its parent.
        """
        if self.alive:
            unshare = psutil.Process(self.process.pid)
            inside = unshare.children(recursive=True)
            for first in unshare.children():
                first.kill()
            self.process.wait(timeout=30)
            _, left = psutil.wait_procs(inside, timeout=30)
            assert not left, f"still alive: {left}"


@contextmanager
def running(argv: list[str], log: Path) -> Iterator[Running]:
    """A container in the background. It is killed at the end."""
    container = Running(argv, log)
    try:
        yield container
    finally:
        container.kill()
