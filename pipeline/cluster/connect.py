"""Connects to the Ray cluster of a job, or starts a local Ray, and finds out what it has room for."""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import psutil

from exspec.actors.engine.faults import first_line
from exspec.pipeline.errors import JobError
from exspec.pipeline.job.settings import Job

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Milliseconds of silence after which a server of Ray closes a connection; Ray's default is 20 s. If the link returns
# just then, the client may not learn of it, and waits for an answer for ever. Ray declares a node dead after about a
# minute of silence, so 10 min outlast every cut that a node survives.
KEEPALIVE = "RAY_grpc_keepalive_timeout_ms"
os.environ.setdefault(KEEPALIVE, "600000")
os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")  # else Ray refuses what a submitted job has set too
JOINING = 300  # seconds that nodes may take to join; a lost head node comes back before its workers
ACTOR = 0.99  # CPUs of an actor: even if actors take all CPUs, each leaves room for two readers


def connect(job: Job) -> None:
    """Join the cluster of the job, or start a local Ray with enough logical CPUs for every stage. Idempotent.

    A job without ray_address joins the cluster in RAY_ADDRESS, which Ray sets for submitted jobs. If that is the URL of
    a dashboard, it is for `exspec submit` and ignored here. A local Ray serves only this process and its children.
    """
    import ray
    from ray._private import worker

    if ray.is_initialized():
        return
    # Ray prints the fate of tasks, such as retries, and no setting prevents it. The logs have it too.
    worker.print_to_stdstream = lambda *_, **__: None
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    address = _address(job)
    if address == "local":
        quiet |= {"num_cpus": 4 + job.actor_range[1], "include_dashboard": False, "object_store_memory": 200 * 2**20}
        quiet["_node_ip_address"] = "127.0.0.1"
    try:
        if place := re.fullmatch(r"([^:/]+):(\d+)", address):  # Ray itself would retry for minutes
            socket.create_connection((place[1], int(place[2])), timeout=20).close()
        if address == "local":
            _start(quiet)
        else:
            with _silent():
                ray.init(address=address, runtime_env={"env_vars": {KEEPALIVE: os.environ[KEEPALIVE]}}, **quiet)
    except JobError:
        raise
    except Exception as error:  # wrong address, version or token: each raises another type
        raise JobError(f"ray_address {address}: cannot join the cluster: {first_line(error)}") from error


def _start(settings: dict[str, Any]) -> None:
    """Start a local Ray, with one retry: on a busy machine its processes may be too slow."""
    import ray
    from ray._private import worker

    for tries_left in (1, 0):
        before = set(psutil.Process().children(recursive=True))
        try:
            with _private(), _silent():
                ray.init(address="local", **settings)
            _forget_token_with(worker._global_node)
            return
        except Exception as error:  # Ray has no specific type for this
            new = set(psutil.Process().children(recursive=True)) - before
            left = [process for process in new if _is_rays(process)]
            for process in left:  # else the interpreter would wait for them on exit
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)
            ray.shutdown()
            _forget_token()
            if tries_left:
                print("Ray did not start in time; trying again", file=sys.stderr, flush=True)
            else:
                reason = " ".join(str(error).split())
                raise JobError(
                    f"a local Ray did not start in two attempts ({type(error).__name__}: {reason}); try again when the "
                    f"machine is less busy, or set ray_address; Ray's logs: {logs()}"
                ) from None


