"""Starts an executor: `hermes-executor`, or `python -m executor`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc
from prometheus_client import CollectorRegistry

from hermes.v1 import executor_pb2_grpc
from shared import extras
from shared import server as hermes_server
from shared.errors import StartupError
from shared.metrics import Endpoint
from shared.server import Health
from shared.settings import ExecutorSettings

if TYPE_CHECKING:
    from executor.build import Executor

log: Final = logging.getLogger(__name__)

SERVICE: Final = "hermes.v1.Executor"

_PACKAGES: Final = ("torch", "transformers", "safetensors")

_SPINS: Final = "2000"
"""How often a thread of GNU's OpenMP looks for more work before it sleeps: a tenth of a millisecond, longer than the
engine's pauses between two operations. Left to itself it looks for many milliseconds, and keeps the CPU from the very
thread that it waits for, where another program has the other one: steps took a second instead of a twentieth."""


class ExecutorApplication:
    """The executor as its server runs it."""

    name = "executor"
    services: Sequence[str] = (SERVICE, "hermes.v1.ExecutorAdmin")

    def __init__(self, settings: ExecutorSettings) -> None:
        """Raises StartupError for settings that no executor can run with, and where a package is not installed."""
        extras.require("executor", *_PACKAGES)
        if settings.max_running > settings.max_batch_tokens:
            raise StartupError(
                f"max_running {settings.max_running} is above max_batch_tokens {settings.max_batch_tokens};"
                " a step must have room for a token of each running request."
            )
        if settings.block_size != "auto" and settings.block_size > settings.max_batch_tokens:
            raise StartupError(
                f"block_size {settings.block_size} is above max_batch_tokens {settings.max_batch_tokens};"
                " a step must have room for a block."
            )
        self._settings = settings
        self._executor: Executor | None = None
        self._endpoint: Endpoint | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, server: grpc.aio.Server, health: Health) -> None:
        """Loads the model, starts the engine, adds the servicers. Raises StartupError."""
        loop = asyncio.get_running_loop()

        def on_death() -> None:
            asyncio.run_coroutine_threadsafe(health.set(SERVICE, serving=False), loop)

        registry = CollectorRegistry()
        # first, since a port that cannot be had should be told before a model has loaded for minutes
        self._endpoint = Endpoint(registry, self._settings.host, self._settings.metrics_port)
        log.info("metrics on http://%s:%d/metrics", self._settings.host, self._endpoint.port)
        try:
            self._executor = await _in_thread_that_ends(partial(_build, self._settings, registry, loop, on_death))
        except BaseException:
            self._endpoint.close()
            raise
        self._executor.engine.start()
        executor_pb2_grpc.add_ExecutorServicer_to_server(self._executor.service, server)
        executor_pb2_grpc.add_ExecutorAdminServicer_to_server(self._executor.admin, server)
        await health.set(SERVICE, serving=True)
        from executor.watchdog import Watchdog  # noqa: PLC0415 -- imports torch

        watchdog = Watchdog(self._executor.engine, self._settings.watchdog_seconds)
        self._watching = asyncio.create_task(
            watchdog.watch(lambda serving: health.set(SERVICE, serving=serving)), name="watchdog"
        )

    async def drain(self) -> None:
        """Nothing to do: what runs ends by itself, and the server waits for its calls."""

    async def stop(self) -> None:
        """Ends the engine after the step that runs."""
        if self._watching is not None:
            self._watching.cancel()
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
        if self._executor is not None:
            await asyncio.to_thread(self._executor.adoption.close)
            await asyncio.to_thread(self._executor.engine.stop)


async def _in_thread_that_ends(work: Callable[[], Executor]) -> Executor:
    """Like asyncio.to_thread, whose threads stay.

    GNU's OpenMP counts the threads that helped a thread to compute, for as long as that one lives. When there are more
    than CPUs, the engine's helpers sleep and wake between any two operations, instead of waiting some microseconds for
    the next: steps take half as long again.
    """
    pool = ThreadPoolExecutor(1, "build")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)


def _build(
    settings: ExecutorSettings,
    registry: CollectorRegistry,
    loop: asyncio.AbstractEventLoop,
    on_death: Callable[[], None],
) -> Executor:
    from executor.build import build  # noqa: PLC0415 -- takes seconds, in which signals must work

    return build(settings, registry, loop, on_death)


def _serve(settings: ExecutorSettings) -> int:
    return hermes_server.run(ExecutorApplication(settings), settings)


def main(argv: list[str] | None = None) -> int:
    """Runs an executor until it is told to stop. Returns the exit code."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # read when torch is imported, which it is not yet
    return hermes_server.main(ExecutorSettings, _serve, argv)


if __name__ == "__main__":
    sys.exit(main())
