"""Spans of time as the contract has them."""

from typing import Final

from google.protobuf import duration_pb2

_NANOSECONDS: Final = 1_000_000_000  # in a second


def duration(seconds: float) -> duration_pb2.Duration:
    """To the nanosecond; not for what is below zero."""
    whole, nanoseconds = divmod(round(seconds * 1e9), _NANOSECONDS)
    return duration_pb2.Duration(seconds=whole, nanos=nanoseconds)
