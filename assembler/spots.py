"""Where in a caller's text a control token could begin."""

import re
from collections.abc import Iterable, Iterator
from heapq import merge
from typing import Any, Final, NamedTuple

from assembler.messages import Role
from assembler.tools import is_name
from assembler.words import Words

# About half a millisecond of searching.
_STRETCH: Final = 65_536
# Tokens are told apart by so many characters; a text that agrees with one for so long is taken for it.
_TOLD_APART: Final = 100
# Where `'<%s>' % name` and `'<{}>'.format(name)` put other text in.
_PLACEHOLDER: Final = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]|\{[^{}]*\}")
# Kelvin sign, long s and dotless i, whose other case is an ASCII letter.
_ODD_CASES: Final = "\u212a\u017f\u0131"
# These have a meaning in JSON, so that another character in their place would change what stands around them.
_QUOTES: Final = '"\\'


class Spots:
    """Finds the places.

    A token can begin where a whole one stands, or a beginning of one at the text's end or where the template cuts,
    because templates can put halves together. Where a template's own text ends inside a token, the caller's
    continuation of it counts as a beginning.
    """

    def __init__(self, control: frozenset[str], words: Words) -> None:
        firsts = "".join(sorted({token[0] for token in control}))
        cut = "|".join((r"\Z", *map(re.escape, words.cut_at)))
        self._firsts = firsts
        self._cuts = bool(words.cut_at)
        self._beginning = re.compile(_any_of(control, cut))
        self._reach = max(map(len, control), default=0) + max(map(len, words.cut_at), default=0)
        continuations = _continuations(control, words.literals)
        self._continuation = _continuation_pattern(continuations, words.cut_at, cut)
        # Where the template cuts in unknown places, a token can begin, or go on, with these wherever they stand.
        letters = {*firsts, *(rest[0] for rest in continuations)} if words.cuts_anywhere else set()
        self._suspects = _suspects(letters, changes_case=words.changes_case)
        self._suspect = re.compile(f"[{re.escape(self._suspects)}]" if self._suspects else "(?!)")
        kept = [_Kept(text, tuple(_untouched(text, control, words.cut_at))) for text in words.searched]
        turns = {token for token in control if token in words.turns}
        self._kept_in_answers = tuple(each for each in kept if each.places and not _has(each.text, turns))
        self._kept = tuple(each for each in self._kept_in_answers if not _has(each.text, control))

    def find(self, text: str, *, in_answer: bool = False, in_data: bool = False) -> Iterator[int]:
        """The places, in order, and some twice.

        Texts that the template searches for are left alone; in an answer also where they are control tokens, such as
        </think>, unless they open or close turns. in_data: of tools and variables, whose names and types templates know
        by their letters.
        """
        kept = frozenset(_kept_places(text, self._kept_in_answers if in_answer else self._kept))
        for place in self._places(text, by_letter=not (in_data and is_name(text))):
            if place not in kept:
                yield place

    def are_in(self, text: str, *, in_data: bool) -> bool:
        """Whether a text of no answer's has one; quick where it has not even a letter that tokens begin with."""
        if self._continuation is None and not self._suspects and not any(map(text.__contains__, self._firsts)):
            return False
        return next(self.find(text, in_data=in_data), None) is not None

    def _places(self, text: str, *, by_letter: bool) -> Iterator[int]:
        found: list[Iterator[int]] = []
        if any(first in text for first in self._firsts):
            found.append(self._beginnings(text))
        if self._suspects and by_letter:
            found.append(match.start() for match in stretches(self._suspect, text, 1))
        if self._continuation is not None:
            found.append(self._continued(self._continuation, text))
        return merge(*found)

    def _continued(self, continuation: re.Pattern[str], text: str) -> Iterator[int]:
        if self._cuts:
            return (match.start("first") for match in stretches(continuation, text, self._reach))
        match = continuation.match(text)
        return iter(()) if match is None else iter((match.start("first"),))

    def _beginnings(self, text: str) -> Iterator[int]:
        for match in stretches(self._beginning, text, self._reach):
            # An end of a stretch is no end of the text.
            if self._beginning.match(text, match.start()):
                yield match.start()


def stretches(pattern: re.Pattern[str], text: str, reach: int) -> Iterator[re.Match[str]]:
    """The pattern's matches in the text. reach: how far from its beginning a match can depend on the text.

    A text is searched bit by bit, because one long search would keep every other thread from running.
    """
    place = 0
    while place < len(text):
        end = place + _STRETCH
        for match in pattern.finditer(text, place, end + reach):
            if match.start() >= end:
                break
            yield match
            place = match.end()
        place = max(place, end)


