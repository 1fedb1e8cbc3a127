"""The ledger in its own Ray actor."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from exspec.actors.ledger import Ledger, Signs
from exspec.pipeline.errors import JobError

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE = 5.0  # seconds to wait for the actor's answer
RETRY = 1.0  # seconds until a call is repeated


def remote(method: Callable[Concatenate[Ledger, P], T]) -> Callable[Concatenate["RayLedger", P], T]:
    """The method, called in the ledger's actor."""

    def call(self: "RayLedger", /, *args: P.args, **kwargs: P.kwargs) -> T:
        import ray
        from ray.exceptions import ActorUnavailableError, RayActorError

        while True:
            try:
                result: T = ray.get(getattr(self._actor, method.__name__).remote(*args, **kwargs))
                return result
            except ActorUnavailableError:  # the connection broke; Ray makes a new one, or says that the actor has died
                time.sleep(RETRY)
            except RayActorError:
                raise JobError("the process of the ledger, which counts the attempts at each chunk, has died") from None

    return call


class RayLedger(Ledger):
    """A ledger whose state is in its own Ray actor, which outlives the generators. It is on the driver's node: losing
    that node ends the job anyway."""

    def __init__(self, slots: int | None = None) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        ledger: Any = ray.remote(num_cpus=0, max_restarts=0)(Ledger)
        self._signs = Signs({}, 0.0)
        self._actor: Any = ledger.options(scheduling_strategy=here).remote(slots)

    begun = remote(Ledger.begun)
    begin = remote(Ledger.begin)
    mark = remote(Ledger.mark)
    note = remote(Ledger.note)
    window = remote(Ledger.window)
    shrink = remote(Ledger.shrink)
    loading = remote(Ledger.loading)
    failed = remote(Ledger.failed)
    started = remote(Ledger.started)
    code = remote(Ledger.code)
    known = remote(Ledger.known)
    claim = remote(Ledger.claim)

    def end(self, part: str) -> None:
        self._actor.end.remote(part)

    def sign(self, actor: str, host: str, tokens: int) -> None:
        self._actor.sign.remote(actor, host, tokens)  # do not wait: the driver may be gone

    def share(self, machine: str, files: Mapping[str, bytes]) -> None:
        from ray.exceptions import RayError

        with suppress(RayError):  # the object store is full; others compile the code again
            self._actor.share.remote(machine, files)

    def leave(self, actor: str) -> None:
        self._actor.leave.remote(actor)

    def signs(self) -> Signs:
        """The present signs, or the last known ones if the actor does not answer: they are only for display."""
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            self._signs = ray.get(self._actor.signs.remote(), timeout=PATIENCE)
        return self._signs
