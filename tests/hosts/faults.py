"""Faults of hosts, links and stores, each during a job whose rows are compared with those of an undisturbed job.

    python -m tests.hosts.faults                 every fault, one after the other, as a table
    python -m tests.hosts.faults NAME...         these
    python -m tests.hosts.faults --random 200    random schedules, with their seeds

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
from pathlib import Path
from typing import Any

import torch

from exspec.pipeline.errors import counted
from tests.hosts.cluster import Cluster, Ended, Job, cluster
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
FAULTS: dict[str, tuple[Fault, dict[str, Any]]] = {}


def fault(name: str, **settings: Any) -> Callable[[Fault], Fault]:
    """Register a fault. It begins the job, disturbs it, and returns how it ended. settings: of the job."""

    def register(function: Fault) -> Fault:
        FAULTS[name] = function, settings
        return function

    return register


def busy(job: Job) -> Host:
    """Wait for a worker that has staged a chunk, so that it decodes others."""
    c = job.cluster
    job.wait("^w[0-9] PUT OUT/_staged")
    staged = f"(w[0-9]) PUT /{c.bucket}/{job.output}/_staged"
    found = (re.match(staged, request.text) for request in reversed(c.store.requests[job.since :]))
    return c.network.hosts[next(filter(None, found))[1]]


def at(job: Job, moment: str) -> Host:
    """Wait for a moment of the job; returns a worker that takes part in it."""
    job.wait(MOMENTS["decoding"], BEGUN)
    host = busy(job)
    if moment != "decoding":
        job.cluster.store.slow = 1.0  # so that the fault comes before the answer
        seen = len(job.cluster.store.requests)
        pattern = MOMENTS[moment].replace("OUT", f"/{job.cluster.bucket}/{job.output}").format(host=host.name)
        assert job.cluster.store.wait(pattern, seen, 1, 60), f"{moment}: not within a minute"
        job.cluster.store.slow = 0.0
    return host


def finished(job: Job) -> str:
    """The job ends by itself, and succeeds."""
    ended = job.end()
    assert ended.code == 0, f"exit code {ended.code}: {ended.text[-3000:]}"
    return "finishes"


def cut(c: Cluster, job: Job, moment: str, seconds: float | None) -> str:
    """A worker's cable is pulled, and plugged in again after some seconds or never."""
    job.submit()
    host = at(job, moment)
    c.network.pull(host)
    if seconds is not None:
        time.sleep(seconds)
        c.network.push(host)
    return finished(job)


for _moment in MOMENTS:
    for _seconds in (5, 90, None):
        _length = "for good" if _seconds is None else f"for {_seconds} s"
        fault(f"worker cut off {_length}, {_moment}")(partial(cut, moment=_moment, seconds=_seconds))


def resumed(c: Cluster, job: Job, ended: Ended) -> str:
    """The job broke off, and the same command finishes it."""
    c.heal()
    again = job.submit().end()
    assert again.code == 0, again.text[-3000:]
    return f"ends with code {ended.code}; the next run finishes"


@fault("head cut off from one worker for 90 s")
def _(c: Cluster, job: Job) -> str:
    job.submit()
    host = at(job, "decoding")
    c.network.part(c.head, host)
    time.sleep(90)
    c.network.join(c.head, host)
    return finished(job)


@fault("head cut off from all workers for 90 s")
def _(c: Cluster, job: Job) -> str:
    job.submit()
    at(job, "decoding")
    for host in c.workers:
        c.network.part(c.head, host)
    time.sleep(90)
    for host in c.workers:
        c.network.join(c.head, host)
    ended = job.end()
    return "finishes" if ended.code == 0 else resumed(c, job, ended)


@fault("head cut off from the store for 90 s")
def _(c: Cluster, job: Job) -> str:
    job.submit()
    at(job, "decoding")
    c.network.part(c.head, c.network.hosts["s3"])
    time.sleep(90)
    c.network.join(c.head, c.network.hosts["s3"])
    return finished(job)


@fault("driver cut off from the store, and another run takes over")
def _(c: Cluster, job: Job) -> str:
    """The lease expires while the first run's actors still reach the store. The first run wakes up while the second
    one decodes, leaves by itself and commits nothing."""
    job.submit()
    at(job, "decoding")
    c.network.part(c.head, c.network.hosts["s3"])
    second = Job(c, job.output, job.settings).run(c.workers[0])
    second.wait(f"{c.workers[0].name} PUT OUT/_log/[0-9]", 2)  # it has taken the output, and committed
    known = c.names(f"{job.output}/_log")
    c.network.join(c.head, c.network.hosts["s3"])
    first, last = job.end(), second.end()
    assert first.code == 1, first.text[-3000:]
    assert "took it over" in first.text, first.text[-3000:]
    assert last.code == 0, last.text[-3000:]
    new = [entry for entry in c.names(f"{job.output}/_log") if entry not in known]
    lost = [r for r in c.store.requests[job.since :] if r.text.startswith("head PUT") and "/_log/0" in r.text]
    assert not any(r.text.rsplit("/", 1)[-1] in new and r.status == 200 for r in lost), "the first run has committed"
    return "the second run finishes; the first one leaves"


