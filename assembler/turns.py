"""What a template wrote of conversations' earlier messages, to go on from when they have grown (apart.py says when).

Rendering is most of what a new turn costs, and most of its text was rendered a turn ago.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol, SupportsIndex

from jinja2.runtime import LoopContext

from assembler.apart import FIRST_MESSAGES
from assembler.messages import Message
from assembler.traced import joined, own_of

# Of all texts together; a conversation of 30,000 characters takes 130 KB.
_MOST_BYTES: Final = 32 * 2**20
# A message's own objects and its mapping, besides its texts (measured).
_MESSAGE_BYTES: Final = 600
# Parsed arguments of a call, against their JSON: numbers and short texts are objects of their own.
_PARSED: Final = 12
# A turn adds an answer and a question; where tools are called, some messages more.
_NEAR: Final = 9


class Scope(NamedTuple):
    """Whose conversations they are. tag: the namespace's. digest: of everything else that a render depends on, too."""

    tag: str
    digest: bytes


class Spoken(Protocol):
    """A message as far as its text tells it from others."""

    @property
    def content(self) -> str: ...


class Told(NamedTuple):
    """A conversation's first messages, and what the template's loop wrote of the first `covered` of them, in pieces.

    data: the messages as the template gets them. budget: characters that their render could have.
    length: of the pieces together. bytes: what all takes, nearly. after: the hash of the text that came after them.
    """

    messages: tuple[Message, ...]
    covered: int
    pieces: tuple[str, ...]
    length: int
    data: tuple[dict[str, Any], ...]
    budget: int
    bytes: int
    after: int


_NOTHING: Final = Told((), 0, (), 0, (), 0, 0, 0)


class Page(NamedTuple):
    """A rendered text. told: what can be gone on from, if anything. again: the part that was taken from before."""

    text: str
    told: Told | None = None
    again: slice = slice(0, 0)


