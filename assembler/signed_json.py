"""JSON that still tells where its strings are from, for renders in which texts are signed; in others it is plain text.

A text is signed where each of its characters has a mark of its origin in place of `assembler.traced`'s 1.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from assembler.traced import own_of, plain, traced

# The lowest sign. Below it are the marks of all renders: 0 for what has no sign, 1 for what the template wrote.
FIRST: Final = 2
_TEMPLATES: Final = 1

_signing: Final[ContextVar[bool]] = ContextVar("signing", default=False)


@contextmanager
def signing() -> Iterator[None]:
    """Inside, JSON keeps the signs of what it is made of."""
    token = _signing.set(True)
    try:
        yield
    finally:
        _signing.reset(token)


def told(value: Any, text: str, *, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    """A value's JSON text, with the signs of the strings in it where texts are signed.

    What stands between strings of one sign has that sign, and so have a string's numbers after it; else it is the
    template's. Where all the signs are one and the template has no part, the whole text has it.
    """
    if not _signing.get():
        return text
    strings = list(_strings(value, sort_keys))
    signs = {sign for each in strings for sign in own_of(each)}
    callers = [sign for sign in signs if sign >= FIRST]
    if not callers:
        return text
    if len(callers) == 1 and _TEMPLATES not in signs:
        return traced(text, bytes(callers) * len(text))
    return traced(text, _marks(text, strings, ensure_ascii))


def _marks(text: str, strings: list[str], ensure_ascii: bool) -> bytes:
    own = bytearray()
    last = _TEMPLATES
    for each in strings:
        start = text.index('"', len(own))
        sign = max(own_of(each), default=_TEMPLATES) or _TEMPLATES
        own += _between(text[len(own) : start], last, sign)
        own += bytes([sign]) * len(json.dumps(plain(each), ensure_ascii=ensure_ascii))
        last = sign
    return bytes(own + _between(text[len(own) :], last, _TEMPLATES))


def _between(text: str, before: int, after: int) -> bytes:
    """Marks of what stands between two strings: punctuation, and numbers, which belong to what is before them."""
    if before == after:
        return bytes([before]) * len(text)
    value = next((place for place in range(len(text), 0, -1) if text[place - 1].isalnum()), 0)
    return bytes([before]) * value + bytes([_TEMPLATES]) * (len(text) - value)


def _strings(value: Any, sort_keys: bool) -> Iterator[str]:
    """All strings in the order in which they stand in the JSON, keys that are none in their form as strings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in sorted(value.items()) if sort_keys else value.items():
            yield key if isinstance(key, str) else json.dumps(key)
            yield from _strings(each, sort_keys)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each, sort_keys)