def _suspects(letters: set[str], *, changes_case: bool) -> str:
    """The letters and, where a template changes their case, what can become one of them."""
    variants = letters.union(*((each.lower(), each.upper()) for each in letters if changes_case))
    if changes_case and any(each.isalpha() for each in letters):
        variants |= set(_ODD_CASES)
    return "".join(sorted(each for each in variants if len(each) == 1 and not each.isspace() and each not in _QUOTES))


class _Kept(NamedTuple):
    """A text that stays as it is, so that the template finds it; places: of beginnings in it."""

    text: str
    places: tuple[int, ...]


def _has(text: str, tokens: Iterable[str]) -> bool:
    return any(token in text for token in tokens)


def _kept_places(text: str, kept: Iterable[_Kept]) -> Iterator[int]:
    for each in kept:
        at = text.find(each.text)
        while at >= 0:
            yield from (at + place for place in each.places)
            at = text.find(each.text, at + 1)


def _untouched(text: str, control: frozenset[str], cut_at: Iterable[str]) -> Iterator[int]:
    """Places in a searched text where a beginning needs no mark: no token goes on past the text's end, and the template
    cuts no token in it."""
    firsts = {token[0] for token in control}
    for place, letter in enumerate(text):
        if letter not in firsts:
            continue
        rest = text[place:].rstrip()  # white space may be trimmed
        if any(token.startswith(rest) and len(token) > len(rest) for token in control):
            continue
        length = max((len(token) for token in control if rest.startswith(token)), default=len(rest))
        if not any(place < at < place + length for cut in cut_at for at in _occurrences(text, cut)):
            yield place


def _occurrences(text: str, part: str) -> Iterator[int]:
    return (place for place in range(len(text)) if text.startswith(part, place))


def _any_of(texts: Iterable[str], cut: str) -> str:
    """A pattern for each of the texts, and for each beginning of one that white space and `cut` come after."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text[:_TOLD_APART]:
            node = node.setdefault(letter, {})
        node[""] = {}
    if not tree:
        return "(?!)"
    # Only the first letter is taken, so that a beginning inside another one is found too.
    return "|".join(f"{re.escape(letter)}(?={_pattern(child, cut)})" for letter, child in tree.items())


def _pattern(node: dict[str, Any], cut: str) -> str:
    if "" in node:  # a whole one; whether a longer one stands here makes no difference
        return ""
    longer = (re.escape(letter) + _pattern(child, cut) for letter, child in node.items())
    return rf"(?:{'|'.join(longer)}|\s*(?:{cut}))"


def longest_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of the texts that stands at a place."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_longest(tree) if tree else "(?!)")


def _longest(node: dict[str, Any]) -> str:
    branches = []
    for first, child in node.items():
        if not first:
            continue
        run = first
        while len(child) == 1 and "" not in child:
            ((letter, child),) = child.items()  # noqa: PLW2901 - down to where texts part
            run += letter
        branches.append(re.escape(run) + _longest(child))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")


def _continuations(control: frozenset[str], literals: Iterable[str]) -> set[str]:
    """What is left of a token where a text of the template's own ends inside it."""
    pieces = {piece for literal in literals for piece in _PLACEHOLDER.split(literal) if piece}
    rests: dict[str, list[str]] = {}
    for token in control:
        for place in range(1, len(token)):
            rests.setdefault(token[:place], []).append(token[place:])
    longest = max(map(len, control), default=0)
    found: set[str] = set()
    new = {
        rest
        for piece in pieces
        for length in range(1, min(len(piece), longest) + 1)
        for rest in rests.get(piece[-length:], ())
    }
    own = [piece for piece in {*pieces, *Role} if len(piece) < longest]
    while new:  # the template's next texts may go on with the token, and end inside it again
        found |= new
        new = {rest[len(piece) :] for rest in new for piece in own if rest.startswith(piece)} - found - {""}
    return {rest for rest in found if not rest[0].isspace()}


def _continuation_pattern(continuations: set[str], cut_at: Iterable[str], cut: str) -> re.Pattern[str] | None:
    if not continuations:
        return None
    begin = "|".join((r"\A", *map(re.escape, cut_at)))
    return re.compile(rf"(?:{begin})\s*(?={_any_of(continuations, cut)})(?P<first>\S)")
