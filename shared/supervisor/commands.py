"""What an operator asks of the supervisor from outside: up, down, logs, address."""

import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hermes.health import probe
from shared.supervisor.output import complain, say, say_log_line
from shared.supervisor.rundir import RunDirectory, Running, State, end_orphans
from shared.supervisor.services import Service

_POLL_SECONDS: Final = 0.2
_PROBE_SECONDS: Final = 1.0


def up(directory: RunDirectory, services: Sequence[Service], supervisor: Sequence[str], wait: float) -> int:
    """Starts a supervisor in the background where none runs, and waits until every service is healthy.

    supervisor: the command that runs it.
    wait: seconds.

    Returns 0 when all are healthy, 1 with the reason when one cannot be or is not in time.
    """
    state = directory.read()
    if state is not None and state.alive():
        say("Hermes already runs.")
        return _await_health(directory, services, None, wait)
    if state is not None:
        end_orphans(state)
    directory.clear()
    directory.logs.mkdir(parents=True, exist_ok=True)
    with (directory.logs / "supervisor.log").open("w") as complaints:
        popen = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            supervisor,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            start_new_session=True,
        )
    say(f"Starting {' and '.join(service.name for service in services)} …")
    return _await_health(directory, services, popen, wait)


def _await_health(
    directory: RunDirectory, services: Sequence[Service], popen: subprocess.Popen[bytes] | None, wait: float
) -> int:
    missing, deadline = {service.name for service in services}, time.monotonic() + wait
    while time.monotonic() < deadline:
        gone = popen is None or popen.poll() is not None
        state = directory.read()
        if state is not None and state.alive():
            for service in state.services:
                if service.name in missing and _serves(service):
                    missing.remove(service.name)
                    say(f"  {service.name} is ready on {service.address}")
            if not missing:
                return 0
        elif gone:
            complain(_reason(directory, state))
            return 1
        time.sleep(_POLL_SECONDS)
    complain(
        f"The {' and the '.join(sorted(missing))} did not get ready within {wait:g} s. "
        "They go on starting: `make logs` shows how, `make down` stops them."
    )
    return 1


def _serves(service: Running) -> bool:
    ca = Path(service.tls_ca) if service.tls_ca else None
    return probe(service.health, service.address, ca, _PROBE_SECONDS).serving


def _reason(directory: RunDirectory, state: State | None) -> str:
    if state is not None and state.failure is not None:
        return state.failure
    try:
        complaints = (directory.logs / "supervisor.log").read_text().strip()
    except OSError:
        complaints = ""
    return complaints or "Hermes was stopped before it was ready."


def down(directory: RunDirectory, wait: float) -> int:
    """Stops both services and waits until they have ended; what they do may end first, within drain_seconds.

    wait: seconds, after which a supervisor that hangs is killed with its services.
    """
    state = directory.read()
    if state is None or not state.alive():
        orphans = state is not None and end_orphans(state)
        say("Hermes was not running" + (", but its services were; they are stopped." if orphans else "."))
        return 0
    say("Stopping Hermes: what runs may end first …")
    state.supervisor.signal(signal.SIGTERM)
    deadline = time.monotonic() + wait
    while state.alive():
        if time.monotonic() > deadline:
            state.supervisor.signal(signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    end_orphans(state)
    say("Stopped.")
    return 0


def logs(directory: RunDirectory, lines: int) -> int:
    """Prints the last lines of both services' log, and what follows until Ctrl-C or until they stop."""
    try:
        file = directory.log.open()
    except FileNotFoundError:
        complain("There is no log yet: `make up` starts Hermes.")
        return 1
    with file:
        for line in deque(file, maxlen=lines):
            say_log_line(line.rstrip("\n"))
        rest = ""
        while True:
            state = directory.read()
            alive = state is not None and state.alive()
            while piece := file.readline():
                rest += piece
                if rest.endswith("\n"):
                    say_log_line(rest.rstrip("\n"))
                    rest = ""
            if not alive:
                return 0
            time.sleep(_POLL_SECONDS)


def address(directory: RunDirectory) -> int:
    """Prints where the running assembler listens."""
    state = directory.read()
    if state is None or not state.alive():
        complain("Hermes is not running: `make up` starts it.")
        return 1
    say(next(service.address for service in state.services if service.name == "assembler"))
    return 0
