"""What an operator asks of the supervisor from outside: up, down, logs, environment, next."""

import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from hermes.client import DEFAULT_ADDRESS, DEFAULT_EXECUTOR
from hermes.health import probe
from shared.output import reader_has_gone
from shared.supervisor.output import complain, say, say_log_line
from shared.supervisor.rundir import (
    DEFAULT_RUN_DIRECTORY,
    RUN_DIRECTORY_VARIABLE,
    RunDirectory,
    Running,
    State,
    end_orphans,
)
from shared.supervisor.services import Service

_POLL_SECONDS: Final = 0.2
_PROBE_SECONDS: Final = 1.0


def up(directory: RunDirectory, services: Sequence[Service], supervisor: Sequence[str], wait: float) -> int:
    """Starts a supervisor in the background where none runs, and waits until every service is healthy.

    supervisor: the command that runs it.
    wait: seconds.

    Returns 0 when all are healthy, 1 with the reason when one cannot be or is not in time.
    """
    directory.prepare()
    state = directory.read()
    if state is not None and state.alive():
        say("Hermes already runs.")
        return _await_health(directory, services, None, wait)
    if state is not None:
        end_orphans(state)
    directory.clear()
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
        where = f"with its state in {directory.path}"
        say(f"Hermes was not running {where}" + (", but its services were; they are stopped." if orphans else "."))
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
    """Prints the last lines of both services' log, and what follows until Ctrl-C, or they stop, or nobody reads it."""
    directory.read()  # tells where the directory cannot be used at all
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
            if not alive or reader_has_gone():
                return 0
            time.sleep(_POLL_SECONDS)


def environment(directory: RunDirectory) -> int:
    """Prints, for a shell, the variables with which `hermes` finds what runs here."""
    running = _running(directory)
    if running is None:
        return 1
    variables = {
        "HERMES_ADDRESS": running.assembler.address,
        "HERMES_EXECUTOR_ADDRESS": running.executor.address,
        "HERMES_TLS_CA": running.assembler.tls_ca,
    }
    for name, value in variables.items():
        if value is not None:
            say(f"export {name}={shlex.quote(value)}")
    return 0


def next_steps(directory: RunDirectory) -> int:
    """Prints what to try now, with the addresses where they are not the usual ones."""
    running = _running(directory)
    if running is None:
        return 1
    program, here = Path(sys.executable).with_name("hermes"), Path.cwd()
    hermes = shlex.quote(str(program.relative_to(here) if program.is_relative_to(here) else program))
    trust = ["--tls-ca", running.assembler.tls_ca] if running.assembler.tls_ca else []
    assembler = ["--address", running.assembler.address] if running.assembler.address != DEFAULT_ADDRESS else []
    executor = ["--executor", running.executor.address] if running.executor.address != DEFAULT_EXECUTOR else []
    own = directory.path != Path(DEFAULT_RUN_DIRECTORY)
    make = f"{RUN_DIRECTORY_VARIABLE}={shlex.quote(str(directory.path))} make" if own else "make"
    steps: tuple[tuple[str, list[str], str], ...] = (
        (f"{hermes} chat", [*assembler, *trust], "a conversation; see how much of each prompt is cached"),
        (f'{hermes} assemble "Hello"', [*assembler, *trust], "the token ids and the text that the model reads"),
        (f"{hermes} cache tree", [*executor, *trust], "what the prefix tree holds"),
        (f"{make} logs", [], "what both services say; make down stops them"),
    )
    commands = [f"{command} {shlex.join(options)}".rstrip() for command, options, _ in steps]
    width = max(map(len, commands))
    say("Next:")
    for command, (_, _, what) in zip(commands, steps, strict=True):
        say(f"  {command:{width}}   {what}")
    return 0


class _Pair(NamedTuple):
    assembler: Running
    executor: Running


def _running(directory: RunDirectory) -> _Pair | None:
    state = directory.read()
    if state is None or not state.alive():
        complain("Hermes is not running: `make up` starts it.")
        return None
    services = {service.name: service for service in state.services}
    return _Pair(services["assembler"], services["executor"])
