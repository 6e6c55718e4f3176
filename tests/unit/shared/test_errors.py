"""What an error looks like on the wire, and what comes back out of it."""

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared import errors
from shared.errors import HermesError


class FailedCall(grpc.RpcError):
    """A failed call as a client sees it."""

    def __init__(self, status: Any) -> None:
        super().__init__()
        self.status = status

    def code(self) -> grpc.StatusCode:
        return self.status.code

    def details(self) -> str:
        return self.status.details

    def trailing_metadata(self) -> Any:
        return self.status.trailing_metadata


def received(error: HermesError) -> HermesError:
    return errors.from_rpc_error(FailedCall(rpc_status.to_status(error.status())))


def infos(status: status_pb2.Status) -> list[error_details_pb2.ErrorInfo]:
    found = []
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            found.append(info)
    return found


def test_a_status_has_one_error_info_of_the_hermes_domain() -> None:
    status = errors.invalid_argument("PROMPT_TOO_LONG", "Too long: 9 of 8 tokens.", tokens="9", limit="8").status()
    assert (status.code, status.message, len(status.details)) == (3, "Too long: 9 of 8 tokens.", 1)
    (info,) = infos(status)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "PROMPT_TOO_LONG",
        "hermes",
        {"tokens": "9", "limit": "8"},
    )


def test_retry_after_travels_as_retry_info() -> None:
    error = errors.resource_exhausted("QUEUE_FULL", "Full.", retry_after=1.5, waiting="256")
    assert len(infos(error.status())) == 1
    retry = error_details_pb2.RetryInfo()
    assert error.status().details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize(
    "error",
    [
        errors.invalid_argument("A", "a", field="x"),
        errors.failed_precondition("B", "b"),
        errors.resource_exhausted("C", "c", retry_after=0.25),
        errors.unavailable("D", "d"),
        errors.unimplemented("E", "e", field="n"),
        errors.deadline_exceeded("F", "f"),
        errors.internal("G", "Größe 大きさ 🙂"),
    ],
    ids=lambda error: error.code.name,
)
def test_an_error_comes_back_as_it_was_sent(error: HermesError) -> None:
    other = received(error)
    assert (other.code, other.reason, other.message, other.metadata, other.retry_after) == (
        error.code,
        error.reason,
        error.message,
        error.metadata,
        error.retry_after,
    )


def test_an_error_without_details_is_named_after_its_code() -> None:
    status = rpc_status.to_status(status_pb2.Status(code=14, message="failed to connect"))
    error = errors.from_rpc_error(FailedCall(status._replace(trailing_metadata=None)))
    assert (error.code, error.reason, error.message) == (
        grpc.StatusCode.UNAVAILABLE,
        "UNAVAILABLE",
        "failed to connect",
    )


def test_details_that_contradict_the_status_are_not_believed() -> None:
    status = rpc_status.to_status(errors.internal("SECRET", "one").status())
    error = errors.from_rpc_error(FailedCall(status._replace(details="another")))
    assert (error.reason, error.message) == ("INTERNAL", "another")


def test_what_an_error_quotes_cannot_outgrow_the_trailers() -> None:
    error = errors.invalid_argument("UNKNOWN_ROLE", "角" * 5000, **{f"key{n}": "色" * 5000 for n in range(50)})
    status = error.status()
    assert status.message.endswith("角…")
    assert len(status.message.encode()) <= 1024
    assert status.ByteSize() < 4096
