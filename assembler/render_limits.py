"""Limits on a render: how long it may take, and how large a text, a list or a number in it may grow.

A thread cannot be stopped from outside, so everything that can go on for long asks the clock itself: each turn of a
loop, each call. Everything that makes a big value out of small ones is asked for its size first.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import jinja2

# Widths, counts and indents in templates are layout; a bigger one makes megabytes of padding.
_MOST_PADDING: Final = 10_000
# Elements of a list that a template makes by multiplying or adding lists.
_MOST_ELEMENTS: Final = 100_000
# No render's limit is below this.
SHORT: Final = 500_000
_MOST_BITS: Final = 4_096
_FORMAT_WIDTH: Final = re.compile(r"\d{5}|\*")
_WIDTH_ARGUMENT: Final = re.compile(r"\{[^{}:]*:[^{}]*\{")
_QUICK: Final = frozenset({"ascii", "latin-1", "utf-8", "utf8"})
# What comes of fewer is measured when it is there.
_FEW_HOLES: Final = 8
# Where the padding's size is an argument.
_PADDING_METHODS: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class LimitExceededError(jinja2.TemplateError):
    """A render took too long or grew too large. limit: "seconds" or "characters"."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Run:
    """One render: when it has to be over (monotonic seconds), how long any text may get, and what time it is."""

    deadline: float
    characters: int
    now: datetime


_UNLIMITED: Final = Run(float("inf"), 2**62, datetime(1, 1, 1))  # noqa: DTZ001 - of no place
_run: Final[ContextVar[Run]] = ContextVar("run", default=_UNLIMITED)


@contextmanager
def limited(run: Run) -> Iterator[None]:
    """What is rendered inside keeps to the run's limits, or raises LimitExceededError."""
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def now() -> datetime:
    """The time that the running render has."""
    return _run.get().now


def check_time() -> None:
    if time.monotonic() > _run.get().deadline:
        raise LimitExceededError("seconds", "it takes too long")


def check_size(characters: int) -> None:
    if characters > _run.get().characters:
        raise LimitExceededError("characters", "it grows too large")


def check_text(value: Any) -> None:
    """Before a value is made a text: lists in it may share what is in them."""
    check_size(measured(value, {}))


def most_characters() -> int:
    """How long a text may be in the running render."""
    return _run.get().characters


def checked(value: Any) -> Any:
    """The value, where it is not too large."""
    if isinstance(value, str):
        check_size(len(value))
    elif isinstance(value, list | tuple) and len(value) > _MOST_ELEMENTS:
        raise LimitExceededError("characters", "a list in it grows too large")
    return value


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Before `left * right`, `left ** right` or `left % right`."""
    if operator == "%":
        if isinstance(left, str):
            check_pattern(left, "%", right)
        return
    for value, count in ((left, right), (right, left)):
        if not isinstance(count, int):
            continue
        if isinstance(value, str):
            check_size(len(value) * count)
        elif isinstance(value, list | tuple) and len(value) * count > _MOST_ELEMENTS:
            raise LimitExceededError("characters", "a list in it grows too large")
        elif isinstance(value, int):
            bits = value.bit_length() * max(count, 1) if operator == "**" else value.bit_length() + count.bit_length()
            if bits > _MOST_BITS:
                raise LimitExceededError("characters", "a number in it grows too large")
            return


def check_pattern(pattern: str, hole: str, values: Any) -> None:
    """Before values fill the holes of a pattern, each of which begins with `hole`."""
    if _FORMAT_WIDTH.search(pattern):
        raise LimitExceededError("characters", "it formats with too wide a field")
    if _WIDTH_ARGUMENT.search(pattern):
        check_padding(values if isinstance(values, list | tuple) else ())
    holes = pattern.count(hole)
    check_size(len(pattern) + (holes if holes > _FEW_HOLES else 1) * measured(values, {}))


def check_padding(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and value > _MOST_PADDING for value in values):
        raise LimitExceededError("characters", "it pads or indents too far")


def check_method(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a method of a text that can make a much longer one."""
    if name in _PADDING_METHODS:
        check_padding((*args, *kwargs.values()))
        if name == "expandtabs":
            widths = (each for each in (*args, *kwargs.values()) if isinstance(each, int))
            check_size(len(text) + text.count("\t") * max(widths, default=8))
    elif name == "replace" and len(args) > 1:
        check_replacement(text, *args[:2])
    elif name == "join" and args and isinstance(args[0], list | tuple):
        check_size(sum(len(part) + len(text) for part in args[0] if isinstance(part, str)))
    elif name == "translate" and args:
        check_size(len(text) * measured(args[0], {}))
    elif name == "encode" and any(isinstance(each, str) and each not in _QUICK for each in (*args, *kwargs.values())):
        check_slow(text)


def check_slow(text: Any) -> None:
    """Before what takes a time that grows with the square of a text's length: numbers, some encodings."""
    if isinstance(text, str) and len(text) > _MOST_PADDING:
        raise LimitExceededError("characters", "it works too long on one text")


def check_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        check_size(len(text) + text.count(old) * (len(new) - len(old)))


def measured(value: Any, sizes: dict[int, int]) -> int:
    """About how many characters a value has as a text. sizes: by id, of lists and mappings, which places can share."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        parts: Iterable[Any] = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = 2 + sum(measured(part, sizes) for part in parts)
    return sizes[id(value)]
