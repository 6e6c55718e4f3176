"""What a span of a text looks like: a date, a time, a UUID, an id, a number; else it is text."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple


class Kind(Enum):
    """What a span looks like, as a sentence names it."""

    DATE_TIME = "a date and time"
    DATE = "a date"
    WEEKDAY = "a day of the week"
    TIME = "a time"
    HOUR = "a time of day"
    UUID = "a UUID"
    HEX = "a hexadecimal id"
    RANDOM = "a random token"
    LONG_NUMBER = "a long number, such as a timestamp or an id"
    VERSION = "an address or a version"
    NUMBER = "a number, such as a counter"
    TEXT = "a name or other text"


class Look(NamedTuple):
    """A span of a text, from `start` to before `end`."""

    kind: Kind
    start: int
    end: int


_DAYS: Final = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTHS: Final = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY: Final = r"[0-3]?\d(?:st|nd|rd|th|\.)?"
_YEAR: Final = r"(?:19|20)\d\d"
# Between a day and a year whatever word there is names a month, in most languages: `1. Dezember`, `12 de mayo de`.
_MONTH: Final = r"(?:de )?[A-Za-z\u00c0-\u024f\u0400-\u04ff]{3,12}\.?(?: de)?"
_WEEKDAY: Final = rf"{_DAYS}|(?:星期|周)[一二三四五六日天]"
# Of two digits a year is told from a version only where the day and the month have two as well.
_DATE: Final = (
    rf"{_YEAR}(?P<mark>[-/.])[01]?\d(?P=mark)[0-3]?\d"
    rf"|[0-3]?\d(?P<other>[-/.])[0-3]?\d(?P=other){_YEAR}"
    r"|(?:[0-3]?\d[-/][0-3]?\d[-/]|[0-3]\d\.[01]\d\.)\d\d(?!\.\d)"
    rf"|{_YEAR}\s?[年년]\s?[01]?\d\s?[月월](?:\s?[0-3]?\d\s?[日号일])?|[01]?\d\s?[月월]\s?[0-3]?\d\s?[日号일]"
    rf"|(?:{_DAYS},?\s)?{_DAY}[\s/-](?:of\s)?{_MONTHS}(?:,?[\s/-]{_YEAR})?"
    rf"|(?:{_DAYS},?\s)?{_MONTHS}\s{{1,2}}{_DAY}(?:,?\s{_YEAR})?"
    rf"|{_DAY} {_MONTH} {_YEAR}(?![-/.:]\d)"
    rf"|{_MONTHS}\s{_YEAR}"
    rf"|{_YEAR}-W?[0-5]\d"
    rf"|{_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
)
_ZONE: Final = r"(?:\s?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
_HALF: Final = r"(?:\s?[AaPp]\.?[Mm]\b\.?)?"
_TIME: Final = (
    rf"[0-2]?\d:[0-5]\d:[0-5]\d(?:[.,]\d+)?{_HALF}{_ZONE}"
    r"|[0-2]?\d[时点時시]\s?[0-5]?\d[分분]\s?[0-5]?\d[秒초]"
    r"|T?[0-2]\d[0-5]\d[0-5]\dZ"
)
_HOUR: Final = (
    rf"[0-2]?\d:[0-5]\d{_HALF}{_ZONE}"
    r"|[01]?\d\s?[AaPp][Mm]"
    r"|[0-2]?\d[时点時시](?:\s?[0-5]?\d[分분])?"
)
# The time that a date comes with.
_CLOCK: Final = rf"(?:T|:|\s?[,@]?\s?(?:at\s)?)(?:{_TIME}|{_HOUR})(?:\s{_YEAR})?"
_UUID: Final = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
# Seconds and milliseconds since 1970, from 2001 to 2033.
_EPOCH: Final = r"1\d{9}(?:\d{3})?(?:\.\d+)?"
_HEX: Final = r"(?:0x)?(?=[0-9]*[a-fA-F])(?:[0-9a-fA-F]{8,}|(?=[a-fA-F]*[0-9])[0-9a-fA-F]{6,7})"
# Letters and digits mixed at random, three digits and two letters at least; a long one may have the marks of base64 in
# it, but no other value. What is looked ahead for is looked for once in each run of such characters.
_RANDOM: Final = (
    r"(?=(?:[A-Za-z]*\d){3})(?=(?:\d*[A-Za-z]){2})[0-9A-Za-z]{10,}"
    r"|(?<![\w+/-])(?=(?:[A-Za-z_+/-]*\d){3})(?=(?:[\d_+/-]*[A-Za-z]){2})"
    rf"(?![\w+/-]*?(?:{_UUID}|{_YEAR}[-/]\d\d[-/]\d\d|[0-9a-f]{{8}}|[0-9A-F]{{8}}))"
    r"[0-9A-Za-z][\w+/-]{18,}[0-9A-Za-z]={0,2}"
)
_VERSION: Final = r"\d{1,5}(?:\.\d{1,5}){2,}"
# With the unit that is written to it: `12th`, `250ms`.
_NUMBER: Final = r"\d+(?:[.,_]\d+)*[A-Za-z]{0,3}"

# Where no value begins: in words without a digit and a capital letter, unless they could be hexadecimal.
_BEGINS: Final = r"(?=[0-9A-Z星周]|[a-z]+[0-9A-Z_+/-]|[a-f]{8})"
# Values do not stand inside of words, but CJK text has no spaces around them, and numbers may be at a word's end.
_SEARCH: Final = re.compile(
    rf"(?<![0-9A-Za-z]){_BEGINS}(?:"
    + "|".join(
        f"(?P<{kind.name}>{pattern})"
        for kind, pattern in (
            (Kind.UUID, _UUID),
            (Kind.DATE, rf"(?:{_DATE}|{_WEEKDAY})(?P<clock>{_CLOCK})?"),
            (Kind.TIME, _TIME),
            (Kind.HOUR, _HOUR),
            (Kind.LONG_NUMBER, _EPOCH),
            (Kind.HEX, _HEX),
            (Kind.RANDOM, _RANDOM),
            (Kind.VERSION, _VERSION),
        )
    )
    + rf"|[A-Za-z]*(?P<{Kind.NUMBER.name}>{_NUMBER}))(?![0-9A-Za-z])",
    re.ASCII,
)
# Shorter numbers are limits and prices, which people try out and change by hand.
_LONG_NUMBER_DIGITS: Final = 9
_ONLY_WEEKDAY: Final = re.compile(_WEEKDAY)
# A value may begin and end so far outside of what differs in it: a UUID has 36 characters.
_AROUND: Final = 40


def looks(text: str, start: int, end: int) -> list[Look]:
    """The values in a span of the text, in order; those that begin before it or end behind it too."""
    found = []
    for match in _SEARCH.finditer(text, max(0, start - _AROUND), min(len(text), end + _AROUND)):
        if match.end() <= start:
            continue
        look = _look(match)
        if look.start >= end:
            break
        found.append(look)
    return found


def at(text: str, place: int, most: int) -> Look | None:
    """The value at a place, or that goes on there, up to so many characters of it; None where there is none."""
    found = looks(text, place, place + 1)
    match = _SEARCH.match(text, found[0].start, found[0].start + most) if found else None
    return None if match is None else _look(match)


def between(text: str, start: int, end: int, found: list[Look]) -> Iterator[str]:
    """What else is in a span than the values that were found there."""
    for look in found:
        yield text[start : max(start, look.start)]
        start = max(start, look.end)
    yield text[start:end]


def common(one: Kind, other: Kind) -> Kind:
    """What two values are that stand at the same place of two texts."""
    if one is other:
        return one
    for family in _FAMILIES:
        if {one, other} <= set(family):
            return family[0]
    return Kind.TEXT


# The first of each takes in the others: an id without a letter looks like a number, a date may come with its time.
_FAMILIES: Final = (
    (Kind.TIME, Kind.HOUR),
    (Kind.DATE, Kind.WEEKDAY),
    (Kind.DATE_TIME, Kind.DATE, Kind.WEEKDAY, Kind.TIME, Kind.HOUR),
    (Kind.VERSION, Kind.NUMBER),
    (Kind.LONG_NUMBER, Kind.NUMBER),
    (Kind.HEX, Kind.NUMBER, Kind.LONG_NUMBER),
    (Kind.RANDOM, Kind.HEX, Kind.NUMBER, Kind.LONG_NUMBER),
)


def _look(match: re.Match[str]) -> Look:
    kind = Kind[str(match.lastgroup)]  # the outermost group ends last
    start, end = match.span(kind.name)
    if kind is Kind.DATE and match["clock"] is not None:
        kind = Kind.DATE_TIME
    elif kind is Kind.DATE and _ONLY_WEEKDAY.fullmatch(match[0]):
        kind = Kind.WEEKDAY
    elif kind is Kind.NUMBER and sum(map(str.isdigit, match[0])) >= _LONG_NUMBER_DIGITS:
        kind = Kind.LONG_NUMBER
    return Look(kind, start, end)
