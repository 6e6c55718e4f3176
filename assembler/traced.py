"""Text that knows which of its characters the chat template wrote, whatever the template makes of it.

The template's own texts are marked, and a caller's are not. What a text becomes in a way that is not followed here is
plain, so that nothing is ever taken for the template's that is not.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final, SupportsIndex

import markupsafe

_new: Final = str.__new__


class Traced(str):
    """A text like any other; `own_of` tells its characters apart. Made of a text alone, none of them is marked."""

    __slots__ = ("_own",)
    _own: bytes

    def __new__(cls, text: object = "") -> "Traced":
        return traced(str(text), bytes(len(str(text))))

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        if other.__class__ is not str and other.__class__ is not Traced:
            return NotImplemented  # markup escapes what it is added to
        return traced(str.__add__(self, other), self._own + own_of(other))

    def __radd__(self, other: Any) -> Any:
        if other.__class__ is not str:
            return NotImplemented
        return traced(str.__add__(other, self), own_of(other) + self._own)

    def __mul__(self, times: SupportsIndex) -> str:
        return traced(str.__mul__(self, times), self._own * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return filled(self, "%s", values if isinstance(values, tuple) else (values,), str.__mod__(self, values))

    def __getitem__(self, place: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, place)
        return traced(text, self._own[place] if isinstance(place, slice) else self._own[place : int(place) + 1 or None])

    def strip(self, characters: str | None = None, /) -> str:
        text = str.lstrip(self, characters)
        return self._from(len(self) - len(text), str.rstrip(text, characters), characters)

    def lstrip(self, characters: str | None = None, /) -> str:
        text = str.lstrip(self, characters)
        return self._from(len(self) - len(text), text, characters)

    def rstrip(self, characters: str | None = None, /) -> str:
        return self._from(0, str.rstrip(self, characters), characters)

    def removeprefix(self, prefix: str, /) -> str:
        text = str.removeprefix(self, prefix)
        return self._from(len(self) - len(text), text, prefix)

    def removesuffix(self, suffix: str, /) -> str:
        return self._from(0, str.removesuffix(self, suffix), suffix)

    def partition(self, separator: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._in_a_row(str.partition(self, separator), separator)
        return head, middle, tail

    def rpartition(self, separator: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._in_a_row(str.rpartition(self, separator), separator)
        return head, middle, tail

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._apart(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._apart(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lengths = map(len, str.splitlines(self, keepends))
        whole = self._in_a_row(str.splitlines(self, True))
        return [line[:length] for line, length in zip(whole, lengths, strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        text = str.replace(self, old, new, count)
        if not old or not _is_own(old):
            return text
        own, start = [], 0
        for part in str.split(self, old, count):
            own.append(self._own[start : start + len(part)])
            start += len(part) + len(old)
        return traced(text, own_of(new).join(own))

    def join(self, texts: Iterable[str], /) -> str:
        parts = list(texts)
        return traced(str.join(self, parts), self._own.join(map(own_of, parts)))

    def upper(self) -> str:
        return self._changed(str.upper(self))

    def lower(self) -> str:
        return self._changed(str.lower(self))

    def capitalize(self) -> str:
        return self._changed(str.capitalize(self))

    def title(self) -> str:
        return self._changed(str.title(self))

    def _from(self, start: int, text: str, searched: str | None = None) -> str:
        """A part. searched: what it was cut at; where a caller names that, the rest counts as the caller's too."""
        return traced(text, self._own[start : start + len(text)]) if _is_own(searched) else text

    def _in_a_row(self, parts: Iterable[str], searched: str | None = None) -> list[str]:
        """Parts that make up the text with nothing between them."""
        found, start = [], 0
        for part in parts:
            found.append(self._from(start, part, searched))
            start += len(part)
        return found

    def _apart(self, parts: Iterable[str], separator: str | None) -> list[str]:
        """Parts that have the separator between them, or white space."""
        found, start = [], 0
        for part in parts:
            if separator is None:
                start = self.index(part, start)
            found.append(self._from(start, part, separator))
            start += len(part) + len(separator or "")
        return found

    def _changed(self, text: str) -> str:
        """The text in another case. Letters only ever become more, so as many of them are the same ones."""
        return traced(text, self._own) if len(text) == len(self) else text


class TracedMarkup(markupsafe.Markup):
    """Markup, which `{{ text | safe }}` makes and which escapes what is added to it; marked like `Traced`."""

    __slots__ = ("_own",)
    _own: bytes


_TEXTS: Final = frozenset({str, Traced})


def traced(text: str, own: bytes) -> Traced:
    """The text, a byte for each character: 1 where the template wrote it, 0 elsewhere."""
    made = _new(Traced, text)
    made._own = own
    return made


def written(text: str) -> Traced:
    """A text of the template's own."""
    return traced(text, b"\1" * len(text))


def own_of(text: str) -> bytes:
    """A byte for each character: 1 where the template wrote it, 0 elsewhere."""
    if text.__class__ is Traced:
        return text._own
    return getattr(text, "_own", None) or bytes(len(text))


def _is_own(text: str | None) -> bool:
    """Whether a caller has no part in an argument."""
    return text is None or 0 not in own_of(text)


def joined(parts: Sequence[str]) -> Traced:
    """The parts as one text."""
    own = [part._own if part.__class__ is Traced else own_of(part) for part in parts]
    return traced("".join(parts), b"".join(own))


def added(terms: Sequence[Any]) -> Any:
    """`a + b + c`, texts or not."""
    if not _TEXTS.issuperset(map(type, terms)):
        return _escaped(terms, functools.reduce(operator.add, terms))
    return joined(terms)


def _escaped(terms: Sequence[Any], value: Any) -> Any:
    """What became of terms of which some are no texts; where one of them is markup, all are escaped."""
    if value.__class__ is not markupsafe.Markup:
        return value
    parts = [(markupsafe.escape(term), term) for term in terms]
    made = TracedMarkup("".join(part for part, _ in parts))
    made._own = b"".join(own_of(term) if part == term else bytes(len(part)) for part, term in parts)
    return made if made == value else value


def plain(text: str) -> str:
    """The text without its marks."""
    return str.__str__(text)


def blanked(text: str) -> str:
    """The text with an x for each letter that the template did not write."""
    return "".join(
        letter if own or letter.isspace() else "x" for letter, own in zip(plain(text), own_of(text), strict=True)
    )


def filled(pattern: str, hole: str, values: tuple[Any, ...], text: str) -> str:
    """What became of a pattern with values for its holes, where there is nothing but holes in it."""
    own = pattern.split(written(hole))
    if len(own) != len(values) + 1:
        return text
    parts = [own[0], *(part for value, after in zip(values, own[1:], strict=True) for part in (str(value), after))]
    result = joined(parts)
    return result if result == text else text
