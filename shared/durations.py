"""Spans of time as the contract has them."""

from google.protobuf import duration_pb2


def duration(seconds: float) -> duration_pb2.Duration:
    """To the nanosecond."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
