"""Hosts on one machine, each with its own address, processes, name and /dev/shm, on a network whose links can fail.

A host is a set of Linux namespaces. Its files are the machine's, except below `PLACE`, which is its own disk. All of it
vanishes with the processes, even if the tests are killed. It needs root, because only root may make such hosts.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).parents[2]
PLACE = "/run/exspec-host"  # where a host sees its own disk
SUBNET = "10.77.0"
NOWHERE = "02:00:00:00:00:ff"  # no host has this MAC address
STARTED = 20  # seconds until a host is up
# Of the tests' environment: a host has its own settings.
FORGOTTEN = [f"--unset={name}" for name in ("PYTHONPATH", "EXSPEC_CACHE", "RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH")]
INIT = """
set -e
if [ -n "$4" ]; then
  mount -t tmpfs -o "size=$4" none "$2"
  cp -r "$1"/. "$2"
else
  mount --bind "$1" "$2"
fi
mount --bind "$1/hosts" /etc/hosts
mount --bind /dev/null "$(readlink -f /etc/resolv.conf)"
mount -t tmpfs -o size=1g none /dev/shm
hostname "$3"
ip link set lo up
echo ready
exec >/dev/null
while sleep 1; do :; done
"""  # the shell collects the processes that lose their parents


class Host:
    """A host. address: on the network. disk: its own folder, which the machine sees too."""

    def __init__(self, name: str, number: int, disk: Path) -> None:
        self.name, self.number, self.disk = name, number, disk
        self.address = f"{SUBNET}.{number}"
        self.variables: dict[str, str] = {}
        self.boot()

    def boot(self, size: str = "") -> None:
        """Make the namespaces. The host has no network yet. size: of its disk; default: as much as the machine has."""
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork"]
        command += ["--kill-child", "--mount-proc"]
        words = ["sh", "-c", INIT, "init", str(self.disk), PLACE, self.name, size]
        self._outer = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert self._outer.stdout is not None
        assert self._outer.stderr is not None
        if self._outer.stdout.readline() != b"ready\n":
            raise OSError(f"host {self.name} does not start: {self._outer.stderr.read().decode()}")
        (self.init,) = psutil.Process(self._outer.pid).children()

    def inside(self, *words: str | Path, **variables: str) -> list[str]:
        """The command that runs the words on this host."""
        settings = [f"{name}={value}" for name, value in (self.variables | variables).items()]
        entered = ["nsenter", "--target", str(self.init.pid), "--net", "--mount", "--pid", "--uts", "--ipc", "--"]
        return [*entered, "env", *FORGOTTEN, "-C", str(ROOT), *settings, *map(str, words)]

    def run(self, *words: str | Path, timeout: float = 120, **variables: str) -> str:
        """Run a command to its end; returns what it prints. Raises OSError with that if it fails."""
        command = self.inside(*words, **variables)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
        if done.returncode:
            raise OSError(f"{self.name}: {' '.join(map(str, words))}: {done.returncode}: {done.stdout[-3000:]}")
        return done.stdout

    def start(self, log: IO[bytes], *words: str | Path, **variables: str) -> "subprocess.Popen[bytes]":
        """Start a command; its output goes to the log."""
        return subprocess.Popen(self.inside(*words, **variables), stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def net(self, *words: str) -> str:
        """Run a command of the machine in the host's network."""
        command = ["nsenter", "--target", str(self.init.pid), "--net", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=STARTED).stdout

    def processes(self, words: str = "") -> list[psutil.Process]:
        """The host's processes whose command lines contain the words, without its init."""
        namespace, found = Path(f"/proc/{self.init.pid}/ns/pid").readlink(), []
        for process in psutil.process_iter(["pid", "cmdline"]):
            try:
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == namespace and process.pid != self.init.pid:
                    found += [process] if words in " ".join(process.info["cmdline"] or ()) else []
            except OSError:  # it has ended
                continue
        return found

    def signal(self, number: int, words: str = "") -> None:
        """Send a signal to these processes."""
        for process in self.processes(words):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop all processes."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill everything on the host, as a loss of power does."""
        self._outer.kill()
        self._outer.wait()
        psutil.wait_procs([self.init], timeout=STARTED)


