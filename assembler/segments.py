"""A prompt cut into runs of tokens that belong together: one message's text, the template's own, each control token."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from assembler.alignment import Alignment, Atom
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

    tokens: int
    first: int
    last: int
    origin: Origin
    control: bool
    other_before: int
    other_after: int


def segments(alignment: Alignment, ids: TokenIds, origins: Origins) -> Iterator[Segment]:
    """All segments, in order: their texts joined are the text, and their ids joined the ids."""
    start = 0
    for part in _joined(_parts(alignment, ids, origins)):
        text = origins.text[part.first : part.last]
        yield Segment(start, part.tokens, text, part.origin, part.control, part.other_before, part.other_after)
        start = part.tokens


def _joined(parts: Iterator[_Part]) -> Iterator[_Part]:
    last: _Part | None = None
    for part in parts:
        if last is not None and _belong_together(last, part):
            last = part._replace(first=last.first, other_before=last.other_before)
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
    first, place = 0, 0
    for atom in alignment.atoms(ids, origins):
        while place < len(origins.runs) - 1 and origins.runs[place].end <= first:
            place += 1
        run = origins.runs[place]
        if atom.control or atom.end > run.end:
            token = alignment.control(ids[atom.tokens - 1]) if atom.control else None
            yield _mixed(atom, first, origins, token)
        else:
            yield _Part(atom.tokens, first, atom.end, run.origin, control=False, other_before=0, other_after=0)
        first = atom.end


def _mixed(atom: Atom, first: int, origins: Origins, token: str | None) -> _Part:
    """The part that an atom is whose text may have several origins. token: the text of a control token that it is."""
    runs = list(origins.of(first, atom.end))
    at = -1 if token is None else origins.text.find(token, first, atom.end)
    if at < 0:
        origin = _prevailing(runs)
    else:
        *_, (_, _, origin) = origins.of(at, at + 1)
    places = [(start, end) for start, end, each in runs if each == origin] or [(first, atom.end)]
    return _Part(atom.tokens, first, atom.end, origin, atom.control, places[0][0] - first, atom.end - places[-1][1])


def _prevailing(runs: list[tuple[int, int, Origin]]) -> Origin:
    """The origin that has most of a text, the template's only where there is no other one."""
    lengths: Counter[Origin] = Counter()
    for start, end, origin in runs:
        lengths[origin] += end - start
    callers = Counter({origin: length for origin, length in lengths.items() if origin != TEMPLATE})
    return max(callers or lengths, key=(callers or lengths).__getitem__)
