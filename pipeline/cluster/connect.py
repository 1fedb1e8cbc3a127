"""The Ray that a job runs on: the cluster that it joins, or one of its own, and what there is room for."""

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import psutil

from exspec.pipeline.errors import JobError, first_line
from exspec.pipeline.job.settings import Job

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
JOINING = 300  # seconds that nodes of a cluster may take to join: a head that was lost comes back before its workers
ACTOR = 0.99  # CPUs: where actors take all that there are, each leaves enough for two readers


def connect(job: Job) -> None:
    """Join the cluster of the job, or start a local Ray with logical CPUs enough for every stage. Idempotent.

    Without an address of its own a job joins the cluster that RAY_ADDRESS names, as Ray sets it for a submitted job;
    where that is the address of a dashboard, it is meant for `exspec submit`. A local Ray is for this process and its
    children alone.
    """
    import ray
    from ray._private import worker

    if ray.is_initialized():
        return
    # Ray prints what becomes of its tasks, each retry for one, whatever it is told. It stands in its logs too.
    worker.print_to_stdstream = lambda *_, **__: None
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    address = _address(job)
    if address == "local":
        quiet |= {"num_cpus": 4 + job.actor_range[1], "include_dashboard": False, "object_store_memory": 200 * 2**20}
        quiet["_node_ip_address"] = "127.0.0.1"
    try:
        if place := re.fullmatch(r"([^:/]+):(\d+)", address):  # Ray itself would try for many minutes
            socket.create_connection((place[1], int(place[2])), timeout=20).close()
        if address == "local":
            _start(quiet)
        else:
            with _silent():
                ray.init(address=address, **quiet)
    except JobError:
        raise
    except Exception as error:  # of a wrong address, another version, a wrong token: each has its own
        raise JobError(f"ray_address {address}: no cluster can be joined there: {first_line(error)}") from error


def _start(settings: dict[str, Any]) -> None:
    """Start a local Ray, with one more try: on a busy machine its processes may not find each other in time."""
    import ray
    from ray._private import worker

    for tries_left in (1, 0):
        before = set(psutil.Process().children(recursive=True))
        try:
            with _private(), _silent():
                ray.init(address="local", **settings)
            _forget_token_with(worker._global_node)
            return
        except Exception as error:  # Ray has no name of its own for it
            new = set(psutil.Process().children(recursive=True)) - before
            left = [process for process in new if _is_rays(process)]
            for process in left:  # else the interpreter would wait for them when it ends
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)
            ray.shutdown()
            _forget_token()
            if tries_left:
                print("Ray did not start in time; once more", file=sys.stderr, flush=True)
            else:
                reason = " ".join(str(error).split())
                raise JobError(
                    f"a local Ray did not start, in two tries ({type(error).__name__}: {reason}); try again when the "
                    f"machine is less busy, or give ray_address; Ray's own logs: {logs()}"
                ) from None


