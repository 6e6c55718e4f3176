"""Which of the services are ready to work: gRPC health under the names that they report."""

from pathlib import Path
from typing import Final, Literal, NamedTuple

import grpc
from grpc_health.v1 import health_pb2

from hermes.channels import open_channel

ASSEMBLER: Final = "hermes.v1.Assembler"
GENERATE: Final = "hermes.v1.Assembler.Generate"
"""Serving when the assembler works and an executor that fits it is reachable."""
EXECUTOR: Final = "hermes.v1.Executor"

PROBE_SECONDS: Final = 2.0

_CHECK: Final = "/grpc.health.v1.Health/Check"  # called by name, since the package's own stub class has no types

State = Literal["serving", "not serving", "unknown", "unreachable"]


class ServiceHealth(NamedTuple):
    """What one service said of itself."""

    service: str
    address: str
    state: State

    @property
    def serving(self) -> bool:
        """Whether the service takes work."""
        return self.state == "serving"


def probe(service: str, address: str, tls_ca: Path | None = None, timeout: float = PROBE_SECONDS) -> ServiceHealth:
    """Asks once, for at most `timeout` seconds. A service that cannot be asked is `unreachable`.

    Raises HermesError (BAD_ARGUMENT) only for an address or a CA file that can be none.
    """
    with open_channel(address, tls_ca) as channel:
        return probe_on(channel, service, address, timeout)


def probe_on(channel: grpc.Channel, service: str, address: str, timeout: float = PROBE_SECONDS) -> ServiceHealth:
    """As probe, over a channel that is open."""
    check: grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    check = channel.unary_unary(_CHECK, _serialize, health_pb2.HealthCheckResponse.FromString)
    try:
        response = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
    except grpc.RpcError as error:
        return ServiceHealth(service, address, _state_of_error(error))
    return ServiceHealth(service, address, _state(response))


async def probe_on_aio(channel: grpc.aio.Channel, service: str, address: str) -> ServiceHealth:
    """As probe_on, for asyncio."""
    check: grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    check = channel.unary_unary(_CHECK, _serialize, health_pb2.HealthCheckResponse.FromString)
    try:
        response = await check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_SECONDS)
    except grpc.RpcError as error:
        return ServiceHealth(service, address, _state_of_error(error))
    return ServiceHealth(service, address, _state(response))


def _serialize(request: health_pb2.HealthCheckRequest) -> bytes:
    return request.SerializeToString()


def _state(response: health_pb2.HealthCheckResponse) -> State:
    return "serving" if response.status == health_pb2.HealthCheckResponse.SERVING else "not serving"


def _state_of_error(error: grpc.RpcError) -> State:
    known = error.code() in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED}
    return "unknown" if known else "unreachable"
