"""Where the parts of a prompt's text come from."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from assembler.control import Live


class Kind(Enum):
    """What a text is; the names are the contract's."""

    UNSPECIFIED = "raw text, or what cannot be told"
    TEMPLATE = "the template's own"
    CONTENT = "a message's content"
    REASONING = "a message's reasoning"
    TOOL_CALL = "a call's name and arguments"
    NAME = "a message's name, or a call's id"
    TOOLS = "descriptions of tools"
    VARIABLE = "a template variable's value"


class Origin(NamedTuple):
    """message_index: in the caller's own list; None where the text is no message's."""

    kind: Kind
    message_index: int | None = None


TEMPLATE: Final = Origin(Kind.TEMPLATE)
UNTOLD: Final = Origin(Kind.UNSPECIFIED)


class Run(NamedTuple):
    """A part of a text up to before `end`, all of one origin."""

    end: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Origins:
    """runs: parts of the text in order, which make it up.
    answers: indices of the assistant's messages. reasoning: marks of the model's that count in those.
    """

    text: str
    runs: tuple[Run, ...]
    answers: frozenset[int] = frozenset()
    reasoning: frozenset[str] = frozenset()

    @classmethod
    def untold(cls, text: str) -> "Origins":
        """Those of a text that has no parts."""
        return cls(text, (Run(len(text), UNTOLD),))

    def of(self, start: int, end: int) -> Iterator[tuple[int, int, Origin]]:
        """The runs between two places, with their beginnings and ends there."""
        for place in range(bisect_right(self.runs, start, key=_end), len(self.runs)):
            run = self.runs[place]
            yield start, min(run.end, end), run.origin
            start = run.end
            if start >= end:
                return

    def may_count(self, token: Live) -> bool:
        """Whether a control token is one: the template wrote it, or a model did in an answer."""
        first, *others = (origin for _, _, origin in self.of(token.start, token.end))
        is_free = first.kind in (Kind.CONTENT, Kind.REASONING) and first.message_index in self.answers
        return not others and (first in (TEMPLATE, UNTOLD) or (is_free and token.token in self.reasoning))


def _end(run: Run) -> int:
    return run.end
