"""A prompt cut into runs of tokens that belong together: one message's text, the template's own, each control token."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from assembler.alignment import Aligned, Alignment
from assembler.origins import TEMPLATE, Origin, Origins
from assembler.tokenizer import TokenIds


class Segment(NamedTuple):
    """A part of the ids, from `start` to before `end`, and their text.

    other_before, other_after: characters at either end of the text that are not of the origin, but in the same token.
    """

    start: int
    end: int
    text: str
    origin: Origin
    control: bool = False
    other_before: int = 0
    other_after: int = 0


class _Part(NamedTuple):
    """As a Segment has it; its text is from `first` to before `last`."""

    start: int
    end: int
    first: int
    last: int
    origin: Origin
    control: bool
    other_before: int
    other_after: int


def segments(alignment: Alignment, ids: TokenIds, origins: Origins) -> Iterator[Segment]:
    """All segments, in order: their texts joined are the text, and their ids joined the ids."""
    for part in _joined(_parts(alignment, ids, origins)):
        text = origins.text[part.first : part.last]
        yield Segment(part.start, part.end, text, part.origin, part.control, part.other_before, part.other_after)


def _joined(parts: Iterable[_Part]) -> Iterator[_Part]:
    last: _Part | None = None
    for part in parts:
        if last is not None and _belong_together(last, part):
            last = part._replace(start=last.start, first=last.first, other_before=last.other_before)
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last


def _belong_together(before: _Part, after: _Part) -> bool:
    return (
        before.origin == after.origin
        and not (before.control or after.control)
        and not (before.other_after or after.other_before)
    )


def _parts(alignment: Alignment, ids: TokenIds, origins: Origins) -> Iterator[_Part]:
    """Control tokens, tokens that texts of two origins share, and all between those."""
    aligned, control = alignment.aligned(ids, origins), set(alignment.controls(ids))
    cuts = {0, len(ids)}.union(control, (place + 1 for place in control))
    for run in origins.runs[:-1]:
        cuts.update(_around(aligned, run.end))
    first = 0
    for start, end in pairwise(sorted(cuts)):
        last = aligned.ends[end - 1]
        is_control = start in control
        token = alignment.control(ids[start]) if is_control else None
        origin = _origin(origins, first, last, token)
        before, after = _others(origins, first, last, origin)
        yield _Part(start, end, first, last, origin, is_control, before, after)
        first = last


def _around(aligned: Aligned, place: int) -> tuple[int, int]:
    """The cuts around the tokens that hold characters on both sides of a place; one and the same where none does."""
    after = bisect_left(aligned.ends, place)
    before = after
    while before > 0 and aligned.goes_on[before - 1]:
        before -= 1
    while aligned.goes_on[after]:
        after += 1
    after += 1
    return (after if aligned.ends[after - 1] == place else before), after


def _origin(origins: Origins, first: int, last: int, token: str | None) -> Origin:
    """The origin of a text that may have several. token: the control token that it is, with what that takes in."""
    at = -1 if token is None else origins.text.find(token, first, last)
    return _prevailing(origins.of(first, last) if at < 0 else origins.of(at, at + 1))


def _prevailing(runs: Iterable[tuple[int, int, Origin]]) -> Origin:
    """The origin that has most of a text, the template's only where there is no other one."""
    lengths: Counter[Origin] = Counter()
    for start, end, origin in runs:
        lengths[origin] += end - start
    callers = {origin: length for origin, length in lengths.items() if origin != TEMPLATE}
    return max(callers, key=callers.__getitem__, default=TEMPLATE)


def _others(origins: Origins, first: int, last: int, origin: Origin) -> tuple[int, int]:
    """How many characters at the beginning and at the end of a text have another origin."""
    places = [(start, end) for start, end, each in origins.of(first, last) if each == origin]
    return (places[0][0] - first, last - places[-1][1]) if places else (0, 0)
