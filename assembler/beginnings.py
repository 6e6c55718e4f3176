"""Known beginnings: a conversation grows at its end, so most of its text was tokenized a turn ago.

Of each prompt two beginnings are worth keeping: up to the end of the system part, which other conversations share, and
up to the last closed message, with which the next turn begins. Each ends right after a control token where a cut
changes no ids (cuts.py), and is kept under the digest of its text.
"""

import logging
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple

from assembler.cache.key import Keys, frame
from assembler.control import Live, Reading
from assembler.messages import Conversation, Message, Role
from assembler.templates import ChatTemplate, RenderOptions
from assembler.tokenizer import TokenIds, Tokenizer
from shared.errors import HermesError

# A shorter system part is tokenized as quickly as it is found.
_LEAST_SYSTEM_CHARACTERS: Final = 256
# Openings of answers that are remembered; one for each set of template variables in use.
_MOST_OPENINGS: Final = 256
_MOST_KWARGS_CHARACTERS: Final = 1024
# A turn adds an answer and a question; where tools are called, some messages more.
_NEAR: Final = 4
# Of a longer conversation, one that branches off further back is tokenized anew.
_MOST_CANDIDATES: Final = 256
# Characters in which a token is looked for at a time, from the end; a longer search keeps other threads from running.
_FIRST_WINDOW: Final = 1024
_WINDOW: Final = 65_536

_log: Final = logging.getLogger(__name__)


class Beginning:
    """A text up to `end`, and the key of its ids, which is made when somebody asks for it."""

    __slots__ = ("_digest", "_key", "end")

    def __init__(self, end: int, digest: Any) -> None:
        self.end = end
        self._digest = digest
        self._key = b""

    @property
    def key(self) -> bytes:
        """32 bytes."""
        if not self._key:
            self._key = self._digest.digest()
        return self._key


class Known(NamedTuple):
    """A beginning that was found, with its ids; nothing at all where `end` is 0."""

    end: int
    ids: TokenIds


class Candidates(Iterable[Beginning]):
    """Beginnings of a text, the longest first. Those that a conversation's next turn has are made first, the others
    when somebody gets that far.
    """

    def __init__(self, near: Sequence[Beginning] = (), far: Callable[[], Iterable[Beginning]] = tuple) -> None:
        self._near = near
        self._make_far = far
        self._far: tuple[Beginning, ...] | None = None

    def __iter__(self) -> Iterator[Beginning]:
        yield from self._near
        yield from self.make_all()

    def make_all(self) -> Sequence[Beginning]:
        """Makes those that nobody has asked for yet, which for a long text takes long, and returns them."""
        if self._far is None:
            self._far = tuple(self._make_far())
        return self._far

    def __bool__(self) -> bool:
        return bool(self._near)


class Plan(NamedTuple):
    """candidates: beginnings of a text that may be known. worth: those worth keeping, the shortest first."""

    candidates: Candidates = Candidates()
    worth: tuple[Beginning, ...] = ()


class Encoded(NamedTuple):
    """A text's ids. made: the beginnings worth keeping that were not known, by key."""

    ids: TokenIds
    made: tuple[tuple[bytes, TokenIds], ...]


NOTHING: Final = Known(0, array("I"))


class Beginnings:
    """Finds the beginnings of prompts, and encodes what comes after them. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, keys: Keys) -> None:
        self._tokenizer = tokenizer
        self._keys = keys
        found = tokenizer.added.cuts
        if found.problem is not None:
            _log.info("beginnings of prompts are not cached for this tokenizer, because %s", found.problem)
        # Without tokens it matches nowhere.
        self._pattern = re.compile("|".join(map(re.escape, sorted(found.tokens))) or r"(?!)")
        self._longest = max(map(len, found.tokens), default=0)

    def plan(self, reading: Reading, conversation: Conversation, opening: str, namespace: str) -> Plan:
        """What may be known of a rendered text. opening: what the template wrote to open the answer."""
        places = _Places(reading, self._pattern, self._longest)
        text = reading.text
        closed = places.last(len(text) - len(opening) if text.endswith(opening) else len(text))
        if closed is None:
            return Plan()
        worth = {closed.end}
        system = places.last(min(_system_end(text, conversation.messages), closed.end))
        if system is not None and system.end >= _LEAST_SYSTEM_CHARACTERS:
            worth.add(system.end)
        # The turns before this one ended as this one does.
        turns = places.back(closed)
        last = list(islice(turns, _NEAR))
        near = sorted({*last, *(end for end in worth if end > last[-1])})
        found = {each.end: each for each in self._digested(reading, sorted(worth.union(near)), namespace)}

        def far() -> Iterable[Beginning]:
            ends = sorted(worth.union(islice(turns, _MOST_CANDIDATES - _NEAR)).difference(near))
            return reversed(list(self._digested(reading, ends, namespace)))

        return Plan(Candidates([found[end] for end in reversed(near)], far), tuple(found[end] for end in sorted(worth)))

    def encode(self, reading: Reading, plan: Plan, known: Known) -> Encoded:
        """The text's ids, of which a beginning is known."""
        ids, place = known.ids[:], known.end
        made = []
        for beginning in plan.worth:
            if beginning.end > place:
                ids.extend(self._piece(reading, place, beginning.end))
                place = beginning.end
                made.append((beginning.key, ids[:]))
        ids.extend(self._piece(reading, place, len(reading.text)))
        return Encoded(ids, tuple(made))

    def _digested(self, reading: Reading, ends: Iterable[int], namespace: str) -> Iterator[Beginning]:
        """The beginnings up to each end, in order."""
        digest = self._keys.begin(namespace.encode(), b"plain" if reading.live is None else b"guarded")
        place = 0
        for end in ends:
            _add(digest, reading, place, end)
            place = end
            yield Beginning(end, digest.copy())

    def _piece(self, reading: Reading, start: int, end: int) -> TokenIds:
        text = reading.text[start:end]
        if reading.live is None:
            return self._tokenizer.encode(text)
        live = [
            Live(each.start - start, each.end - start, each.token)
            for each in reading.live
            if start <= each.start and each.end <= end
        ]
        return self._tokenizer.encode_guarded(text, live)


