"""Several processes that serve one port: started together, replaced when one dies, drained together."""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Final, NamedTuple, TypeAlias

from shared.errors import StartupError
from shared.server import EXIT_CRASH, EXIT_FORCED, EXIT_OK, EXIT_STARTUP, check_address

# A worker that dies is replaced; so many in so short a time (seconds) have a reason that will not go away.
_MOST_DEATHS: Final = 5
_DEATHS_WITHIN: Final = 60.0
_PAUSE_SECONDS: Final = 0.5
# On top of drain_seconds, for a worker to end; see shared/server.py for what it does in them.
_STOP_SECONDS: Final = 15.0

log: Final = logging.getLogger(__name__)


class Post(NamedTuple):
    """What a worker is told: its number, from 1, and the port that all serve. ready: it says there that it serves."""

    number: int
    port: int
    ready: Connection


Work: TypeAlias = Callable[[Post], int]
"""Serves until SIGTERM and returns the exit code; sent to the process, so it has to be picklable."""


@dataclass(frozen=True, slots=True)
class Plan:
    """name: of the service, for the log. count: of workers. drain_seconds: that calls get to end, as settings say."""

    name: str
    host: str
    port: int
    count: int
    drain_seconds: float


class _Worker(NamedTuple):
    process: SpawnProcess
    ready: Connection


def run(plan: Plan, work: Work, on_end: Callable[[int], None]) -> int:
    """Runs the workers until SIGTERM or SIGINT, then drains them all.

    on_end: told the process id of each worker that has ended.
    Returns the exit code: 0; 2 where a worker could not start, which has said why; 1 where they die again and again;
    130 for a second SIGINT. Raises StartupError for an address that cannot be served.
    """
    check_address(plan.host, plan.port)
    with _reserved(plan.host, plan.port) as place:
        crew = _Crew(replace(plan, port=place.getsockname()[1]), work, on_end)
        return asyncio.run(crew.run())


def watch_parent() -> None:
    """Has this worker end when its parent is gone, however that went."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    join = parent.join

    def wait() -> None:
        join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent watcher", daemon=True).start()


def _reserved(host: str, port: int) -> socket.socket:
    """A socket that keeps the port, also a free one for 0, and takes no connections."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    place = socket.socket(family, kind, protocol)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        place.bind(where)
    except OSError as error:
        place.close()
        raise StartupError(f"Port {port} cannot be shared by workers: {error.strerror}.") from error
    return place


class _Crew:
    """The workers of one port. Lives on the event loop."""

    def __init__(self, plan: Plan, work: Work, on_end: Callable[[int], None]) -> None:
        self._plan = plan
        self._name = plan.name
        self._work = work
        self._on_end = on_end
        self._spawn = multiprocessing.get_context("spawn")
        self._workers: dict[int, _Worker] = {}
        self._ready: set[int] = set()
        self._deaths: list[float] = []
        self._was_ready = False
        self._code: int | None = None
        self._interrupts = 0
        self._changed = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, self._on_signal, sign)
        for number in range(1, self._plan.count + 1):
            self._start(number)
        while self._code is None:
            self._changed.clear()
            await self._changed.wait()
        await self._stop()
        return self._code

    def _on_signal(self, number: signal.Signals) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._end(EXIT_FORCED)
            for worker in self._workers.values():
                worker.process.kill()
        else:
            self._end(EXIT_OK)

    def _end(self, code: int) -> None:
        self._code = code if self._code is None or code == EXIT_FORCED else self._code
        self._changed.set()

    def _start(self, number: int) -> None:
        if self._code is not None:
            return
        here, there = multiprocessing.Pipe(duplex=False)
        process = self._spawn.Process(
            target=_begin, args=(self._work, Post(number, self._plan.port, there)), name=f"{self._name} worker {number}"
        )
        process.start()
        there.close()
        self._workers[number] = _Worker(process, here)
        loop = asyncio.get_running_loop()
        loop.add_reader(here.fileno(), self._on_ready, number)
        loop.add_reader(process.sentinel, self._on_end_of, number)

    def _on_ready(self, number: int) -> None:
        asyncio.get_running_loop().remove_reader(self._workers[number].ready.fileno())
        try:
            self._workers[number].ready.recv()
        except EOFError:  # it has ended, which is told in its own way
            return
        self._ready.add(number)
        if len(self._ready) == self._plan.count and not self._was_ready:
            self._was_ready = True
            host = f"[{self._plan.host}]" if ":" in self._plan.host else self._plan.host
            address, count = f"{host}:{self._plan.port}", self._plan.count
            log.info("%s ready on %s (%d workers, process %d)", self._name, address, count, os.getpid())

    def _on_end_of(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        worker = self._workers.pop(number)
        loop.remove_reader(worker.process.sentinel)
        loop.remove_reader(worker.ready.fileno())
        worker.process.join()
        worker.ready.close()
        code, pid = worker.process.exitcode, worker.process.pid or 0
        worker.process.close()
        self._on_end(pid)
        self._changed.set()
        if self._code is None:
            self._bury(number, code)
        self._ready.discard(number)

    def _bury(self, number: int, code: int | None) -> None:
        if code == EXIT_STARTUP and number not in self._ready:
            self._end(EXIT_STARTUP)
            return
        now = time.monotonic()
        self._deaths = [each for each in self._deaths if now - each < _DEATHS_WITHIN] + [now]
        if len(self._deaths) >= _MOST_DEATHS:
            log.error(
                "%s: %d workers ended within %g seconds; all are stopped", self._name, len(self._deaths), _DEATHS_WITHIN
            )
            self._end(EXIT_CRASH)
            return
        log.error("%s worker %d ended with exit code %s; another takes its place", self._name, number, code)
        asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._start, number)

    async def _stop(self) -> None:
        log.info("%s stops its %d workers", self._name, len(self._workers))
        for worker in self._workers.values():
            worker.process.terminate()
        try:
            async with asyncio.timeout(self._plan.drain_seconds + _STOP_SECONDS):
                while self._workers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("%s: %d workers did not end and are killed", self._name, len(self._workers))
            for worker in self._workers.values():
                worker.process.kill()
            while self._workers:
                self._changed.clear()
                await self._changed.wait()
        log.info("%s stopped", self._name)


def _begin(work: Work, post: Post) -> None:
    """The worker's side. Its exit code is what its work returns."""
    watch_parent()
    raise SystemExit(work(post))
