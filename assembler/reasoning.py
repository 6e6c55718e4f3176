"""Reasoning in an answer: found by its marks, and kept apart from the text."""

import re
from enum import Enum, auto
from typing import Final, NamedTuple

from assembler.marks import Marks, open_tail
from assembler.words import Words

# `</think>`, `[/THINK]`, `</seed:think>`, `◁/think▷`: a bracket, a slash, and a name that tells what is inside.
_CLOSING: Final = re.compile(
    r"(?P<open><|\[|◁)/(?P<name>(?:\w+:)?(?:think|thought|reason)\w*)(?P<close>>|\]|▷)", re.IGNORECASE
)
# Command A's, which have no slash.
_WORDED: Final = ("<|START_THINKING|>", "<|END_THINKING|>")


class ReasoningMarks(NamedTuple):
    """The marks around reasoning."""

    begin: str
    end: str


def marks_of(words: Words) -> ReasoningMarks | None:
    """The marks that a template writes or looks for; what it looks for in earlier answers tells best."""
    for text in (*words.searched, *words.literals):
        if found := _CLOSING.search(text):
            return ReasoningMarks(found["open"] + found["name"] + found["close"], found[0])
        if _WORDED[1] in text:
            return ReasoningMarks(*_WORDED)
    return None


class Parted(NamedTuple):
    """What a piece of an answer gave: reasoning, and what comes after it."""

    reasoning: str
    rest: str


class _Stage(Enum):
    OPENING = auto()  # nothing but white space, and what may be the first mark
    INSIDE = auto()
    CLOSED = auto()  # nothing but line ends after the last mark
    OVER = auto()


class ReasoningSplitter:
    """Parts one sample's reasoning from the rest, as the answer comes.

    Reasoning stands at the beginning of an answer, once. Line ends beside its marks belong to the marks.
    """

    def __init__(self, reasoning: ReasoningMarks, marks: Marks, opened: str | None) -> None:
        """opened: the reasoning that the prompt ends with, which may be empty; None where it ends outside of any."""
        self._begin, self._end = map(marks.written, reasoning)
        self._inside = opened is not None
        self._empty = not (opened or "").strip()  # of the reasoning nothing has come
        # A model that opens reasoning which the prompt opened opens the same.
        self._stage = _Stage.OPENING if self._empty else _Stage.INSIDE
        self._held = ""

    def feed(self, piece: str, *, last: bool = False) -> Parted:
        """Takes the next piece of a sample's text. last: no more comes, so that nothing is held back."""
        text, self._held = self._held + piece, ""
        if self._stage is _Stage.OPENING:
            opened = text.lstrip()
            if opened.startswith(self._begin):
                self._stage, text = _Stage.INSIDE, opened[len(self._begin) :]
            elif self._begin.startswith(opened) and not last:
                self._held = text
                return Parted("", "")
            else:
                self._stage = _Stage.INSIDE if self._inside else _Stage.OVER
        reasoning = ""
        if self._stage is _Stage.INSIDE:
            reasoning, text = self._read(text, last=last)
        if self._stage is _Stage.CLOSED:
            text = text.lstrip("\n")
            if text:
                self._stage = _Stage.OVER
        return Parted(reasoning, text)

    def _read(self, text: str, *, last: bool) -> Parted:
        """Reasoning up to its end, and what comes behind that."""
        if self._empty:
            text = text.lstrip("\n")
            self._empty = not text
        end = text.find(self._end)
        if end >= 0:
            self._stage = _Stage.CLOSED
            return Parted(text[:end].rstrip("\n"), text[end + len(self._end) :])
        if last:
            return Parted(text, "")
        whole = text[: len(text) - open_tail(text, (self._end,))].rstrip("\n")
        self._held = text[len(whole) :]
        return Parted(whole, "")
