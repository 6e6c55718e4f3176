"""The life of a gRPC server: bind, start, serve, drain, stop."""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, NoReturn, Protocol, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared import config, logs, tls
from shared.errors import StartupError
from shared.interceptors import CallLog, Errors, Gate, Once
from shared.settings import ServerSettings

EXIT_OK: Final = 0
EXIT_CRASH: Final = 1
EXIT_STARTUP: Final = 2
EXIT_FORCED: Final = 128 + signal.SIGINT  # what a shell reports for a process that Ctrl-C ended

_SETTLE_SECONDS: Final = 2.0  # for what was cancelled to clean up behind itself
_FAREWELL_SECONDS: Final = 0.5  # for those who watch health, whose calls never end, before their connection breaks
_STOP_SECONDS: Final = 10.0  # for the application to free what it holds
_SERVING: Final = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
}
_OPTIONS: Final = (
    # Clients ping every 30 seconds, also between calls; gRPC would take that for abuse and drop them.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Finds callers whose machine is gone, so that their calls end.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients resolve names anew only when they reconnect; running calls go on.
    ("grpc.max_connection_age_ms", 1_800_000),
    # A message in few large frames, and room for it from the start rather than by pings that measure the connection:
    # a twentieth of the time of a call with 35 KB each way.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**20),
    ("grpc.http2.max_frame_size", 2**20),
)

S = TypeVar("S", bound=ServerSettings)
log = logging.getLogger(__name__)


class Health:
    """The server's gRPC health service."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._first: str | None = None

    async def set(self, service: str, serving: bool) -> None:
        """Tells how a service is from now on. The first name ever set speaks for the whole server ("") too."""
        self._first = self._first or service
        await self._servicer.set(service, _SERVING[serving])
        if service == self._first:
            await self._servicer.set("", _SERVING[serving])

    async def add_to(self, server: grpc.aio.Server) -> None:
        """Makes the server answer health checks: NOT_SERVING until something is set."""
        await self._servicer.set("", _SERVING[False])
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def drain(self) -> None:
        """NOT_SERVING for every name, for good; those who watch hear it now."""
        await self._servicer.enter_graceful_shutdown()


class Application(Protocol):
    """What a service is to the server that runs it."""

    name: str
    """As it stands in logs: "assembler" or "executor"."""
    services: Sequence[str]
    """Full proto names of the services, for reflection, such as "hermes.v1.Executor"."""

    async def start(self, server: grpc.aio.Server, health: Health) -> None:
        """Loads what the service needs, adds its servicers to the server, and says how its health is.

        Long work that blocks belongs in a thread, so that signals are heard. Raises StartupError for what the
        operator has to put right. Cancelled when the process is told to stop before it is ready.
        """

    async def drain(self) -> None:
        """Takes no more work, and returns when what runs has ended. Cancelled after drain_seconds."""

    async def stop(self) -> None:
        """Frees everything. Called once after a start that succeeded, however the drain went."""


class Seat(NamedTuple):
    """A process's place among several that serve one port. on_ready: called when it serves."""

    number: int
    on_ready: Callable[[], None]


def main(settings_class: type[S], serve: Callable[[S], int], argv: list[str] | None = None) -> int:
    """A service's whole process: loads its settings, and serves with them.

    serve may raise StartupError for settings that it cannot use.
    Returns the exit code of serve, as `run` has them; 2 also for a bad setting, with one sentence on stderr.
    """
    try:
        return serve(config.load(settings_class, argv))
    except StartupError as error:
        sys.stderr.write(f"hermes-{settings_class.service}: {error}\n")
        return EXIT_STARTUP


def run(application: Application, settings: ServerSettings, seat: Seat | None = None) -> int:
    """Serves until SIGTERM or SIGINT, then drains.

    seat: for one of several processes on one port, which somebody has checked and keeps for them.
    Returns the exit code: 0, 2 for a StartupError, 1 for a crash. A second SIGINT ends the process at once with 130,
    and a signal before the server is ready ends it with 0, whatever threads are busy with.
    """
    logs.configure(settings.log_level, settings.log_format, application.name)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_Life(application, settings, seat).run())
    except StartupError as error:
        sys.stderr.write(f"hermes-{application.name}: {error}\n")
        return EXIT_STARTUP
    except Exception:
        log.exception("%s crashed", application.name)
        return EXIT_CRASH
    return EXIT_OK


