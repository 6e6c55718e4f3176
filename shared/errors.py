"""What can go wrong, as the caller reads it: HermesError and its google.rpc.Status with one ErrorInfo."""

import math
from collections.abc import Mapping
from typing import Final, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN: Final = "hermes"

# A status travels in the trailers, once percent-encoded and once in base64. gRPC drops calls whose metadata is over
# 8 KiB, so what a caller sent and an error quotes must not be able to fill them.
_MESSAGE_BYTES: Final = 1024
_METADATA_VALUE_BYTES: Final = 256
_METADATA_ENTRIES: Final = 8


class HermesError(Exception):
    """A failure that the caller is told about.

    code: the gRPC status.
    reason: stable upper-case name for programs, such as PROMPT_TOO_LONG.
    message: for people: what was wrong, where, what to do. Never prompt text, never a traceback.
    metadata: the facts of the message for programs.
    retry_after: seconds after which the same call may succeed, where that is known.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.retry_after = retry_after

    def __repr__(self) -> str:
        return f"HermesError({self.code.name}, {self.reason}, {self.message!r})"

    def status(self) -> status_pb2.Status:
        """The error as it goes on the wire: one ErrorInfo, and a RetryInfo where retry_after is set."""
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)
        for key, value in list(self.metadata.items())[:_METADATA_ENTRIES]:
            info.metadata[key] = _clipped(value, _METADATA_VALUE_BYTES)
        status = status_pb2.Status(
            code=code_pb2.Code.Value(self.code.name), message=_clipped(self.message, _MESSAGE_BYTES)
        )
        status.details.add().Pack(info)
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(math.ceil(self.retry_after * 1000))
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        return status


class StartupError(Exception):
    """A service cannot start. Its text is one sentence that says what to do; the process prints it and exits with 2."""


def invalid_argument(reason: str, message: str, **metadata: str) -> HermesError:
    """The request is wrong, whatever state the server is in: the caller has to change it."""
    return HermesError(grpc.StatusCode.INVALID_ARGUMENT, reason, message, metadata=metadata)


def failed_precondition(reason: str, message: str, **metadata: str) -> HermesError:
    """The request does not fit the server as it is set up: an operator has to change something."""
    return HermesError(grpc.StatusCode.FAILED_PRECONDITION, reason, message, metadata=metadata)


def not_found(reason: str, message: str, **metadata: str) -> HermesError:
    """What the request names is not there, or no longer."""
    return HermesError(grpc.StatusCode.NOT_FOUND, reason, message, metadata=metadata)


def resource_exhausted(reason: str, message: str, *, retry_after: float, **metadata: str) -> HermesError:
    """There is too much load; the same call may succeed after retry_after seconds."""
    return HermesError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, metadata=metadata, retry_after=retry_after)


def unavailable(reason: str, message: str, **metadata: str) -> HermesError:
    """The server, or one that it needs, cannot be reached; another replica may answer."""
    return HermesError(grpc.StatusCode.UNAVAILABLE, reason, message, metadata=metadata)


def unimplemented(reason: str, message: str, **metadata: str) -> HermesError:
    """This server cannot do what was asked for."""
    return HermesError(grpc.StatusCode.UNIMPLEMENTED, reason, message, metadata=metadata)


def deadline_exceeded(reason: str, message: str, **metadata: str) -> HermesError:
    """The time for the call, or for a part of it, is over."""
    return HermesError(grpc.StatusCode.DEADLINE_EXCEEDED, reason, message, metadata=metadata)


def internal(reason: str, message: str, **metadata: str) -> HermesError:
    """The server is at fault."""
    return HermesError(grpc.StatusCode.INTERNAL, reason, message, metadata=metadata)


def from_rpc_error(error: grpc.RpcError) -> HermesError:
    """The error as the other side said it, from a failed sync or asyncio call.

    Where the other side is not Hermes, or the connection broke, the reason is the status code's name.
    """
    code, message = error.code(), error.details() or ""
    info, retry_after = error_details_pb2.ErrorInfo(), None
    for detail in _details(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after = retry.retry_delay.ToMilliseconds() / 1000
    return HermesError(code, info.reason or code.name, message, metadata=info.metadata, retry_after=retry_after)


def _details(error: grpc.RpcError) -> list[any_pb2.Any]:
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))
    except ValueError:  # a proxy on the way changed code or message, so the details are not about this status
        return []
    return list(status.details) if status is not None else []


def _clipped(text: str, limit: int) -> str:
    data = text.encode()
    return text if len(data) <= limit else data[: limit - len("…".encode())].decode(errors="ignore") + "…"