class Network:
    """Hosts on one switch. folder: for their disks."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        Path(PLACE).mkdir(exist_ok=True)
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self._known = "".join(f"{SUBNET}.{n} {name}\n" for n, name in enumerate(["switch", *names], start=1))
        self.switch = self._made("switch", 1)
        for words in ("link add br0 type bridge", f"addr add {SUBNET}.1/24 dev br0", "link set br0 up"):
            self.switch.net("ip", *words.split())
        for number, name in enumerate(names, start=2):
            self.hosts[name] = self._made(name, number)
            self.plug(self.hosts[name])

    def _made(self, name: str, number: int) -> Host:
        disk = self.folder / name
        disk.mkdir(parents=True, exist_ok=True)
        (disk / "hosts").write_text(f"127.0.0.1 localhost\n{self._known}")
        return Host(name, number, disk)

    def plug(self, host: Host) -> None:
        """Connect a host that has just booted."""
        port = f"p{host.number}"
        self.switch.net("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.init.pid))
        self.switch.net("ip", "link", "set", port, "master", "br0", "up")
        host.net("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.net("ip", "link", "set", "eth0", "up")
        host.net("ip", "route", "add", "default", "via", f"{SUBNET}.1")  # Ray finds its address by this route

    def reboot(self, host: Host, size: str = "") -> None:
        """Kill everything on a host and start it again, with what it had at home. size: see `Host.boot`."""
        host.end()
        if (port := f"p{host.number}") in self.switch.net("ip", "-o", "link"):  # the kernel removes it later
            self.switch.net("ip", "link", "del", port)
        for folder in ("ray", "tmp", "home/.cache"):
            shutil.rmtree(host.disk / folder, ignore_errors=True)
        (host.disk / "tmp").mkdir()
        host.boot(size)
        self.plug(host)

    @contextmanager
    def pulled(self, host: Host) -> Iterator[None]:
        """Pull the host's cable."""
        link = ("ip", "link", "set", f"p{host.number}")
        self.switch.net(*link, "down")
        try:
            yield
        finally:
            self.switch.net(*link, "up")

    @contextmanager
    def parted(self, host: Host, others: Sequence[Host]) -> Iterator[None]:
        """Drop all packets between a host and others, without a word to any."""
        ways = [way for other in others for way in ((host, other.address), (other, host.address))]
        for here, address in ways:
            here.net("ip", "neigh", "replace", address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
        try:
            yield
        finally:
            for here, address in ways:
                here.net("ip", "neigh", "del", address, "dev", "eth0")

    @contextmanager
    def throttled(self, host: Host, bits: str) -> Iterator[None]:
        """Limit a host's traffic to so many bits per second, in both directions."""
        limit = ("root", "tbf", "rate", bits, "burst", "32kb", "latency", "400ms")
        self.switch.net("tc", "qdisc", "add", "dev", f"p{host.number}", *limit)
        host.net("tc", "qdisc", "add", "dev", "eth0", *limit)
        try:
            yield
        finally:
            self.switch.net("tc", "qdisc", "del", "dev", f"p{host.number}", "root")
            host.net("tc", "qdisc", "del", "dev", "eth0", "root")

    @contextmanager
    def lossy(self, host: Host, share: float) -> Iterator[None]:
        """Lose a share of the packets that a host receives. It needs iptables."""
        rule = ("INPUT", "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
        host.net("iptables", "-A", *rule)
        try:
            yield
        finally:
            host.net("iptables", "-D", *rule)

    def close(self) -> None:
        for host in [*self.hosts.values(), self.switch]:
            host.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def unavailable() -> str:
    """Why this machine cannot make hosts, as text; empty if it can."""
    if missing := [name for name in ("unshare", "nsenter", "setpriv", "ip", "tc") if not shutil.which(name)]:
        return f"no {', '.join(missing)}"
    if os.geteuid() != 0:
        return "namespaces for hosts need root"
    try:
        Path(PLACE).mkdir(exist_ok=True)
        tried = "ip link add br0 type bridge && ip link add p1 type veth peer name p2 && mount --bind /tmp /mnt"
        words = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "sh", "-c", tried]
        done = subprocess.run(words, capture_output=True, text=True, timeout=STARTED)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces: {error}"
    return f"namespaces: {done.stderr.strip()}" if done.returncode else ""


def until(what: Callable[[], bool], seconds: float, said: str) -> None:
    """Wait until `what()` is true. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(f"{said}: not within {seconds:g} s")
        time.sleep(0.1)
