"""The directory in which the supervisor keeps what it runs: a lock, a state file, logs."""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from shared.errors import StartupError

RUN_DIRECTORY_VARIABLE: Final = "HERMES_RUN_DIR"
DEFAULT_RUN_DIRECTORY: Final = ".run"

_PROC: Final = Path("/proc")
_STATE_FIELD: Final = 0  # of /proc/PID/stat, counted after the program's name: proc(5)
_START_FIELD: Final = 19
_POLL_SECONDS: Final = 0.05


class Process(NamedTuple):
    """One life of a process: its id alone may belong to another one by now."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """The process that has this id now, which must be the caller's own or its child."""
        return cls(pid, _started(pid) or "")

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.started != "" and _started(self.pid) == self.started

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to it; nothing happens where it has ended."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kills it and the processes it made; it must lead a group of its own."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Running(NamedTuple):
    """A service that the supervisor started."""

    name: str
    address: str
    health: str
    tls_ca: str | None
    process: Process


@dataclass(frozen=True, slots=True)
class State:
    """What the last supervisor runs or ran. Written by the supervisor alone, while it holds the lock."""

    supervisor: Process
    services: tuple[Running, ...] = ()
    failure: str | None = None
    """Why it ended, where that was not asked for."""

    def alive(self) -> bool:
        """Whether that supervisor still runs."""
        return self.supervisor.alive()


class RunDirectory:
    """Paths under one directory, and the state file in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.log = self.logs / "hermes.log"
        """Both services' lines, prefixed, as they came."""
        self._state = path / "state.json"

    def service_log(self, name: str) -> Path:
        """One service's lines as it wrote them."""
        return self.logs / f"{name}.log"

    def prepare(self) -> None:
        """Makes the directory where it is not there yet. Raises StartupError where it cannot be used."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.path / "lock").open("a").close()
        except OSError as error:
            raise self._unusable(error) from error

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Whether the caller is the one supervisor here; the lock goes with the process that holds it."""
        self.prepare()
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def read(self) -> State | None:
        """The last state; None where there was none, or another version wrote it.

        Raises StartupError for a directory that cannot be used.
        """
        try:
            fields = json.loads(self._state.read_text())
            services = tuple(
                Running(name, address, health, tls_ca, Process(*process))
                for name, address, health, tls_ca, process in fields["services"]
            )
            return State(Process(*fields["supervisor"]), services, fields["failure"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error) from error
        except (ValueError, KeyError, TypeError):  # written by another version
            return None

    def write(self, state: State) -> None:
        """Replaces the state in one step."""
        draft = self._state.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(state)))
        draft.replace(self._state)

    def clear(self) -> None:
        """Forgets the state."""
        self._state.unlink(missing_ok=True)

    def _unusable(self, error: OSError) -> StartupError:
        return StartupError(
            f"The run directory {self.path} cannot be used ({error.strerror}): "
            f"set {RUN_DIRECTORY_VARIABLE} to a directory that can be made and written."
        )


def end_orphans(state: State) -> bool:
    """Kills services whose supervisor died without stopping them; returns whether there were any."""
    orphans = [service for service in state.services if service.process.alive()]
    for service in orphans:
        service.process.kill_group()
    while any(service.process.alive() for service in orphans):
        time.sleep(_POLL_SECONDS)
    return bool(orphans)


def _started(pid: int) -> str | None:
    """When a process started, in whatever unit the system has; None where it has ended."""
    if _PROC.is_dir():
        try:
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[_STATE_FIELD] in "ZX" else fields[_START_FIELD]
    answer = subprocess.run(  # noqa: S603 - a fixed command and a number
        ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    state, _, started = answer.partition(" ")
    return None if not answer or state.startswith("Z") else started.strip()
