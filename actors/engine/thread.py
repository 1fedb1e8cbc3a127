"""An engine in a thread of its own, shared by any number of callers."""

import threading
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from exspec.actors.engine.engine import Engine
from exspec.actors.engine.request import Completion, Request
from exspec.actors.engine.statistics import EngineStatistics


class EngineThread:
    """Runs an engine while there is work. `submit` may be called from any thread.

    A request's future gets its completion, or the RequestError that refuses it. If the engine itself fails, every
    future gets that error, and so does every later one. Close it, or use it as a context manager.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
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
                    self._futures.pop(completion.id).set_result(completion)
        except Exception as error:  # handed to everyone who waits
            self._fail(error)

    def _receive(self, wait: bool) -> bool:
        """Hand what has arrived to the engine, waiting for it if there is nothing else to do. False: closed."""
        try:
            while (item := self._inbox.get(block=wait)) is not None:
                request, future = item
                if not future.set_running_or_notify_cancel():
                    continue  # cancelled before it was seen; from here on it cannot be
                try:
                    self._engine.submit(request)
                    self._futures[request.id] = future
                except (ValueError, TypeError) as error:
                    future.set_exception(error)
                wait = False
        except Empty:
            return True
        return False

    def _fail(self, error: Exception) -> None:
        for future in self._futures.values():
            future.set_exception(error)
        while (item := self._inbox.get()) is not None:
            item[1].set_exception(error)