@fault("store: 200 ms for each request")
def _(c: Cluster, job: Job) -> str:
    c.store.slow = 0.2
    return finished(job.submit())


@fault("store: 1 % of its packets are lost")
def _(c: Cluster, job: Job) -> str:
    with c.network.lossy(c.network.hosts["s3"], 0.01):
        return finished(job.submit())


@fault("store: 1 MB/s")
def _(c: Cluster, job: Job) -> str:
    with c.network.throttled(c.network.hosts["s3"], "8mbit"):
        return finished(job.submit())


@fault("store: refuses for a minute (503, SlowDown)")
def _(c: Cluster, job: Job) -> str:
    job.submit()
    at(job, "decoding")
    c.store.refused = 503
    time.sleep(60)
    c.store.refused = 0
    return finished(job)


@fault("store: answers 20 s late, for a minute")
def _(c: Cluster, job: Job) -> str:
    job.submit()
    at(job, "decoding")
    c.store.late = 20.0  # longer than clients wait, so that each request is repeated after it was done
    time.sleep(60)
    c.store.late = 0.0
    return finished(job)


def wrong_clock(c: Cluster, job: Job, host: int, seconds: int) -> str:
    """A worker's clock is wrong from its boot on."""
    c.restart(c.workers[host], LD_PRELOAD=str(clock(c.folder)), CLOCK_OFFSET=str(seconds))
    c.wait_for(4)
    said = finished(job.submit())
    c.workers[host].signal(signal.SIGKILL, "raylet/raylet")  # `heal` starts it anew
    return said


for _seconds in (600, -600):
    fault(f"clock of a worker {abs(_seconds) // 60} min {'fast' if _seconds > 0 else 'slow'}", actors=EVERYWHERE)(
        partial(wrong_clock, host=0, seconds=_seconds)
    )


@contextmanager
def full_disk(c: Cluster, host: Host, size: str) -> Iterator[Callable[[], str]]:
    """Gives the host a disk of this size, and a function that fills it. `heal` gives it a new one."""
    c.restart(host, size=size)
    c.wait_for(4)
    try:
        yield lambda: host.run("sh", "-c", f"cat /dev/zero >{PLACE}/full 2>/dev/null || true")
    finally:
        host.signal(signal.SIGKILL, "raylet/raylet")


@fault("disk of a worker full from the start", actors=EVERYWHERE)
def _(c: Cluster, job: Job) -> str:
    """Ray cannot unpack the package there, and ends the job, which names the host."""
    with full_disk(c, c.workers[0], "200m") as fill:
        fill()
        ended = job.submit().end()
    assert ended.code == 1, ended.text[-3000:]
    assert f"node {c.workers[0].address} cannot start a process: OSError: [Errno 28]" in ended.text, ended.text[-3000:]
    return resumed(c, job, ended)


@fault("disk of a worker full, decoding", actors=EVERYWHERE)
def _(c: Cluster, job: Job) -> str:
    with full_disk(c, c.workers[0], "400m") as fill:
        job.submit()
        at(job, "decoding")
        fill()
        return finished(job)


@fault("object store of a worker full, decoding")
def _(_c: Cluster, job: Job) -> str:
    job.submit()
    host = at(job, "decoding")
    host.run("sh", "-c", "cat /dev/zero >/dev/shm/full 2>/dev/null || true")
    try:
        return finished(job)
    finally:
        host.run("rm", "-f", "/dev/shm/full")


@fault("worker stopped for 120 s (SIGSTOP)")
def _(_c: Cluster, job: Job) -> str:
    job.submit()
    host = at(job, "decoding")
    host.signal(signal.SIGSTOP)
    time.sleep(120)
    host.signal(signal.SIGCONT)
    return finished(job)


@fault("worker loses power")
def _(_c: Cluster, job: Job) -> str:
    job.submit()
    at(job, "decoding").end()
    return finished(job)


@fault("worker joins late", actors="4:6")
def _(c: Cluster, job: Job) -> str:
    """Four actors fill two hosts; the pool grows as soon as there is a third one."""
    for host in c.workers[1:]:
        c.network.reboot(host)
    c.wait_for(2)
    job.submit().wait("PUT OUT/_staged")
    c.store.slow = 1.0  # so that the job lasts longer than its actors take to load
    c.start_worker(c.late)
    said = finished(job)
    c.network.reboot(c.late)
    assert any(actor.startswith("late-") for actor in c.report(job.output)["rows_by_actor"]), "it decoded nothing"
    return said


