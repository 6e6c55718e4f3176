"""Where two texts differ that are alike otherwise, as two prompts made from one pattern are."""

import re
from itertools import chain
from typing import Final, NamedTuple

from assembler import spans
from assembler.spans import Kind

# At the end of a head every template writes something more, two line ends at least; else the two end at odd places.
_LEAST_END: Final = 2
# A longer stretch is no value that was filled in.
_MOST_SPAN: Final = 160
# A value alone can be longer: a signed token.
_LONGEST_VALUE: Final = 512
# More places than this, and the texts are not of one pattern.
_MOST_GAPS: Final = 16
# By so much texts of one pattern can differ in length: by eight of the longest stretches.
MOST_CHARACTERS: Final = 8 * _MOST_SPAN
# Where so many characters are alike, what differs is over. Two values closer than this are one gap, if that is short.
_ANCHOR: Final = 16
# The beginning of a value that differs in its end alone is no farther off.
_MOST_BACK: Final = 64
# Of a text that is longer, some characters at so many places, less one, tell whether it is worth a comparison.
_LONG: Final = 256
_PARTS: Final = 5
_PART_CHARACTERS: Final = 40
# Characters that are compared at first; then twice as many, until something differs.
_FIRST_STEP: Final = 512
_RUN: Final = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z]+")


class Gap(NamedTuple):
    """What differs: `start` to before `end` in one text, `old_start` to before `old_end` in the other."""

    old_start: int
    old_end: int
    start: int
    end: int


class Comparison(NamedTuple):
    """gaps: where two texts differ. parting: from where on they are not of one pattern; None where they are."""

    gaps: list[Gap]
    parting: int | None


def common_length(one: str, place: int, other: str, other_place: int) -> int:
    """How many characters are alike from the two places on. O(of these)."""
    most = min(len(one) - place, len(other) - other_place)
    done, step = 0, _FIRST_STEP
    while done < most:
        step = min(step, most - done)
        if not one.startswith(other[other_place + done : other_place + done + step], place + done):
            break
        done, step = done + step, 2 * step
    else:
        return most
    while step > 1:  # the first difference is in the next `step` characters
        half = step // 2
        if one.startswith(other[other_place + done : other_place + done + half], place + done):
            done += half
            step -= half
        else:
            step = half
    return done


def are_alike(old: str, text: str) -> bool:
    """Whether a text has something of the middle of an old one at about the same place; a quick look before a long one.

    True for short texts.
    """
    if len(old) < _LONG:
        return True
    for part in range(1, _PARTS):
        at = len(old) * part // _PARTS
        if text.find(old[at : at + _PART_CHARACTERS], max(0, at - MOST_CHARACTERS), at + MOST_CHARACTERS) >= 0:
            return True
    return False


def begin_alike(old: str, text: str) -> bool:
    """Whether two texts are alike up to a value, which is another one in each."""
    at = common_length(old, 0, text, 0)
    at -= _back(text, at, 0)
    return _value_gap(old, at, text, at) is not None


def compared(old: str, text: str, *, are_whole: bool) -> Comparison:
    """Where a text differs from an old one.

    are_whole: the texts have to end together; else one may go on where the other was cut off.
    Takes about as long as comparing the texts does, and 10 µs for each gap.
    """
    found: list[Gap] = []
    at = old_at = 0
    while True:
        alike = common_length(old, old_at, text, at)
        old_at, at = old_at + alike, at + alike
        is_over = old_at == len(old), at == len(text)
        if all(is_over) or (any(is_over) and not are_whole):
            return Comparison(found, None)
        back = _back(text, at, found[-1].end if found else 0)
        gap = _gap(old, old_at - back, text, at - back) if len(found) < _MOST_GAPS else None
        if gap is None:
            return Comparison(found, at - back)
        found.append(gap)
        old_at, at = gap.old_end, gap.end


def _back(text: str, at: int, least: int) -> int:
    """How far before a place its word begins."""
    start = at
    while start > max(least, at - _MOST_BACK) and text[start - 1].isalnum() and text[start - 1].isascii():
        start -= 1
    return at - start


def _gap(old: str, old_at: int, text: str, at: int) -> Gap | None:
    """The gap that begins at two places: up to where the texts go on alike, else that of one value alone."""
    window = text[at : at + _MOST_SPAN + _ANCHOR]
    ends = (match.end() for match in _RUN.finditer(old, old_at, old_at + _MOST_SPAN))
    for old_end in chain((old_at,), ends):
        anchor = old[old_end : old_end + _ANCHOR]
        if len(anchor) < _ANCHOR:  # what is left of the old text has to be what is left of this one
            end = len(window) - len(anchor)
            is_end = at + len(window) == len(text) and len(anchor) >= _LEAST_END and window.endswith(anchor)
            if is_end:
                return Gap(old_at, old_end, at, at + end)
        else:
            end = window.find(anchor)
            if end >= 0:
                return Gap(old_at, old_end, at, at + end)
    return _value_gap(old, old_at, text, at)


def _value_gap(old: str, old_at: int, text: str, at: int) -> Gap | None:
    """The gap of the values at two places, which others may follow at once: ids on lines of their own."""
    before, now = spans.at(old, old_at, _LONGEST_VALUE), spans.at(text, at, _LONGEST_VALUE)
    if before is None or now is None or spans.common(before.kind, now.kind) is Kind.TEXT:
        return None
    return Gap(old_at, before.end, at, now.end)
