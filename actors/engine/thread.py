"""An engine in its own thread, shared by any number of callers."""

import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from exspec.actors.engine.engine import Engine
from exspec.actors.engine.request import Completion, Request
from exspec.actors.engine.statistics import EngineStatistics


class EngineThread:
    """Runs an engine while there is work. Any thread may call `submit`.

    A request's future receives its completion, the RequestError that rejects it, or what its own functions raised. If
    the engine itself fails, `failed` is set and all futures receive that error, including those of later requests.
    Close it, or use it as a context manager.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.failed = False
        self._inbox: SimpleQueue[tuple[Request, Future[Completion]] | None] = SimpleQueue()
        self._futures: dict[object, Future[Completion]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def statistics(self) -> EngineStatistics:
        return self._engine.statistics

    def submit(self, request: Request) -> Future[Completion]:
        future: Future[Completion] = Future()
        self._inbox.put((request, future))
        return future

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._inbox.put(None)
        self._thread.join()

    def __enter__(self) -> "EngineThread":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            open_ = True
            while open_ or self._engine.busy:
                open_ = self._receive(wait=not self._engine.busy) and open_
                self._engine.step()
                for completion in self._engine.take():
                    future = self._futures.pop(completion.id)
                    if completion.error:
                        future.set_exception(completion.error)
                    else:
                        future.set_result(completion)
        except BaseException as error:  # every waiting caller receives it
            self._fail(error)

    def _receive(self, wait: bool) -> bool:
        """Submit the requests in the inbox. wait: wait for one if it is empty. Returns False after `close`."""
        try:
            while (item := self._inbox.get(block=wait)) is not None:
                request, future = item
                if not future.set_running_or_notify_cancel():
                    continue  # cancelled already; from here on it cannot be cancelled
                try:
                    self._engine.submit(request)
                    self._futures[request.id] = future
                except BaseException as error:  # its own functions may raise anything
                    future.set_exception(error)
                wait = False
        except Empty:
            return True
        return False

    def _fail(self, error: BaseException) -> None:
        self.failed = True
        for future in self._futures.values():
            future.set_exception(error)
        while (item := self._inbox.get()) is not None:
            if item[1].set_running_or_notify_cancel():
                item[1].set_exception(error)
