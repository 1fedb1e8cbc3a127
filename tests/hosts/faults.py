"""Faults of hosts, links and stores, each during a job whose rows are compared with those of an undisturbed job.

    python -m tests.hosts.faults                 every fault, one after the other, as a table
    python -m tests.hosts.faults NAME...         these
    python -m tests.hosts.faults $(seq 200)      random schedules with these seeds

It needs root, and iptables for lost packets.
"""

import argparse
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from exspec.pipeline.errors import counted
from tests.hosts.cluster import Cluster, Job, cluster
from tests.hosts.network import PLACE, Host, unavailable

EVERYWHERE = "7"  # actors: so many that every host has one
GENERATOR = "Generator"  # in the title of an actor's process
FAULTS_AT_MOST, RUNS_AT_MOST = 4, 4  # of a random schedule
# What the store sees then.
MOMENTS = {"decoding": "PUT OUT/part-", "staging": "{host} PUT OUT/_staged", "commit": "head PUT OUT/_log/"}
BEGUN = 4  # parts that are visible when a fault comes


@dataclass(frozen=True)
class Outcome:
    """What became of a job. how: in words. seconds: of the job. again: chunks that were decoded again."""

    how: str
    seconds: float
    again: int


Fault = Callable[[Cluster, Job], str]
Disturbance = Callable[[Cluster, Host], AbstractContextManager[Any]]
FAULTS: dict[str, tuple[Fault, dict[str, Any]]] = {}


def fault(name: str, **settings: Any) -> Callable[[Fault], Fault]:
    """Register a fault. It begins the job, disturbs it, and returns how it ended. settings: of the job."""

    def register(function: Fault) -> Fault:
        FAULTS[name] = function, settings
        return function

    return register


def passing(name: str, seconds: float | None, disturb: Disturbance, moment: str = "decoding") -> None:
    """Register a fault that begins at a moment and ends after some seconds, or with the job (None). disturb: its host
    takes part in the job."""

    def play(c: Cluster, job: Job) -> str:
        job.submit()
        with disturb(c, at(job, moment)):
            if seconds is None:
                return finished(job)
            time.sleep(seconds)
        return finished(job)

    fault(name)(play)


def throughout(name: str, disturb: Callable[[Cluster], AbstractContextManager[Any]]) -> None:
    """Register a fault that lasts as long as the job."""

    def play(c: Cluster, job: Job) -> str:
        with disturb(c):
            return finished(job.submit())

    fault(name)(play)


def busy(job: Job) -> Host:
    """Wait for a worker that has staged a chunk, so that it decodes others."""
    c = job.cluster
    job.wait("^w[0-9] PUT OUT/_staged")
    staged = f"(w[0-9]) PUT /{c.bucket}/{job.output}/_staged"
    found = (re.match(staged, request.text) for request in reversed(c.store.requests[job.since :]))
    return c.network.hosts[next(filter(None, found))[1]]


def at(job: Job, moment: str) -> Host:
    """Wait for a moment of the job; returns a worker that takes part in it."""
    c = job.cluster
    job.wait(MOMENTS["decoding"], BEGUN)
    host = busy(job)
    if moment != "decoding":
        with c.store.disturbed(slow=1.0):  # so that the fault comes before the answer
            seen = len(c.store.requests)
            pattern = MOMENTS[moment].replace("OUT", f"/{c.bucket}/{job.output}").format(host=host.name)
            assert c.store.wait(pattern, seen, 1, 60), f"{moment}: not within a minute"
    return host


def finished(job: Job) -> str:
    """The job ends by itself, and succeeds."""
    code = job.end()
    assert code == 0, f"exit code {code}: {job.text[-3000:]}"
    return "finishes"


def resumed(c: Cluster, job: Job, code: int) -> str:
    """The job broke off, and the same command finishes it."""
    c.heal()
    finished(job.submit())
    return f"ends with code {code}; the next run finishes"


for _moment in MOMENTS:
    for _seconds in (5, 21, 90, None):  # Ray's default is to give up silent connections after 20 s
        _length = "for good" if _seconds is None else f"for {_seconds} s"
        passing(f"worker cut off {_length}, {_moment}", _seconds, lambda c, host: c.network.pulled(host), _moment)
passing("head cut off from one worker for 90 s", 90, lambda c, host: c.network.parted(c.head, [host]))
passing("head cut off from all workers for 90 s", 90, lambda c, _: c.network.parted(c.head, c.workers))
passing("head cut off from the store for 90 s", 90, lambda c, _: c.network.parted(c.head, [c.s3]))
passing("store: refuses for a minute (503, SlowDown)", 60, lambda c, _: c.store.disturbed(refused=503))
# Clients do not wait so long: they repeat each request after it was done.
passing("store: answers 20 s late, for a minute", 60, lambda c, _: c.store.disturbed(late=20.0))
passing("worker stopped for 120 s (SIGSTOP)", 120, lambda _, host: host.stopped())
throughout("store: 200 ms for each request", lambda c: c.store.disturbed(slow=0.2))
throughout("store: 1 % of its packets are lost", lambda c: c.network.lossy(c.s3, 0.01))
throughout("store: 1 MB/s", lambda c: c.network.throttled(c.s3, "8mbit"))


