"""What a span of a text looks like: a date, a time, a UUID, an id, a number; else it is text."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple


class Kind(Enum):
    """What a span looks like, as a sentence names it. The surer ones first: values of these kinds change by nature."""

    DATE_TIME = "a date and time"
    DATE = "a date"
    TIME = "a time"
    UUID = "a UUID"
    HEX = "a hexadecimal id"
    RANDOM = "a random token"
    LONG_NUMBER = "a long number, such as a timestamp or an id"
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
_DATE: Final = (
    rf"{_YEAR}(?P<mark>[-/.])[01]?\d(?P=mark)[0-3]?\d"
    rf"|[0-3]?\d[-/.][0-3]?\d[-/.](?:{_YEAR}|\d\d)"
    rf"|{_YEAR}\s?年\s?[01]?\d\s?月(?:\s?[0-3]?\d\s?[日号])?|[01]?\d月[0-3]?\d[日号]"
    rf"|(?:{_DAYS},?\s)?{_DAY}[\s-](?:of\s)?{_MONTHS}(?:,?[\s-]{_YEAR})?"
    rf"|(?:{_DAYS},?\s)?{_MONTHS}\s{_DAY}(?:,?\s{_YEAR})?"
    rf"|{_MONTHS}\s{_YEAR}"
    rf"|{_YEAR}-W?[0-5]\d"
    rf"|{_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
    rf"|{_DAYS}|(?:星期|周)[一二三四五六日天]"
)
_TIME: Final = (
    r"[0-2]?\d:[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?(?:\s?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
    r"|[01]?\d\s?[AaPp][Mm]"
    r"|[0-2]?\d[时点](?:[0-5]?\d分)?(?:[0-5]?\d秒)?"
    r"|T?[0-2]\d[0-5]\d[0-5]\dZ"
)
_UUID: Final = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
# Seconds and milliseconds since 1970, from 2001 to 2033.
_EPOCH: Final = r"1\d{9}(?:\d{3})?(?:\.\d+)?"
_HEX: Final = r"(?:0x)?(?=[0-9]*[a-fA-F])(?:[0-9a-fA-F]{8,}|(?=[a-fA-F]*[0-9])[0-9a-fA-F]{6,7})"
# Letters and digits mixed at random, three digits and two letters at least; a long one may have the marks of base64 in
# it, but no other value. What is looked ahead for is looked for once in each run of such characters.
_RANDOM: Final = (
    r"(?=(?:[A-Za-z]*\d){3})(?=(?:\d*[A-Za-z]){2})[0-9A-Za-z]{10,}"
    r"|(?<![\w+/=-])(?=(?:[A-Za-z_+/-]*\d){3})(?=(?:[\d_+/-]*[A-Za-z]){2})"
    rf"(?![\w+/-]*?(?:{_UUID}|{_YEAR}[-/]\d\d[-/]\d\d|[0-9a-f]{{8}}|[0-9A-F]{{8}}))"
    r"[0-9A-Za-z][\w+/-]{18,}[0-9A-Za-z]={0,2}"
)
_NUMBER: Final = r"\d+(?:[.,_]\d+)*"

# Where no value begins: in words without a digit and a capital letter, unless they could be hexadecimal.
_BEGINS: Final = r"(?=[0-9A-Z星周]|[a-z]+[0-9A-Z_+/-]|[a-f]{8})"
# Values do not stand inside of words, but CJK text has no spaces around them.
_SEARCH: Final = re.compile(
    rf"(?<![0-9A-Za-z]){_BEGINS}(?:"
    + "|".join(
        f"(?P<{kind.name}>{pattern})"
        for kind, pattern in (
            (Kind.UUID, _UUID),
            (Kind.DATE, rf"(?:{_DATE})(?P<clock>(?:T|\s?[,@]?\s?(?:at\s)?)(?:{_TIME}))?"),
            (Kind.TIME, _TIME),
            (Kind.LONG_NUMBER, _EPOCH),
            (Kind.HEX, _HEX),
            (Kind.RANDOM, _RANDOM),
            (Kind.NUMBER, _NUMBER),
        )
    )
    + r")(?![0-9A-Za-z])",
    re.ASCII,
)
# Shorter numbers are limits, versions and years, which people try out and change by hand.
_LONG_NUMBER_DIGITS: Final = 5
# A value may begin and end so far outside of what differs in it: a UUID has 36 characters.
_AROUND: Final = 40


def looks(text: str, start: int, end: int) -> list[Look]:
    """The values in a span of the text, in order; those that begin before it or end behind it too."""
    found = []
    for match in _SEARCH.finditer(text, max(0, start - _AROUND), min(len(text), end + _AROUND)):
        if match.end() <= start:
            continue
        if match.start() >= end:
            break
        found.append(Look(_kind(match), *match.span()))
    return found


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
    (Kind.DATE_TIME, Kind.DATE, Kind.TIME),
    (Kind.LONG_NUMBER, Kind.NUMBER),
    (Kind.HEX, Kind.NUMBER, Kind.LONG_NUMBER),
    (Kind.RANDOM, Kind.HEX, Kind.NUMBER, Kind.LONG_NUMBER),
)


def _kind(match: re.Match[str]) -> Kind:
    kind = Kind[str(match.lastgroup)]  # the outermost group ends last
    if kind is Kind.DATE and match["clock"] is not None:
        return Kind.DATE_TIME
    if kind is Kind.NUMBER and sum(map(str.isdigit, match[0])) >= _LONG_NUMBER_DIGITS:
        return Kind.LONG_NUMBER
    return kind
