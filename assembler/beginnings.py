"""Known beginnings: a conversation grows at its end, so most of its text was tokenized a turn ago.

Of each prompt two beginnings are worth keeping: up to the end of the system part, which other conversations share, and
up to the last closed message, with which the next turn begins. Each ends right after a control token where a cut
changes no ids (cuts.py), and is kept under the digest of its text. A third one ends with the answer, and has the ids
that the model generated (splice.py).
"""

import logging
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice, zip_longest
from typing import Any, Final, NamedTuple

from assembler.cache.key import Keys, frame
from assembler.control import Live, Reading
from assembler.frames import Frame
from assembler.messages import Conversation, Message, Role
from assembler.tokenizer import TokenIds, Tokenizer

# A shorter system part is tokenized as quickly as it is found.
_LEAST_SYSTEM_CHARACTERS: Final = 256
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
    """A beginning that was found, with its ids; nothing at all where `end` is 0.

    has_own: whether some of them are those that the model chose for an answer.
    """

    end: int
    ids: TokenIds
    has_own: bool = False


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
    """candidates: beginnings of a text that may be known. worth: those worth keeping, the shortest first.

    asked: where the question ends that the last answer was given to; 0 where there is none, or nobody can tell.
    """

    candidates: Candidates = Candidates()
    worth: tuple[Beginning, ...] = ()
    asked: int = 0


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
            _log.info(
                "beginnings of prompts are not cached for this tokenizer, and answers that come back are tokenized "
                "anew, because %s",
                found.problem,
            )
        # Without tokens it matches nowhere.
        self._pattern = re.compile("|".join(map(re.escape, sorted(found.tokens))) or r"(?!)")
        self._longest = max(map(len, found.tokens), default=0)

    def plan(self, reading: Reading, conversation: Conversation, frame: Frame, namespace: str) -> Plan:
        """What may be known of a rendered text. frame: what the template writes around answers with its variables."""
        opening = frame.opening
        places = _Places(reading, self._pattern, self._longest)
        text = reading.text
        closed = places.last(len(text) - len(opening) if text.endswith(opening) else len(text))
        if closed is None:
            return Plan()
        worth = {closed.end}
        system = places.last(min(_system_end(text, conversation.messages), closed.end))
        if system is not None and system.end >= _LEAST_SYSTEM_CHARACTERS:
            worth.add(system.end)
        # The turns before this one ended as this one does, and answers as all of them.
        tokens = {closed.token, frame.closing or closed.token}
        turns = merge(*(places.back(_Place(closed.end, token)) for token in tokens), reverse=True)
        last = list(islice(turns, _NEAR))
        near = sorted({*last, *(end for end in worth if end > last[-1])})
        plain_end = self._plain_end(reading)

        def digested(ends: Iterable[int]) -> list[Beginning]:
            return list(self._digested(reading, plain_end, ends, namespace))

        def far() -> Iterable[Beginning]:
            return reversed(digested(sorted(worth.union(islice(turns, _MOST_CANDIDATES - _NEAR)).difference(near))))

        found = {each.end: each for each in digested(sorted(worth.union(near)))}
        return Plan(
            Candidates([found[end] for end in reversed(near)], far),
            tuple(found[end] for end in sorted(worth)),
            _asked(last, conversation.messages),
        )

    def closing(self, text: str, place: int) -> str | None:
        """The first token behind a place after which a text may be cut."""
        found = self._pattern.search(text, place)
        return None if found is None else found[0]

    def encode(self, reading: Reading, plan: Plan, known: Known) -> Encoded:
        """The text's ids, of which a beginning is known."""
        ids, place = known.ids[:], known.end
        made = []
        for beginning in plan.worth:
            if beginning.end > place:
                ids.extend(self.piece(reading, place, beginning.end))
                place = beginning.end
                made.append((beginning.key, ids[:]))
        ids.extend(self.piece(reading, place, len(reading.text)))
        return Encoded(ids, tuple(made))

    def _plain_end(self, reading: Reading) -> int:
        """Up to where all control tokens in a text count, so that nothing has to be told of them."""
        if reading.live is None:
            return len(reading.text)
        if self._tokenizer.added.always:
            return 0
        found = self._tokenizer.added.guard.tokens.found(reading.text)
        differing = (each for each in zip_longest(found, reading.live) if each[0] != each[1])
        return min((each.start for each in next(differing, ()) if each is not None), default=len(reading.text))

    def _digested(self, reading: Reading, plain_end: int, ends: Iterable[int], namespace: str) -> Iterator[Beginning]:
        """The beginnings up to each end, in order."""
        kind, part, place = b"plain", Reading(reading.text), 0
        digest = self._keys.begin(namespace.encode(), kind)
        for end in ends:
            if end > plain_end and part is not reading:
                kind, part, place = b"guarded", reading, 0
                digest = self._keys.begin(namespace.encode(), kind)
            _add(digest, part, place, end)
            place = end
            yield Beginning(end, digest.copy())

    def piece(self, reading: Reading, start: int, end: int) -> TokenIds:
        """Ids of a part of the text that begins where it may be cut, and ends there or with the text."""
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


def _asked(last: Sequence[int], messages: Sequence[Message]) -> int:
    """Where the question to the last answer ends, as far as the number of messages behind it tells.

    last: the last places, the last first.
    """
    behind = next((place for place, each in enumerate(reversed(messages), 1) if each.role is Role.ASSISTANT), None)
    return 0 if behind is None else last[min(behind, len(last) - 1)]
