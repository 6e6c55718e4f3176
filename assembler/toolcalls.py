"""Tool calls in an answer, recognised as it comes: their markup is taken out of the text, what is no call stays."""

import re
import secrets
import string
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar

from assembler.marks import Marks, open_tail
from assembler.tools import ToolCall, is_name

T = TypeVar("T")

# A parser that gives control back whenever it needs text that has not come yet.
Parse: TypeAlias = Generator[None, None, T]

# What JSON has between its strings and brackets, and within a string before anything that matters.
_BETWEEN: Final = re.compile(r"[-+.,:\s0-9Etrufalsen]*")
_IN_STRING: Final = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPED: Final = tuple('"\\/bfnrtu')
_CLOSERS: Final = {"{": "}", "[": "]"}

# Mistral's templates take ids of nine letters and digits alone, and other templates take any.
_ID_LENGTH: Final = 9
_ID_LETTERS: Final = string.ascii_letters + string.digits


class BrokenCallError(Exception):
    """What began like a call is none."""


def new_id() -> str:
    """An id for a call that the model gave none."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


class CallText:
    """Text from the beginning of a call on, as far as it has come, and how far it has been read.

    tools: names of those that may be called. The methods that read wait for text; all of them leave `at` behind what
    they took.
    """

    def __init__(self, marks: Marks, tools: Collection[str], text: str, at: int) -> None:
        self._marks = marks
        self.tools = tools
        self.text = text
        self.at = at
        self.ended = False  # no more text comes

    @property
    def over(self) -> bool:
        """Whether all of the answer has been read."""
        return self.ended and self.at == len(self.text)

    def letter(self) -> Parse[str]:
        """The next character, which is not taken; empty at the end of the answer."""
        while self.at >= len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def spaces(self) -> Parse[None]:
        """Takes white space."""
        while (yield from self.letter()).isspace():
            self.at += 1

    def takes(self, mark: str) -> Parse[bool]:
        """Takes a mark or another text; whether it came."""
        word = self._marks.written(mark)
        while True:
            come = self.text[self.at : self.at + len(word)]
            if come == word:
                self.at += len(word)
                return True
            if self.ended or not word.startswith(come):
                return False
            yield

    def sees(self, mark: str) -> Parse[bool]:
        """Whether a mark or another text comes next; it is not taken."""
        begin = self.at
        comes = yield from self.takes(mark)
        self.at = begin
        return comes

    def name(self) -> Parse[str]:
        """Takes a name. Raises BrokenCallError where none comes."""
        begin = self.at
        while is_name((yield from self.letter())):
            self.at += 1
        if self.at == begin:
            raise BrokenCallError
        return self.text[begin : self.at]

    def json(self) -> Parse[str]:
        """Takes a JSON object or array, as far as its brackets tell. Raises BrokenCallError for what can be none."""
        begin, brackets = self.at, list[int]()  # where those that are open stand
        while True:
            letter = yield from self.letter()
            if letter in _CLOSERS:
                brackets.append(self.at)
            elif brackets and letter == _CLOSERS[self.text[brackets[-1]]]:
                brackets.pop()
            elif brackets and letter == '"':
                yield from self._string()
                continue
            else:
                if brackets:  # the last one may begin a mark
                    self.at = brackets[-1]
                raise BrokenCallError
            self.at += 1
            if not brackets:
                return self._marks.restored(self.text[begin : self.at])
            yield from self._pass(_BETWEEN)

    def _string(self) -> Parse[None]:
        """Takes a JSON string and what may stand between it and the next thing."""
        self.at += 1
        while True:
            yield from self._pass(_IN_STRING)
            letter = yield from self.letter()
            if letter == "\\":
                self.at += 1
                if (yield from self.letter()) not in _ESCAPED:
                    raise BrokenCallError
            elif letter != '"':
                raise BrokenCallError
            self.at += 1
            if letter == '"':
                return (yield from self._pass(_BETWEEN))

    def _pass(self, letters: re.Pattern[str]) -> Parse[None]:
        """Takes as many of such characters as there are."""
        while True:
            if (match := letters.match(self.text, self.at)) is not None:
                self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return
            yield


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes its calls.

    openings: marks, each of which opens a call. bare: a call may also begin an answer with its JSON, without a mark.
    marks: all marks of the format. read: the parser of a call, or of several that follow each other; it begins behind
    the opening mark and takes what belongs to the calls, or raises BrokenCallError.
    """

    name: str
    openings: tuple[str, ...]
    marks: tuple[str, ...]
    read: Callable[[CallText], Parse[list[ToolCall]]]
    bare: bool = False


class _Reading(NamedTuple):
    text: CallText
    parser: Parse[list[ToolCall]]


class ToolCallFilter:
    """Takes the calls of one sample out of its text, as the answer comes.

    White space beside calls is given only where text stands on both sides. What is no call after all comes back as it
    was, with its marks written out.
    """

    def __init__(self, call_format: CallFormat, tools: Collection[str], marks: Marks) -> None:
        """tools: names of those that may be called."""
        self._format = call_format
        self._tools = tools
        self._marks = marks
        self._openings = tuple(map(marks.written, call_format.openings))
        self._text = ""  # not looked at yet, where no call is being read
        self._reading: _Reading | None = None
        self._blank = True  # no text and no call has come
        self._spoken = False  # text has come
        self._space = ""  # held back, because a call may follow
        self._beside_call = False  # a call stands beside that space
        self._ended = False

    def feed(self, piece: str, *, last: bool = False) -> list[str | ToolCall]:
        """Takes the next piece; returns text and calls in their order. last: no more comes; nothing is held back."""
        self._ended = last
        if self._reading is None:
            self._text += piece
        else:
            self._reading.text.text += piece
            self._reading.text.ended = last
        parts: list[str | ToolCall] = []
        while (reading := self._reading or self._open(parts)) is not None and self._read_on(reading, parts):
            self._reading = None
        if last and not self._beside_call and self._space:
            parts.append(self._space)
        return parts

    def _open(self, parts: list[str | ToolCall]) -> _Reading | None:
        """Gives text up to where a call begins, and begins to read that; None where none does."""
        text = self._text
        begin, opening = min(
            ((at, opening) for opening in self._openings if (at := text.find(opening)) >= 0), default=(-1, "")
        )
        if self._format.bare and self._blank and text.lstrip().startswith("{"):
            begin, opening = text.index("{"), ""
        if begin < 0:
            held = 0 if self._ended else open_tail(text, self._openings)
            self._give(self._marks.shown(text[: len(text) - held]), parts)
            self._text = text[len(text) - held :]
            return None
        self._give(self._marks.shown(text[:begin]), parts)
        self._text = ""
        self._blank = False
        call = CallText(self._marks, self._tools, text[begin:], len(opening))
        call.ended = self._ended
        self._reading = _Reading(call, self._format.read(call))
        return self._reading

    def _read_on(self, reading: _Reading, parts: list[str | ToolCall]) -> bool:
        """Reads a call as far as it has come; whether it is over."""
        call = reading.text
        try:
            next(reading.parser)
        except StopIteration as done:
            parts.extend(done.value)
            self._beside_call = True
        except BrokenCallError:
            call.at = max(call.at, 1)
            self._give(self._marks.restored(call.text[: call.at]), parts)
        else:
            return False
        self._text = call.text[call.at :]
        return True

    def _give(self, text: str, parts: list[str | ToolCall]) -> None:
        text = self._space + text
        given = text.rstrip()
        self._space = text[len(given) :]
        if not given:
            return
        parts.append(given.lstrip() if self._beside_call and not self._spoken else given)
        self._beside_call = self._blank = False
        self._spoken = True