def _is_rays(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("ray" in Path(word).parts or word.startswith("ray::") for word in process.cmdline())
    return False


def logs() -> str:
    """The folder of Ray's logs on this machine."""
    from ray._common.utils import get_default_ray_temp_dir
    from ray._private import worker

    node = worker._global_node
    return str(node.get_logs_dir_path() if node else Path(get_default_ray_temp_dir(), "session_latest", "logs"))


def find_token() -> str | None:
    """A cluster's token, from where Ray reads it; None if there is none."""
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
    """Make Ray send the token, if there is one. Call it before Ray is imported. Clusters without a token ignore it."""
    if "RAY_AUTH_MODE" not in os.environ and find_token():
        os.environ["RAY_AUTH_MODE"] = "token"


@contextmanager
def _silent() -> Iterator[None]:
    """Discard what Ray's C++ code prints to stderr while it starts. Python's stderr still works."""
    sys.stderr.flush()
    kept, nowhere, before = os.dup(2), os.open(os.devnull, os.O_WRONLY), sys.stderr
    try:
        own = before.fileno() == 2
    except (OSError, ValueError):  # in a notebook, stderr is not a file
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
    """A Ray that starts inside the block listens on loopback only, and requires a random token.

    Anyone who can connect to Ray can run code in it. On Linux, Ray listens on all interfaces unless ENABLE_RAY_CLUSTER
    is off. The token protects against other users of this machine, and against everyone if a later Ray ignores the
    flag. Ray's processes inherit it. The driver's environment is restored: other clusters have other tokens.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    before = {name: os.environ.pop(name, None) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")}
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    os.environ["RAY_AUTH_TOKEN"] = token_hex(32)  # without RAY_AUTH_MODE, a local Ray requires the token
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
    """Make this process forget the token when the node shuts down: the next Ray has another token, or none."""
    end = node.kill_all_processes

    def kill(*arguments: Any, **options: Any) -> None:
        try:
            end(*arguments, **options)
        finally:
            _forget_token()

    node.kill_all_processes = kill


def _forget_token() -> None:
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()


def leave(code: Any) -> None:
    """End this process now with the exit code of a SystemExit, if Ray Data still runs in one of its threads.

    Such a thread may wait for an actor that Ray's memory monitor kills again and again. On a usual exit it would
    outlive Ray, and its next call would make Ray exit with code 1.
    """
    if not any(thread.name.startswith("StreamingExecutor") for thread in threading.enumerate()):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)  # Ray's helper process ends the local Ray


def on_a_device(job: Job, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function once with the resources of an actor, and return its result."""
    import ray
    from ray.exceptions import RayTaskError

    remote = ray.remote(num_cpus=ACTOR, num_gpus=gpus(job), max_retries=0)(function)
    try:
        return ray.get(remote.remote(*arguments))
    except RayTaskError as error:
        raise error.cause from None


def _address(job: Job) -> str:
    environment = os.environ.get("RAY_ADDRESS", "")
    return job.ray_address or ("" if environment.startswith("http") else environment) or "local"


def starts_here(job: Job) -> bool:
    """Whether the job would start a Ray of its own, on this machine alone."""
    import ray

    return _address(job) == "local" and not ray.is_initialized()


def check_cluster(job: Job) -> None:
    """Wait until the cluster has room for an actor. Raises JobError if it does not: Ray would wait for ever."""
    from ray.autoscaler.sdk import request_resources

    if not (short := _short(job)):
        return
    if _address(job) != "local":
        print(f"waiting up to {JOINING} s for nodes: {short}", flush=True)
        request_resources(bundles=[{name: count for name, count in _needs(job).items() if count}])  # for the autoscaler
        until = time.monotonic() + JOINING
        while short and time.monotonic() < until:
            time.sleep(1)
            short = _short(job)
        request_resources(bundles=[])  # the actors request their own
    if short:
        raise JobError(f"device: {short}")


def actors_that_fit(job: Job, memory: int) -> int:
    """Number of actors with this memory that fit the cluster, at least one. A local Ray has this machine's cores."""
    import ray

    have = ray.cluster_resources()
    if gpus(job):
        return max(1, _on_gpus(job))
    cores = job.actor_range[1] if _address(job) == "local" else int(have.get("CPU", 1)) // job.threads
    return max(1, min(cores, int(have.get("memory", memory)) // memory))


def _needs(job: Job) -> dict[str, float]:
    return {"CPU": 1.0, "GPU": gpus(job)}


def _short(job: Job) -> str:
    """The resource that the cluster lacks for one actor, as text; empty if it lacks none."""
    for name, count in _needs(job).items():
        have = _on_nodes(name)
        if sum(have) < count:
            return f"an actor needs {count:g} {name}, but the cluster has {sum(have):g}"
        if name == "GPU" and max(have) < count:
            return f"an actor needs {count:g} GPU on one node, but the nodes of the cluster have at most {max(have):g}"
    return ""


def _on_gpus(job: Job) -> int:
    """Number of actors that the cluster has GPUs for. An actor has all its GPUs on one node."""
    return sum(int(count / gpus(job)) for count in _on_nodes("GPU"))


def _on_nodes(name: str) -> list[float]:
    """How much of a resource each node has."""
    import ray

    return [node["Resources"].get(name, 0.0) for node in ray.nodes() if node["Alive"]]


def lacking(job: Job, long: bool) -> str:
    """What missing actors wait for, as text; empty while the wait is short and no process was killed."""
    import ray

    from exspec.pipeline.cluster.failures import short_of_memory

    if (short := short_of_memory()) or not long:
        return short
    count = job.actor_range[0]
    enough = ray.cluster_resources().get("CPU", 0) >= count * ACTOR
    if enough and (not gpus(job) or _on_gpus(job) >= count):
        return f"there is room for them; they are still loading models; Ray's logs: {logs()}"
    have, free = ray.cluster_resources(), ray.available_resources()
    needed = [f"{count:g} {name}" for name, count in _needs(job).items() if count]
    left = [f"{free.get(name, 0):.3g} of {have.get(name, 0):g} {name}" for name, n in _needs(job).items() if n]
    return (
        f"each needs {' and '.join(needed)}, but the cluster has {' and '.join(left)} free; the job continues with the "
        "actors it has; lower actors or add nodes"
    )


def gpus(job: Job) -> float:
    if job.num_gpus is not None:
        return job.num_gpus
    return 1.0 if device(job) == "cuda" else 0.0


def device(job: Job) -> str:
    """The job's device; for `auto`, whether the cluster has GPUs."""
    if job.device != "auto":
        return job.device
    import ray

    return "cuda" if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0 else "cpu"
