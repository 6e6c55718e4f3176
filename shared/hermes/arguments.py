"""What a caller hands over, checked before anything is sent: a value that cannot travel is named."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from shared.errors import HermesError, invalid_argument

BAD_ARGUMENT: Final = "BAD_ARGUMENT"
"""The reason of what was refused here, before a call; the field stands in the error's metadata."""

_FOREVER: Final = 10 * 365 * 24 * 3600.0  # seconds; gRPC counts a deadline in 64 bits of nanoseconds

M = TypeVar("M", bound=Message)


def bad_argument(field: str, why: str) -> HermesError:
    """The error for a field that cannot be used; `why` goes on from its name."""
    return invalid_argument(BAD_ARGUMENT, f"{field} {why}.", field=field)


def build(make: Callable[..., M], names: Mapping[str, str] | None = None, **fields: Any) -> M:
    """The message with these fields.

    names: what callers call a field, where that is not its name in the contract.

    Raises HermesError (BAD_ARGUMENT), which names the field, for a value that protobuf refuses.
    """
    try:
        return make(**fields)
    except _REFUSALS:
        for field, value in fields.items():
            try:
                make(**{field: value})
            except _REFUSALS as error:
                raise bad_argument((names or {}).get(field, field), _why(value, error)) from error
        raise


def seconds(timeout: float | None) -> float | None:
    """A timeout as gRPC takes it; None, and what is longer than anybody waits, is no limit.

    Raises HermesError (BAD_ARGUMENT) for what is no time above 0.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout) or timeout <= 0:
        raise bad_argument("timeout", f"cannot be {timeout!r}: give seconds above 0, or None for no limit")
    return timeout if timeout < _FOREVER else None


_REFUSALS: Final = (TypeError, ValueError, OverflowError, AttributeError)  # protobuf raises all of them


_HUGE: Final = 1e300  # Python refuses to write longer integers


def _why(value: object, error: Exception) -> str:
    # A text is never quoted: it may be a prompt.
    match value, error:
        case _, UnicodeError():
            return "is not valid Unicode: it has lone surrogates, as undecodable bytes become"
        case int() | float(), ValueError() | OverflowError():
            return f"cannot be {float(value):.20g}: that is out of range" if abs(value) < _HUGE else "is out of range"
        case int() | float() | str(), _:
            return f"cannot be of type {type(value).__name__}"
        case _:
            return "has a value of a wrong type or out of range"