def _is_rays(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("ray" in Path(word).parts or word.startswith("ray::") for word in process.cmdline())
    return False


def logs() -> str:
    """Where Ray keeps the logs of its processes on this machine."""
    from ray._common.utils import get_default_ray_temp_dir
    from ray._private import worker

    node = worker._global_node
    return str(node.get_logs_dir_path() if node else Path(get_default_ray_temp_dir(), "session_latest", "logs"))


def find_token() -> str | None:
    """A cluster's token, where Ray looks for it; None: the cluster may ask for none."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError as error:
        if named is None:
            return None
        raise JobError(f"RAY_AUTH_TOKEN_PATH: {path} does not exist") from error


def show_token() -> None:
    """Have Ray show the token that is found: it is told before it is imported, or not at all. A cluster that asks for
    none takes no notice.
    """
    if "RAY_AUTH_MODE" not in os.environ and find_token():
        os.environ["RAY_AUTH_MODE"] = "token"


@contextmanager
def _silent() -> Iterator[None]:
    """What Ray's C++ says on the error output while it starts, that its log level is set, is not said. Python's own
    error output goes on.
    """
    sys.stderr.flush()
    kept, nowhere, before = os.dup(2), os.open(os.devnull, os.O_WRONLY), sys.stderr
    try:
        own = before.fileno() == 2
    except (OSError, ValueError):  # a notebook's is no file
        own = False
    if own:
        sys.stderr = os.fdopen(os.dup(kept), "w", buffering=1, errors="backslashreplace")
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
        if own:
            sys.stderr, ours = before, sys.stderr
            ours.close()


@contextmanager
def _private() -> Iterator[None]:
    """A Ray that is started inside listens on loopback, and answers nobody without a random token.

    Whoever may connect to a Ray may run code in it. On Linux Ray turns 127.0.0.1 into an address that other machines
    reach, and its servers then listen on all interfaces, unless it is told what holds elsewhere, that it makes no
    clusters. Its ports are open to other users of this machine all the same: the token protects them, and would protect
    all where a later Ray takes no notice of that flag. Ray's processes inherit the token; the driver, which has read it
    too, gets its environment back, for the token is of no use to other clusters.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    before = {name: os.environ.pop(name, None) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")}
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    os.environ["RAY_AUTH_TOKEN"] = token_hex(32)  # without a mode of its own a local Ray asks for the token
    AuthenticationTokenLoader.instance().reset_cache()
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _forget_token_with(node: Any) -> None:
    """Have this process forget the token when the Ray of the node is shut down: another that it starts or joins later
    has another token, or none."""
    end = node.kill_all_processes

    def ended(*arguments: Any, **options: Any) -> None:
        try:
            end(*arguments, **options)
        finally:
            _forget_token()

    node.kill_all_processes = ended


def _forget_token() -> None:
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()


def on_a_device(job: Job, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function once where an actor would run, and return what it returns."""
    import ray
    from ray.exceptions import RayTaskError

    remote = ray.remote(num_cpus=ACTOR, num_gpus=gpus(job), max_retries=0)(function)
    try:
        return ray.get(remote.remote(*arguments))
    except RayTaskError as error:
        raise error.cause from None


def _address(job: Job) -> str:
    around = os.environ.get("RAY_ADDRESS", "")
    return job.ray_address or ("" if around.startswith("http") else around) or "local"


def check_cluster(job: Job) -> None:
    """Wait until the cluster has room for an actor, and refuse the job where it never has: Ray would wait for ever."""
    from ray.autoscaler.sdk import request_resources

    if not (short := _short(job)):
        return
    if _address(job) != "local":
        print(f"waiting for nodes, {JOINING} s at most: {short}", flush=True)
        request_resources(bundles=[{name: count for name, count in _needs(job).items() if count}])  # where it can grow
        until = time.monotonic() + JOINING
        while short and time.monotonic() < until:
            time.sleep(1)
            short = _short(job)
        request_resources(bundles=[])  # from here on the actors speak for themselves
    if short:
        raise JobError(f"device: {short}")


def actors_that_fit(job: Job, memory: int) -> int:
    """How many actors of so many bytes the cluster carries; one at least. A local Ray has this machine's cores."""
    import ray

    have = ray.cluster_resources()
    if gpus(job):
        return max(1, int(have.get("GPU", 0) / gpus(job)))
    cores = job.actor_range[1] if _address(job) == "local" else int(have.get("CPU", 1)) // job.threads
    return max(1, min(cores, int(have.get("memory", memory)) // memory))


def _needs(job: Job) -> dict[str, float]:
    return {"CPU": 1.0, "GPU": gpus(job)}


def _short(job: Job) -> str:
    """What the cluster has too little of for one actor, in words; empty where it has enough."""
    import ray

    have = ray.cluster_resources()
    for name, count in _needs(job).items():
        if have.get(name, 0) < count:
            return f"an actor needs {count:g} {name}, and the cluster has {have.get(name, 0):g}"
    return ""


def lacking(job: Job) -> str:
    """What actors wait for that are not there, in words."""
    import ray

    count = job.actor_range[0]
    if not any(ray.cluster_resources().get(name, 0) < count * n * ACTOR for name, n in _needs(job).items()):
        return f"there is room for them, and they are still loading their models; Ray's own logs: {logs()}"
    have, free = ray.cluster_resources(), ray.available_resources()
    told = [f"{count:g} {name}" for name, count in _needs(job).items() if count]
    found = [f"{free.get(name, 0):.3g} of {have.get(name, 0):g} {name}" for name, n in _needs(job).items() if n]
    return (
        f"each needs {' and '.join(told)}, and the cluster has {' and '.join(found)} free; the job goes on with those "
        "that are there, set actors to as many or add nodes"
    )


def gpus(job: Job) -> float:
    if job.num_gpus is not None:
        return job.num_gpus
    return 1.0 if device(job) == "cuda" else 0.0


def device(job: Job) -> str:
    """The job's device; `auto` asks the cluster whether it has GPUs."""
    if job.device != "auto":
        return job.device
    import ray

    return "cuda" if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