@fault("driver cut off from the store, and another run takes over")
def _(c: Cluster, job: Job) -> str:
    """The lease expires while the first run's actors still reach the store. While the second run decodes, the first
    one reaches the store again, commits nothing and exits."""
    job.submit()
    at(job, "decoding")
    with c.network.parted(c.head, [c.s3]):
        second = Job(c, job.output, job.settings).run(c.workers[0])
        second.wait(f"{c.workers[0].name} PUT OUT/_log/[0-9]", 2)  # it has taken the output, and committed
        known = c.names(f"{job.output}/_log")
    assert job.end() == 1, job.text[-3000:]
    assert "took it over" in job.text, job.text[-3000:]
    finished(second)
    new = [entry for entry in c.names(f"{job.output}/_log") if entry not in known]
    lost = [r for r in c.store.requests[job.since :] if r.text.startswith("head PUT") and "/_log/0" in r.text]
    assert not any(r.text.rsplit("/", 1)[-1] in new and r.status == 200 for r in lost), "the first run has committed"
    return "the second run finishes; the first one leaves"


@contextmanager
def otherwise(c: Cluster, host: Host, size: str = "", **variables: str) -> Iterator[None]:
    """Start a worker with a disk of this size, or with variables. `heal` starts it as usual."""
    c.restart(host, size, **variables)
    c.wait_for(1 + len(c.workers))
    try:
        yield
    finally:
        host.signal(signal.SIGKILL, "raylet/raylet")


def fill(host: Host, folder: str = PLACE) -> None:
    """Fill the host's disk of this folder."""
    host.run("sh", "-c", f"cat /dev/zero >{folder}/full 2>/dev/null || true")


def wrong_clock(c: Cluster, job: Job, seconds: int) -> str:
    """A worker's clock is wrong from its boot on."""
    with otherwise(c, c.workers[0], LD_PRELOAD=str(clock(c.folder)), CLOCK_OFFSET=str(seconds)):
        return finished(job.submit())


for _seconds in (600, -600):
    fault(f"clock of a worker {abs(_seconds) // 60} min {'fast' if _seconds > 0 else 'slow'}", actors=EVERYWHERE)(
        partial(wrong_clock, seconds=_seconds)
    )


@fault("disk of a worker full from the start", actors=EVERYWHERE)
def _(c: Cluster, job: Job) -> str:
    """Ray cannot unpack the package there, and ends the job, which names the host."""
    host = c.workers[0]
    with otherwise(c, host, "200m"):
        fill(host)
        code = job.submit().end()
    assert code == 1, job.text[-3000:]
    assert f"node {host.address} cannot start a process: OSError: [Errno 28]" in job.text, job.text[-3000:]
    return resumed(c, job, code)


@fault("disk of a worker full, decoding", actors=EVERYWHERE)
def _(c: Cluster, job: Job) -> str:
    with otherwise(c, c.workers[0], "400m"):
        job.submit()
        at(job, "decoding")
        fill(c.workers[0])
        return finished(job)


@fault("object store of a worker full, decoding")
def _(_c: Cluster, job: Job) -> str:
    job.submit()
    host = at(job, "decoding")
    fill(host, "/dev/shm")
    try:
        return finished(job)
    finally:
        host.run("rm", "-f", "/dev/shm/full")


@fault("worker loses power")
def _(_c: Cluster, job: Job) -> str:
    job.submit()
    at(job, "decoding").end()
    return finished(job)


@fault("worker joins late", actors="4:6")
def _(c: Cluster, job: Job) -> str:
    """Four actors fill two hosts. The pool grows when there is a third one."""
    late = c.workers[1]
    for host in c.workers[1:]:
        c.network.reboot(host)
    c.wait_for(2)
    job.submit().wait("PUT OUT/_staged")
    with c.store.disturbed(slow=5.0):  # the job lasts longer than an actor takes to load
        c.start(late)
        job.wait(f"{late.name} PUT OUT/_staged")
    return finished(job)


@fault("worker with another version of torch", actors=EVERYWHERE)
def _(c: Cluster, job: Job) -> str:
    """The job goes on without this host, and names it."""
    name = c.workers[0].name
    with other_torch(c.workers[0], "2.11.0"):
        said = finished(job.submit())
    assert f"{name} ({name} has torch 2.11.0" in job.text, job.text[-3000:]
    assert not any(actor.startswith(name) for actor in c.report(job.output)["rows_by_actor"])
    assert not any(r.text.startswith(f"{name} GET /{c.bucket}/in/") for r in c.store.requests[job.since :])
    return said


