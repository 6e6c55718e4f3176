"""A text in which some control tokens are only text, cut into stretches, most of which have none of those.

Only the others need the guard, which takes 20 times as long as the tokenizer by itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from assembler.control import Live


class Stretch(NamedTuple):
    """live: the control tokens that count in the text; None where they are those that the tokenizer finds by itself."""

    text: str
    live: tuple[Live, ...] | None


def stretches(text: str, live: Sequence[Live], found: Iterable[Live], cuts: frozenset[str]) -> Iterator[Stretch]:
    """The text's stretches in order, those that need no guard as long as can be.

    live: the tokens that count. found: those that the tokenizer would find. cuts: tokens after which a text may be cut,
    where they count.
    """
    start = 0  # of what has no stretch yet, none of which needs the guard
    for begin, end, mine, theirs in _between_cuts(len(text), live, found, cuts):
        if mine == theirs:
            continue
        if start < begin:
            yield Stretch(text[start:begin], None)
        yield Stretch(text[begin:end], tuple(Live(one.start - begin, one.end - begin, one.token) for one in mine))
        start = end
    if start < len(text):
        yield Stretch(text[start:], None)


def _between_cuts(
    length: int, live: Sequence[Live], found: Iterable[Live], cuts: frozenset[str]
) -> Iterator[tuple[int, int, list[Live], list[Live]]]:
    """Beginning and end of each part between cuts, and the tokens that count and that would be found in it."""
    begin = 0
    counting, finding = _Queue(live), _Queue(found)
    for end in (*(each.end for each in live if each.token in cuts), length):
        yield begin, end, counting.before(end), finding.before(end)
        begin = end


class _Queue:
    """Tokens in the order of their places."""

    def __init__(self, tokens: Iterable[Live]) -> None:
        self._tokens = iter(tokens)
        self._next = next(self._tokens, None)

    def before(self, end: int) -> list[Live]:
        """Takes out those that begin before a place."""
        taken = []
        while self._next is not None and self._next.start < end:
            taken.append(self._next)
            self._next = next(self._tokens, None)
        return taken
