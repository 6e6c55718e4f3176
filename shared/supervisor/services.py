"""What the supervisor starts: each service's command, and how to tell that it is ready."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from hermes.health import EXECUTOR, GENERATE
from shared.config import load
from shared.errors import StartupError
from shared.settings import AssemblerSettings, ExecutorSettings

_ANYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to reach what listens there


class Service(NamedTuple):
    """How to start a service, and how to tell that it is ready."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    host: str
    port: int
    health: str
    tls_ca: str | None
    drain_seconds: float
    metrics_port: int | None = None

    @property
    def listens(self) -> list[tuple[str, int]]:
        """Each setting of a port, and the port."""
        ports = [("port", self.port)]
        return [*ports, ("metrics_port", self.metrics_port)] if self.metrics_port else ports

    @property
    def address(self) -> str:
        """Where callers on this machine reach it."""
        host = _ANYWHERE.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def services_of(assembler_arguments: Sequence[str] = (), executor_arguments: Sequence[str] = ()) -> list[Service]:
    """Both services as flags, environment and hermes.toml set them, in the order in which they start.

    Raises StartupError for a setting that cannot be.
    """
    executor_settings = load(ExecutorSettings, list(executor_arguments))
    executor = _service("executor", executor_settings, executor_arguments, EXECUTOR)
    assembler_settings = load(AssemblerSettings, list(assembler_arguments))
    assembler = _service("assembler", assembler_settings, assembler_arguments, GENERATE)
    if "executor" not in assembler_settings.model_fields_set:
        assembler = assembler._replace(
            environment={**assembler.environment, "HERMES_ASSEMBLER_EXECUTOR": executor.address}
        )
    for (own, port), (setting, taken) in itertools.product(assembler.listens, executor.listens):
        if port == taken:
            raise StartupError(f"The assembler's {own} and the executor's {setting} are both {port}: set another one.")
    return [executor, assembler]


def _service(
    name: str, settings: AssemblerSettings | ExecutorSettings, arguments: Sequence[str], health: str
) -> Service:
    if settings.port == 0:
        raise StartupError(f"The {name} cannot have port 0 here: callers would not find it. Set another.")
    return Service(
        name=name,
        command=[sys.executable, "-m", name, *arguments],
        environment={"PYTHONUNBUFFERED": "1"},
        host=settings.host,
        port=settings.port,
        health=health,
        tls_ca=str(settings.tls_cert) if settings.tls_cert else None,
        drain_seconds=settings.drain_seconds,
        metrics_port=settings.metrics_port,
    )