@fault("worker with another version of torch", actors=EVERYWHERE)
def _(c: Cluster, job: Job) -> str:
    """The job goes on without this host, and names it."""
    with other_torch(c.workers[0], "2.11.0"):
        said = finished(job.submit())
    assert f"{c.workers[0].name} (it has torch 2.11.0" in job.text, job.text[-3000:]
    assert not any(actor.startswith(c.workers[0].name) for actor in c.report(job.output)["rows_by_actor"])
    return said


@fault("worker drained (spot notice of 120 s)")
def _(_c: Cluster, job: Job) -> str:
    job.submit()
    host = at(job, "decoding")
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
    host.run("ray", "drain-node", "--address", "head:6379", *reason, "--deadline-remaining-seconds", "120")
    said = finished(job)
    host.signal(signal.SIGKILL, "raylet/raylet")
    return said


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
    real = Path(torch.__file__).with_name("version.py")
    other = host.disk / "version.py"
    other.write_text(re.sub("__version__ = .*", f"__version__ = {version!r}", real.read_text()))
    host.run("mount", "--bind", f"{PLACE}/version.py", real)
    try:
        yield
    finally:
        host.run("umount", real)


@contextmanager
def _link(c: Cluster, host: Host) -> Iterator[None]:
    c.network.pull(host)
    yield
    c.network.push(host)


@contextmanager
def _pair(c: Cluster, host: Host, other: Host) -> Iterator[None]:
    c.network.part(host, other)
    yield
    c.network.join(host, other)


@contextmanager
def _stopped(host: Host) -> Iterator[None]:
    host.signal(signal.SIGSTOP)
    yield
    host.signal(signal.SIGCONT)


@contextmanager
def _store(c: Cluster, **faults: float) -> Iterator[None]:
    vars(c.store).update(faults)
    yield
    vars(c.store).update(dict.fromkeys(faults, 0))


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
    (one, other), store = rng.sample(c.workers, 2), c.network.hosts["s3"]
    faults: dict[str, Callable[[], AbstractContextManager[None]]] = {
        f"link of {one.name}": lambda: _link(c, one),
        f"{one.name} from head": lambda: _pair(c, one, c.head),
        f"{one.name} from {other.name}": lambda: _pair(c, one, other),
        f"{one.name} from store": lambda: _pair(c, one, store),
        "head from store": lambda: _pair(c, c.head, store),
        f"{one.name} stopped": lambda: _stopped(one),
        f"actors of {one.name} killed": lambda: _killed(one),
        f"power of {one.name}": lambda: _power(c, one),
        "store slow": lambda: _store(c, slow=0.5),
        "store late": lambda: _store(c, late=20.0),
        "store refuses": lambda: _store(c, refused=503),
        "store at 2 Mbit/s": lambda: c.network.throttled(store, "2mbit"),
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
    ended, runs = job.end(), 1
    while ended.code and runs < RUNS_AT_MOST:
        c.heal()
        ended, runs = job.submit().end(), runs + 1
    assert ended.code == 0, f"{said}: {ended.text[-3000:]}"
    return f"{', '.join(said)}: finishes in {counted(runs, 'run')}"


def play(c: Cluster, name: str, output: str) -> Outcome:
    """Play a fault, or a random schedule; every row of its job must be that of the undisturbed one."""
    disturb, settings = (partial(schedule, seed=int(name)), {}) if name.isdecimal() else FAULTS[name]
    job, began = c.job(output, **settings), time.monotonic()
    try:
        how = disturb(c, job)
    finally:
        c.store.slow = c.store.late = c.store.refused = 0
    seconds = time.monotonic() - began
    rows, expected = c.rows(output), c.rows("whole")
    wrong = [(a, b) for a, b in zip(rows, expected, strict=False) if a != b]
    assert len(rows) == len(expected), f"{len(rows)} of {len(expected)} rows"
    assert not wrong, f"{len(wrong)} rows differ; the first: {wrong[0]}"
    assert "_SUCCESS" in c.names(output)
    again = c.report(output)["repeated_chunks"]
    c.heal()
    return Outcome(how, seconds, again)


def undisturbed(c: Cluster) -> float:
    """Run the job that all others are compared with; returns its seconds."""
    ended = c.job("whole").submit().end()
    assert ended.code == 0, ended.text[-3000:]
    return ended.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults, or seeds of random schedules")
    parser.add_argument("--random", type=int, default=0)
    given = parser.parse_args()
    names = given.names or list(map(str, range(given.random))) or list(FAULTS)
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
                c.heal()


if __name__ == "__main__":
    main()