class _Place(NamedTuple):
    """Where a text may be cut: behind a token."""

    end: int
    token: str


class _Places:
    """Where a text may be cut. No token of the pattern can overlap another, so a search may begin anywhere."""

    def __init__(self, reading: Reading, pattern: re.Pattern[str], longest: int) -> None:
        """longest: characters of the pattern's longest token."""
        self._longest = longest
        self._text = reading.text
        self._pattern = pattern
        # Where control tokens are a caller's, only those that the template wrote count.
        self._live = reading.live and [each for each in reading.live if pattern.fullmatch(each.token)]

    def last(self, end: int) -> _Place | None:
        """The last one that is not behind `end`."""
        if self._live is not None:
            at = bisect_right(self._live, end, key=_end)
            return _Place(self._live[at - 1].end, self._live[at - 1].token) if at else None
        start, reach = end, _FIRST_WINDOW
        while start > 0:
            before, start, reach = start, max(0, start - reach), _WINDOW
            matches = list(self._pattern.finditer(self._text, start, min(end, before + self._longest)))
            if matches:
                return _Place(matches[-1].end(), matches[-1][0])
        return None

    def back(self, last: _Place) -> Iterator[int]:
        """The ends of that token and of all its like before it, the last first."""
        end, token = last
        if self._live is not None:
            yield from (each.end for each in reversed(self._live) if each.token == token and each.end <= end)
            return
        at = self._text.rfind(token, 0, end)
        while at >= 0:
            yield at + len(token)
            at = self._text.rfind(token, 0, at)


class Openings:
    """What a template writes to open an answer, with each set of template variables."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[str, str] = {}

    def of(self, options: RenderOptions, kwargs_json: str) -> str:
        """kwargs_json: the options' variables as the caller wrote them."""
        if not options.add_generation_prompt:
            return ""
        opening = self._known.get(kwargs_json)
        if opening is None:
            opening = self._tried(options)
            if len(self._known) < _MOST_OPENINGS and len(kwargs_json) <= _MOST_KWARGS_CHARACTERS:
                self._known[kwargs_json] = opening
        return opening

    def _tried(self, options: RenderOptions) -> str:
        probe = Conversation((Message(Role.USER, "q"),))
        try:
            opened = self._template.render(probe, options)
            closed = self._template.render(probe, replace(options, add_generation_prompt=False))
        except HermesError:  # it takes no such conversation; where an answer opens is then not known
            return ""
        return opened.removeprefix(closed) if opened.startswith(closed) else ""


def _add(digest: Any, reading: Reading, start: int, end: int) -> None:
    """Adds a stretch of the text. Where only some control tokens count, each of those is framed, and what is before it.

    So a text in which a token counts never has the key of one in which the same letters are a caller's.
    """
    text, live = reading.text, reading.live
    if live is None:
        digest.update(text[start:end].encode())
        return
    place = start
    for each in live[bisect_left(live, start, key=_start) : bisect_right(live, end, key=_end)]:
        frame(digest, text[place : each.start].encode())
        frame(digest, each.token.encode())
        place = each.end


def _start(live: Live) -> int:
    return live.start


def _end(live: Live) -> int:
    return live.end


def _system_end(text: str, messages: tuple[Message, ...]) -> int:
    """Where the first message that is not the system's begins, as far as its words tell; 0 where that is not known."""
    place = 0
    for message in messages:
        words = message.content.strip()
        place = text.find(words, place)
        if place < 0:
            return 0
        if message.role is not Role.SYSTEM:
            return place
        place += len(words)
    return 0
