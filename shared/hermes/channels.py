"""Channels to a service, as callers open them."""

import json
from pathlib import Path
from typing import Final

import grpc

from shared.errors import HermesError, invalid_argument

_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024  # as the services' own `max_message_bytes`

# Only calls that the server did not begin to answer are tried again; gRPC sees to that.
_RETRIES: Final = {
    "methodConfig": [
        {
            "name": [{"service": "hermes.v1.Assembler"}, {"service": "hermes.v1.Executor", "method": "GetModelInfo"}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

_OPTIONS: Final[list[tuple[str, str | int]]] = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # a load balancer or a dead peer is noticed in the middle of a long answer too
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.service_config", json.dumps(_RETRIES)),
]


def open_channel(address: str, tls_ca: Path | None) -> grpc.Channel:
    """A channel to `host:port` (or any gRPC target), encrypted when a CA file is given. Nothing is connected yet."""
    if tls_ca is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, _credentials(tls_ca), options=_OPTIONS)


def open_aio_channel(address: str, tls_ca: Path | None) -> grpc.aio.Channel:
    """As open_channel, for the running event loop."""
    if tls_ca is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, _credentials(tls_ca), options=_OPTIONS)


def unreachable(error: HermesError, service: str, address: str) -> HermesError:
    """The same error, in our words where only the connection failed and gRPC alone had something to say."""
    if error.code is grpc.StatusCode.UNAVAILABLE and error.reason == grpc.StatusCode.UNAVAILABLE.name:
        message = f"No {service} can be reached at {address} (is it started? `make up` starts one)."
        return HermesError(error.code, f"{service.upper()}_UNREACHABLE", message, metadata={"address": address})
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and error.reason == grpc.StatusCode.DEADLINE_EXCEEDED.name:
        message = f"The {service} at {address} did not answer in time; give the call a longer timeout."
        return HermesError(error.code, error.reason, message, metadata={"address": address})
    return error


def _credentials(tls_ca: Path) -> grpc.ChannelCredentials:
    try:
        return grpc.ssl_channel_credentials(root_certificates=tls_ca.read_bytes())
    except OSError as error:
        raise invalid_argument("BAD_TLS_CA", f"The CA file {tls_ca} cannot be read: {error.strerror}.") from error