class Turns:
    """Told beginnings of conversations, the least recently used go first. Its methods may be called from any thread."""

    def __init__(self, max_bytes: int = _MOST_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[Any, ...], Told] = OrderedDict()
        # By namespace, count and last text: the hash of the text that came next.
        self._ends: dict[tuple[str, int, str], int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def may_go_on(self, tag: str, messages: Sequence[Spoken]) -> bool:
        """Whether a chat seems to be a known one that has grown, and not one that is asked again. tag: its namespace's.

        A guess by few of its texts, which is quick.
        """
        for count in _counts(messages):
            after = self._ends.get((tag, count, messages[count - 1].content))
            if after is not None:
                return count + 1 < len(messages) or after != hash(messages[count].content)
        return False

    def find(self, scope: Scope, messages: tuple[Message, ...]) -> Told | None:
        """The longest beginning that is known, but never of all messages."""
        for count in _counts(messages):
            key = _key(scope, messages[:count])
            told = self._kept.get(key)
            if told is not None and told.messages == messages[:count]:
                with self._lock:
                    if key in self._kept:
                        self._kept.move_to_end(key)
                return told
        return None

    def keep(self, scope: Scope, told: Told, before: Told | None) -> None:
        """Keeps a beginning. before: the one that it goes on from, which is not needed any more."""
        with self._lock:
            if before is not None:
                self._drop(_key(scope, before.messages))
            key = _key(scope, told.messages)
            self._drop(key)
            if told.bytes > self._max_bytes:
                return
            self._kept[key] = told
            self._ends[_end(scope, told)] = told.after
            self._bytes += told.bytes
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def flush(self, tag: str | None) -> None:
        """Forgets the conversations of the namespace of that tag, or of all."""
        with self._lock:
            for key in [key for key in self._kept if tag in (None, key[0].tag)]:
                self._drop(key)

    def _drop(self, key: tuple[Any, ...]) -> None:
        told = self._kept.pop(key, None)
        if told is not None:
            self._bytes -= told.bytes
            self._ends.pop(_end(key[0], told), None)


def _counts(messages: Sequence[Spoken]) -> range:
    """How many messages the beginnings may have that a conversation has grown from, the most first."""
    return range(len(messages) - 1, max(FIRST_MESSAGES, len(messages) - _NEAR) - 1, -1)


def _end(scope: Scope, told: Told) -> tuple[str, int, str]:
    return scope.tag, len(told.messages), told.messages[-1].content


def _key(scope: Scope, messages: Sequence[Message]) -> tuple[Any, ...]:
    """Where a beginning is looked for. Others may have the same key, so who finds one compares all of it."""
    return (scope, len(messages), *(each.content for each in (*messages[:FIRST_MESSAGES], *messages[-2:])))


def _bytes_of(message: Message) -> int:
    texts = sum(sys.getsizeof(text) for text in (message.content, message.reasoning) if text)
    return _MESSAGE_BYTES + texts + sum(_PARSED * sys.getsizeof(call.text) for call in message.tool_calls)


def _bytes_of_piece(piece: str) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(own_of(piece))


class Transcript:
    """A render while it is written: the pieces so far, and where in them each message begins."""

    def __init__(self, told: Told | None = None) -> None:
        self._told = told
        self._first = 0
        self._starts: list[int] = []
        self._asked_from_end = False
        self._is_apart = True
        self.pieces: list[str] = []

    def messages(self, data: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages for the template."""
        return _Messages(data, self)

    def rest(self, messages: Sequence[Any]) -> "Rest":
        """What the loop goes through."""
        return Rest(messages, 0 if self._told is None else self._told.covered)

    def turn(self) -> None:
        """The loop begins with a message."""
        if not self._starts:
            self._first = len(self.pieces)
            if self._told is not None:
                self.pieces += self._told.pieces
        elif self._asked_from_end:
            self._is_apart = False
        self._asked_from_end = False
        self._starts.append(len(self.pieces))

    def asked_from_end(self) -> None:
        """The template looked at a message by its distance from the end, which will be another one."""
        self._asked_from_end = True

    def page(
        self, messages: tuple[Message, ...], data: tuple[dict[str, Any], ...], budget: int, *, sees_next: bool
    ) -> Page:
        """The text, and what of it can be gone on from: the last message may be written in another way when more come,
        and so may the one before it, if a message sees the next one. budget: as Told has it, of all but the last.
        """
        text = joined(self.pieces)
        again = slice(0, 0)
        begun = 0
        if self._told is not None:
            begun = self._told.covered
            start = sum(map(len, self.pieces[: self._first]))
            again = slice(start, start + self._told.length)
        count = len(messages) - (2 if sees_next else 1)
        is_whole = len(self._starts) == len(messages) - begun
        if not (self._is_apart and is_whole and count >= max(FIRST_MESSAGES, begun)):
            return Page(text, None, again)
        told = self._told or _NOTHING
        pieces = tuple(self.pieces[self._first : self._starts[count - begun]])
        new = pieces[len(told.pieces) :]
        length = told.length + sum(map(len, new))
        taken = told.bytes + sum(map(_bytes_of, messages[len(told.messages) : -1])) + sum(map(_bytes_of_piece, new))
        after = hash(messages[-1].content)
        return Page(text, Told(messages[:-1], count, pieces, length, data[:-1], budget, taken, after), again)


class Rest:
    """The messages from `start` on, whose places in the loop count from the first of all."""

    def __init__(self, messages: Sequence[Any], start: int) -> None:
        self.messages = messages
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        return iter(self.messages[self.start :])

    def place(self, loop: LoopContext, attribute: str) -> Any:
        """What the loop tells of its place."""
        if attribute == "previtem" and loop.index0 == 0 and self.start:
            return self.messages[self.start - 1]
        value = getattr(loop, attribute)
        if attribute in ("index", "index0"):
            return value + self.start
        return value and not self.start if attribute == "first" else value


class _Messages(list[dict[str, Any]]):
    """A list that tells when somebody counts from its end."""

    def __init__(self, data: Sequence[dict[str, Any]], transcript: Transcript) -> None:
        super().__init__(data)
        self._transcript = transcript

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, SupportsIndex) and place.__index__() < 0:
            self._transcript.asked_from_end()
        return super().__getitem__(place)


_writing: Final[ContextVar[Transcript]] = ContextVar("writing")


@contextmanager
def writing(transcript: Transcript) -> Iterator[None]:
    """What is rendered inside is written to the transcript."""
    token = _writing.set(transcript)
    try:
        yield
    finally:
        _writing.reset(token)


def transcript() -> Transcript:
    """The running render's; one that nobody reads where none was asked for."""
    return _writing.get(None) or Transcript()
