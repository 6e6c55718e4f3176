"""The services as running processes: started together, stopped in order, their logs kept."""

import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Final, NamedTuple

from shared.errors import StartupError
from shared.supervisor.output import complain, say_log_line
from shared.supervisor.rundir import Process, RunDirectory, Running, State, end_orphans
from shared.supervisor.services import Service

_STOP_GRACE: Final = 10.0  # seconds that a service gets on top of its own drain_seconds
_READER_SECONDS: Final = 2.0  # for a dead service's last lines
_LAST_LINES: Final = 15
_BAD_START: Final = 2  # exit code of a service that says in its last line what to do


class _Ended(NamedTuple):
    child: "_Child"


class _Asked(NamedTuple):
    number: int


_Event = _Ended | _Asked


class _Child:
    """A running service: its process, and the threads that read its log and wait for its end."""

    def __init__(self, service: Service, directory: RunDirectory, log: "_Log", events: "queue.SimpleQueue[_Event]"):
        self.service = service
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
            service.command,
            env={**os.environ, **service.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C on the terminal reaches the supervisor alone, which stops them in order
        )
        self.process = Process.of(self._popen.pid)
        own_log = directory.service_log(service.name)
        self._reader = threading.Thread(target=self._read, args=(own_log, log), daemon=True)
        self._waiter = threading.Thread(target=self._wait, args=(events,), daemon=True)
        self._reader.start()
        self._waiter.start()

    def running(self) -> Running:
        """The child as the state file has it."""
        service = self.service
        return Running(service.name, service.address, service.health, service.tls_ca, self.process)

    def ended(self) -> bool:
        """Whether its process is over."""
        return self._popen.poll() is not None

    def bury(self) -> None:
        """Ends whatever processes it left, and takes its last lines. Its own process is over."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._reader.join(_READER_SECONDS)

    def obituary(self) -> str:
        """Why it ended, for people; after bury."""
        code = self._popen.returncode
        lines = [line for line in self.last_lines if line.strip()]
        if code == _BAD_START and lines:
            return f"The {self.service.name} cannot start: {lines[-1].removeprefix(f'hermes-{self.service.name}: ')}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "\n".join([f"The {self.service.name} {how}. Its last lines:", *(f"  {line}" for line in lines)])

    def _read(self, own_log: Path, log: "_Log") -> None:
        pipe = self._popen.stdout
        assert pipe is not None  # noqa: S101 - it was asked for above
        with pipe, own_log.open("w") as own:
            for raw in pipe:
                line = raw.decode(errors="replace").rstrip("\n")
                self.last_lines.append(line)
                own.write(line + "\n")
                own.flush()
                log.write(self.service.name, line)

    def _wait(self, events: "queue.SimpleQueue[_Event]") -> None:
        self._popen.wait()
        events.put(_Ended(self))


class _Log:
    """Both services' lines, prefixed: in a file, and on standard output. Any thread may write."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        """Adds a line of one service, or of the supervisor itself."""
        prefixed = f"{name:9} | {line}"
        with self._lock:
            self._file.write(prefixed + "\n")
            self._file.flush()
            say_log_line(prefixed)


def run(directory: RunDirectory, services: Sequence[Service]) -> int:
    """Runs the services in the foreground until one ends or a signal comes; a second signal kills them.

    Returns 0 when it was asked to stop, 1 when a service ended by itself or could not start.
    """
    with directory.lock() as mine:
        if not mine:
            complain("Hermes already runs from this directory; `make down` stops it.")
            return 1
        if (previous := directory.read()) is not None:
            end_orphans(previous)
        state = State(Process.of(os.getpid()))
        directory.write(state)
        with directory.log.open("w") as file:
            log = _Log(file)
            failure = _supervise(directory, services, state, log)
            if failure is None:
                return 0
            for line in failure.splitlines():
                log.write("hermes", line)
            return 1


def _supervise(directory: RunDirectory, services: Sequence[Service], state: State, log: _Log) -> str | None:
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()

    def ask(number: int, _frame: FrameType | None) -> None:
        events.put(_Asked(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    failure: str | None = None
    children: list[_Child] = []
    try:
        for service in services:
            _require_free(service)
        for service in services:
            children.append(_Child(service, directory, log, events))
            state = State(state.supervisor, tuple(child.running() for child in children))
            directory.write(state)
        event = events.get()
        if isinstance(event, _Ended):
            event.child.bury()
            failure = event.child.obituary()
    except (StartupError, OSError) as error:
        failure = str(error)
    finally:
        _stop(children, events)
    directory.write(State(state.supervisor, state.services, failure))
    return failure


def _require_free(service: Service) -> None:
    family = socket.AF_INET6 if ":" in service.host else socket.AF_INET
    for setting, port in service.listens:
        try:
            socket.create_server((service.host, port), family=family).close()
        except OSError as error:
            raise StartupError(
                f"The {service.name} cannot listen on {service.host}:{port} ({os.strerror(error.errno or 0)}): "
                f"stop what listens there, or set HERMES_{service.name.upper()}_{setting.upper()}."
            ) from error


def _stop(children: Sequence[_Child], events: "queue.SimpleQueue[_Event]") -> None:
    """Stops the services, the last started first: it may still need the others to end what it does."""
    for child in reversed(children):
        child.process.signal(signal.SIGTERM)
        deadline = time.monotonic() + child.service.drain_seconds + _STOP_GRACE
        while not child.ended():
            try:
                event = events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                child.process.kill_group()
                deadline = time.monotonic() + _STOP_GRACE
                continue
            if isinstance(event, _Asked):
                for each in children:
                    each.process.kill_group()
        child.bury()
