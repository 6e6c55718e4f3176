"""Channels to a service, as callers open them."""

import json
import ssl
from pathlib import Path
from typing import Final

import grpc

from hermes.arguments import bad_argument
from shared.addresses import check_target
from shared.errors import HermesError

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
    """A channel to `host:port` (or any gRPC target), encrypted when a CA file is given. Nothing is connected yet.

    Raises HermesError (BAD_ARGUMENT) for an address or a file that can be none.
    """
    _check(address)
    if tls_ca is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, _credentials(tls_ca), options=_OPTIONS)


def open_aio_channel(address: str, tls_ca: Path | None) -> grpc.aio.Channel:
    """As open_channel, for the running event loop."""
    _check(address)
    if tls_ca is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, _credentials(tls_ca), options=_OPTIONS)


def unreachable(error: HermesError, service: str, address: str) -> HermesError:
    """The same error, in our words where only the connection failed and gRPC alone had something to say."""
    if error.code is grpc.StatusCode.UNAVAILABLE and error.reason == grpc.StatusCode.UNAVAILABLE.name:
        message = f"No {service} can be reached at {address} ({_guess(error.message.lower())})."
        return HermesError(error.code, f"{service.upper()}_UNREACHABLE", message, metadata={"address": address})
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and error.reason == grpc.StatusCode.DEADLINE_EXCEEDED.name:
        message = f"The {service} at {address} did not answer in time; give the call a longer timeout."
        return HermesError(error.code, error.reason, message, metadata={"address": address})
    return error


def _guess(said: str) -> str:
    """What is likely wrong, from gRPC's own words for it."""
    if "certificate_verify_failed" in said or "hostname verification" in said:
        return "it speaks TLS, with a certificate for another name, or one that the CA file does not trust"
    if "tls handshake" in said or "ssl" in said:
        return "it does not speak TLS: leave out --tls-ca, tls_ca in Python"
    if "domain name" in said or "lookup" in said or "dns" in said:
        return "its name is not known here: is it spelled right?"
    if "unreachable" in said:
        return "there is no way to that network from here"
    if "socket closed" in said or "http/2" in said or "reset" in said:
        return "what listens there speaks something else; where it is TLS, give --tls-ca, tls_ca in Python"
    return "is it started? `make up` starts one"


def _check(address: str) -> None:
    try:
        check_target(address)
    except ValueError as error:
        raise bad_argument("address", f"{address!r} cannot be used: {error}") from None


def _credentials(tls_ca: Path) -> grpc.ChannelCredentials:
    try:
        # gRPC itself would only fail to connect later, whatever the file holds.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls_ca)
        return grpc.ssl_channel_credentials(root_certificates=tls_ca.read_bytes())
    except ssl.SSLError as error:
        raise bad_argument("tls_ca", f"{tls_ca} holds no PEM certificate") from error
    except OSError as error:
        raise bad_argument("tls_ca", f"{tls_ca} cannot be read: {error.strerror}") from error
