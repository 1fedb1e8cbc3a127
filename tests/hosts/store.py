"""An S3 server on a host, behind a proxy that can slow requests down, refuse them and hold their answers.

The proxy listens in the host's network and forwards to a server on this machine's loopback, where the tests read it
without faults. It runs in a thread of the tests.
"""

import asyncio
import ctypes
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from yarl import URL

from tests.hosts.network import Host

PORT = 9000
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
CLONE_NEWNET = 0x40000000
KEPT_OUT = {"transfer-encoding", "connection", "content-length", "keep-alive", "date", "server"}


@dataclass
class Request:
    """A request to the store: its host, method and path. status: of the answer; 0: none yet."""

    text: str
    status: int = 0


class Store:
    """The store of the cluster. names: of the hosts, by address. slow: seconds before each request is forwarded.
    late: seconds before its answer is sent. refused: the status of the answer to every request; 0: none."""

    def __init__(self, host: Host, upstream: str, names: dict[str, str]) -> None:
        self.host, self.upstream, self.names = host, upstream, names
        self.slow = self.late = 0.0
        self.refused = 0
        self.requests: list[Request] = []
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(_listening(host),), daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def endpoint(self) -> str:
        """For clients on the hosts."""
        return f"http://{self.host.name}:{PORT}"

    def wait(self, pattern: str, since: int, count: int, seconds: float) -> bool:
        """Wait until so many requests after number `since` match "HOST METHOD /path", whether they are answered or not.
        Returns whether they did within the seconds."""

        def enough() -> bool:
            return sum(re.search(pattern, request.text) is not None for request in self.requests[since:]) >= count

        with self._changed:
            return self._changed.wait_for(enough, seconds)

    @contextmanager
    def disturbed(self, **faults: float) -> Iterator[None]:
        """Set slow, late or refused."""
        vars(self).update(faults)
        try:
            yield
        finally:
            vars(self).update(dict.fromkeys(faults, 0))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self, listening: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start(listening))
        self._ready.set()
        self._loop.run_forever()

    async def _start(self, listening: socket.socket) -> None:
        # Without a limit of time: a test decides how long an answer takes.
        self._client = ClientSession(
            auto_decompress=False, timeout=ClientTimeout(total=None), connector=TCPConnector(limit=0)
        )
        application = web.Application(client_max_size=2**30)
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening).start()

    async def _answer(self, request: web.Request) -> web.Response:
        body, host = await request.read(), self.names.get(request.remote or "", "?")
        noted = Request(f"{host} {request.method} {request.raw_path}")
        with self._changed:
            self.requests.append(noted)
            self._changed.notify_all()
        if self.refused:
            noted.status = self.refused
            return web.Response(status=self.refused, body=SLOW_DOWN, content_type="application/xml")
        await asyncio.sleep(self.slow)
        url = URL(f"{self.upstream}{request.raw_path}", encoded=True)
        kept = {k: v for k, v in request.headers.items() if k.lower() not in {"connection", "transfer-encoding"}}
        async with self._client.request(request.method, url, headers=kept, data=body, allow_redirects=False) as answer:
            content = await answer.read()
            headers = {k: v for k, v in answer.headers.items() if k.lower() not in KEPT_OUT}
            if request.method == "HEAD" and "Content-Length" in answer.headers:
                headers["Content-Length"] = answer.headers["Content-Length"]
        await asyncio.sleep(self.late)
        noted.status = answer.status
        return web.Response(status=answer.status, body=content, headers=headers)


def _listening(host: Host) -> socket.socket:
    """A socket in the host's network. Only this thread enters it, and leaves it again."""
    made: list[Any] = []

    def make() -> None:
        enter = ctypes.CDLL(None, use_errno=True).setns
        with Path(f"/proc/{host.init.pid}/ns/net").open() as there:
            if enter(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        made.append(socket.create_server((host.address, PORT), backlog=1024))

    thread = threading.Thread(target=make)  # its network namespace ends with it
    thread.start()
    thread.join()
    return made[0]