class _Life:
    """One server from bind to stop."""

    def __init__(self, application: Application, settings: ServerSettings, seat: Seat | None) -> None:
        self._application = application
        self._settings = settings
        self._seat = seat
        self._health = Health()
        self._gate = Gate()
        self._told_to_stop = asyncio.Event()
        self._interrupts = 0
        self._began = time.monotonic()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        server = self._build()
        address = self._bind(server)
        try:
            await self._health.add_to(server)
            await self._start(server)
            try:
                await server.start()
                self._tell_ready(address)
                await self._told_to_stop.wait()
                await self._drain()
            finally:
                await self._stop()
        finally:
            await server.stop(grace=_FAREWELL_SECONDS)
        log.info("%s stopped", self._application.name)

    def _tell_ready(self, address: str) -> None:
        if self._seat is None:
            log.info("%s ready on %s (%s)", self._application.name, address, self._summary())
        else:
            log.info("%s worker %d serves (%s)", self._application.name, self._seat.number, self._summary())
            self._seat.on_ready()

    def _on_signal(self, number: signal.Signals) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            log.warning("%s: forced to stop by a second interrupt", self._application.name)
            _leave(EXIT_FORCED)
        self._told_to_stop.set()

    def _build(self) -> grpc.aio.Server:
        limit = int(self._settings.max_message_bytes)
        sizes = (("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit))
        sharing = (("grpc.so_reuseport", 0 if self._seat is None else 1),)  # else a second server shares it silently
        options = _OPTIONS + sizes + sharing
        server = grpc.aio.server(interceptors=(Once(), CallLog(), Errors(), self._gate), options=options)
        if self._settings.reflection:
            names = (*self._application.services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        return server

    def _bind(self, server: grpc.aio.Server) -> str:
        credentials = tls.credentials(self._settings)
        host, port = self._settings.host, self._settings.port
        if self._seat is None:
            check_address(host, port)
        shown = f"[{host}]" if ":" in host else host
        try:
            if credentials is None:
                port = server.add_insecure_port(f"{shown}:{port}")
            else:
                port = server.add_secure_port(f"{shown}:{port}", credentials)
        except RuntimeError as error:  # somebody else was quicker
            raise _taken(port) from error
        return f"{shown}:{port}"

    async def _start(self, server: grpc.aio.Server) -> None:
        starting = asyncio.create_task(self._application.start(server, self._health))
        stopping = asyncio.create_task(self._told_to_stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,), timeout=_SETTLE_SECONDS)
            log.info("%s stopped before it was ready", self._application.name)
            # A model may still be loading in a thread, which nothing can cancel and Python would wait for.
            _leave(EXIT_OK)
        stopping.cancel()
        await starting

    async def _drain(self) -> None:
        log.info("%s draining, %d calls running", self._application.name, self._gate.running)
        self._gate.close()
        await _within(_SETTLE_SECONDS, self._health.drain())
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                await self._application.drain()
                await self._gate.empty()
        except TimeoutError:
            seconds = self._settings.drain_seconds
            log.warning("%d calls did not end within drain_seconds=%g; they are cut off", self._gate.running, seconds)
            self._gate.cut()
            await _within(_SETTLE_SECONDS, self._gate.empty())
        except Exception:
            log.exception("%s failed to drain", self._application.name)

    async def _stop(self) -> None:
        if not await _within(_STOP_SECONDS, self._application.stop()):
            log.error("%s did not free what it holds within %g seconds", self._application.name, _STOP_SECONDS)
            _leave(EXIT_CRASH)

    def _summary(self) -> str:
        security = "TLS" if self._settings.tls_cert else "no TLS"
        return f"{security}, process {os.getpid()}, started in {time.monotonic() - self._began:.1f} s"


def check_address(host: str, port: int) -> None:
    """Raises StartupError where a server cannot listen there, and says why."""
    # gRPC only says that it could not bind, and serves half of what a name stands for where the rest is taken.
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise _not_ours(host) from error
    failures = 0
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except PermissionError as error:
            raise StartupError(f"Port {port} is only for privileged users; set --port to one above 1023.") from error
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _taken(port) from error
            failures += 1
    if failures == len(found):
        raise _not_ours(host)


def _taken(port: int) -> StartupError:
    return StartupError(f"Port {port} is already in use; stop the process that has it, or set --port to another one.")


def _not_ours(host: str) -> StartupError:
    return StartupError(f"{host} is not an address of this machine; set --host to one that is, such as 127.0.0.1.")


async def _within(seconds: float, work: Awaitable[None]) -> bool:
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        return False
    return True


def _leave(code: int) -> NoReturn:
    """Ends the process without waiting for threads."""
    logging.shutdown()
    os._exit(code)