@fault("worker drained (spot notice of 120 s)")
def _(_c: Cluster, job: Job) -> str:
    job.submit()
    host = at(job, "decoding")
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
    host.run("ray", "drain-node", "--address", "head:6379", *reason, "--deadline-remaining-seconds", "120")
    try:
        return finished(job)
    finally:
        host.signal(signal.SIGKILL, "raylet/raylet")


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, at);
  const char *offset = getenv("CLOCK_OFFSET");
  if (offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += atoi(offset);
  return code;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


def clock(folder: Path) -> Path:
    """A library that moves the clock of a process by CLOCK_OFFSET seconds. Namespaces can only move other clocks."""
    made = folder / "clock.so"
    if not made.exists():
        words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(made), "-x", "c", "-", "-ldl"]
        subprocess.run(words, input=CLOCK.encode(), check=True)
    return made


@contextmanager
def other_torch(host: Host, version: str) -> Iterator[None]:
    """A host whose torch says that it is another version."""
    real = next(path for path in distribution("torch").files or () if path.name == "METADATA").locate()
    (host.disk / "METADATA").write_text(re.sub("(?m)^Version: .*", f"Version: {version}", real.read_text()))
    host.run("mount", "--bind", f"{PLACE}/METADATA", str(real))
    try:
        yield
    finally:
        host.run("umount", real)


@contextmanager
def _killed(host: Host) -> Iterator[None]:
    host.signal(signal.SIGKILL, GENERATOR)
    yield


@contextmanager
def _power(c: Cluster, host: Host) -> Iterator[None]:
    host.end()
    yield
    c.restart(host)


def drawn(c: Cluster, rng: random.Random) -> tuple[str, AbstractContextManager[None]]:
    """A fault that lasts as long as its block, and its name."""
    one, other = rng.sample(c.workers, 2)
    faults: dict[str, Callable[[], AbstractContextManager[None]]] = {
        f"link of {one.name}": lambda: c.network.pulled(one),
        f"{one.name} from head": lambda: c.network.parted(one, [c.head]),
        f"{one.name} from {other.name}": lambda: c.network.parted(one, [other]),
        f"{one.name} from store": lambda: c.network.parted(one, [c.s3]),
        "head from store": lambda: c.network.parted(c.head, [c.s3]),
        f"{one.name} stopped": one.stopped,
        f"actors of {one.name} killed": lambda: _killed(one),
        f"power of {one.name}": lambda: _power(c, one),
        "store slow": lambda: c.store.disturbed(slow=0.5),
        "store late": lambda: c.store.disturbed(late=20.0),
        "store refuses": lambda: c.store.disturbed(refused=503),
        "store at 2 Mbit/s": lambda: c.network.throttled(c.s3, "2mbit"),
    }
    name = rng.choice(list(faults))
    return name, faults[name]()


def schedule(c: Cluster, job: Job, seed: int) -> str:
    """Faults at random moments of a job, one after the other. If it breaks off, it is run again, on healed hosts."""
    rng, said = random.Random(seed), []
    job.submit()
    while job.process.poll() is None and len(said) < FAULTS_AT_MOST:
        with suppress(subprocess.TimeoutExpired):
            job.process.wait(rng.uniform(0, 20))
            break
        (name, disturbed), seconds = drawn(c, rng), rng.choice([1, 5, 20, 80])
        said.append(f"{name} {seconds} s")
        with disturbed, suppress(subprocess.TimeoutExpired):
            job.process.wait(seconds)
    code, runs = job.end(), 1
    while code and runs < RUNS_AT_MOST:
        c.heal()
        code, runs = job.submit().end(), runs + 1
    assert code == 0, f"{said}: {job.text[-3000:]}"
    return f"{', '.join(said)}: finishes in {counted(runs, 'run')}"


def play(c: Cluster, name: str, output: str) -> Outcome:
    """Play a fault, or a random schedule; every row of its job must be that of the undisturbed one."""
    disturb, settings = (partial(schedule, seed=int(name)), {}) if name.isdecimal() else FAULTS[name]
    job, began = c.job(output, **settings), time.monotonic()
    try:
        how = disturb(c, job)
        seconds = time.monotonic() - began
        rows, expected = c.rows(output), c.rows("whole")
        wrong = [(a, b) for a, b in zip(rows, expected, strict=False) if a != b]
        assert len(rows) == len(expected), f"{len(rows)} of {len(expected)} rows"
        assert not wrong, f"{len(wrong)} rows differ; the first: {wrong[0]}"
        assert "_SUCCESS" in c.names(output)
        return Outcome(how, seconds, c.report(output)["repeated_chunks"])
    finally:
        c.heal()


def undisturbed(c: Cluster) -> float:
    """Run the job that all others are compared with; returns its seconds."""
    began = time.monotonic()
    finished(c.job("whole").submit())
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults, or seeds of random schedules")
    names = parser.parse_args().names or list(FAULTS)
    if unknown := [name for name in names if not name.isdecimal() and name not in FAULTS]:
        parser.error(f"{unknown[0]}: expected one of {', '.join(FAULTS)}")
    if reason := unavailable():
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder)) as c:
        print(f"| undisturbed | {undisturbed(c):.0f} | |", flush=True)
        for number, name in enumerate(names):
            try:
                found = play(c, name, f"out-{number}")
                print(f"| {name} | {found.how} | {found.seconds:.0f} | {found.again} |", flush=True)
            except Exception as error:
                print(f"| {name} | FAILED {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
