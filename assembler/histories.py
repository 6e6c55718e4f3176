"""What a chat template does to earlier turns.

A turn's prompt is a beginning of the next turn's, so that the prefix tree has it, where the template writes a message
always in the same way. Many do not: they drop an earlier answer's reasoning, or move the system text to the last user
message. That is found at load, in simple conversations; and where it is so, what it costs a conversation is found by
rendering its last turn again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile
from typing import Final, NamedTuple

from assembler import places, probes
from assembler.differences import common_length
from assembler.messages import Conversation, Role
from assembler.probes import Turn
from assembler.reasoning import marks_of
from assembler.templates import ChatTemplate, RenderOptions
from hermes.v1 import assembler_pb2
from shared.errors import HermesError

_OTHER_TEMPLATE: Final = "serve a chat template that writes them as they were (`template` in the settings)"


class Rewrite(Enum):
    """A way in which a template writes earlier turns differently. message: a clause. remedy: a sentence."""

    OPENING = (
        "it does not keep what it opened an earlier answer with",
        f"Turn thinking off where the template has a variable for it, or {_OTHER_TEMPLATE}.",
    )
    REASONING = (
        "it drops the reasoning of earlier answers",
        f"Turn thinking off where it is not needed, or {_OTHER_TEMPLATE}.",
    )
    SYSTEM = (
        "it writes the system text to the last question and not to the first",
        f"To have the system messages where they were, {_OTHER_TEMPLATE}.",
    )
    TOOLS = (
        "it writes the tools to the last question and not to the first",
        f"To have the tools where they were, {_OTHER_TEMPLATE}.",
    )
    CALLS = (
        "it writes earlier calls of tools and their results in another way",
        f"To have calls and results as they were, {_OTHER_TEMPLATE}.",
    )
    TURNS = (
        "it writes turns that are further back in another way",
        f"To have all turns as they were, {_OTHER_TEMPLATE}.",
    )
    SPACES = (
        "it takes white space off the ends of earlier answers",
        "Nothing, unless answers begin with white space: then ask for none in the system message.",
    )

    def __init__(self, message: str, remedy: str) -> None:
        self.message = message
        self.remedy = remedy

    @property
    def sentence(self) -> str:
        return f"The chat template changes earlier turns: {self.message}."

    @property
    def told(self) -> assembler_pb2.Rewrite:
        """As the contract has it."""
        return assembler_pb2.Rewrite(message=self.sentence, remedy=self.remedy)


@dataclass(frozen=True, slots=True)
class History:
    """rewrites: what the template does to earlier turns; nothing where it writes them always as they were."""

    rewrites: tuple[Rewrite, ...] = ()

    def __str__(self) -> str:
        return "; ".join(each.message for each in self.rewrites)

    @property
    def is_stable(self) -> bool:
        """Whether a turn's prompt is a beginning of the next one's, but for white space that answers begin with."""
        return set(self.rewrites) <= {Rewrite.SPACES}


class Lost(NamedTuple):
    """A stretch of a prompt that its last turn would have had, if the template wrote that as it was.

    message_index: the message in which it begins, or before it.
    """

    start: int
    end: int
    message_index: int


_OPEN: Final = RenderOptions()
_CLOSED: Final = RenderOptions(add_generation_prompt=False)


def read(template: ChatTemplate) -> History:
    """Renders a dozen short conversations."""
    turns = (
        (Rewrite.SYSTEM, probes.SYSTEM_TURN),
        (Rewrite.TOOLS, probes.TOOLS_TURN),
        (Rewrite.CALLS, probes.CALL_TURN),
        (Rewrite.TURNS, probes.THIRD_TURN),
    )
    found = {rewrite for rewrite, turn in turns if _is_rewritten(template, turn)}
    opened, later = _text(template, probes.ASKED_TURN.earlier, _OPEN), _text(template, probes.ASKED_TURN.later)
    if opened is not None and later is not None and not later.startswith(opened):
        found.add(Rewrite.OPENING)
    if _drops_reasoning(template):
        found.add(Rewrite.REASONING)
    spaced = _text(template, probes.SPACED)
    if spaced is not None and probes.SPACED_ANSWER not in spaced:
        found.add(Rewrite.SPACES)
    if _is_rewritten(template, probes.ASKED_TURN):  # whatever it does with the others, it does with all
        found -= {Rewrite.SYSTEM, Rewrite.TOOLS, Rewrite.CALLS}
        found.add(Rewrite.TURNS)
    return History(tuple(rewrite for rewrite in Rewrite if rewrite in found))


def lost(
    text: str, conversation: Conversation, options: RenderOptions, render: Callable[[Conversation, RenderOptions], str]
) -> Lost | None:
    """What the last turn's prompt and answer would have given a prompt. Takes two renders.

    text: the prompt's. render: raises HermesError for what the template does not take.
    """
    messages = conversation.messages
    answer = next((at for at in reversed(range(len(messages))) if messages[at].role is Role.ASSISTANT), len(messages))
    if not 0 < answer < len(messages) - 1:
        return None
    before, with_answer = (replace(conversation, messages=messages[:end]) for end in (answer, answer + 1))
    try:
        asked = render(before, replace(options, add_generation_prompt=True, continue_final_message=False))
        told = render(with_answer, replace(options, add_generation_prompt=False, continue_final_message=False))
    except HermesError:  # whatever the template has against it, this prompt is another one
        return None
    words = _words(messages[answer].content)
    told = told[: told.rfind(words) + len(words)] if words and words in told else asked
    start = min(
        _parting(asked, text),
        _parting(told, text),
        len(text) if places.found(text, messages[answer].content, len(asked)) >= 0 else len(asked),
    )
    # Short answers may stand in what was said after them, too.
    following = text.rfind(messages[answer + 1].content.strip())
    at = text.rfind(words, 0, following if following >= 0 else len(text)) if words else -1
    end = at + len(words) if at >= 0 else min(len(asked), len(text))
    return Lost(start, end, _message_at(text, conversation, start)) if start < end else None


def _parting(earlier: str, text: str) -> int:
    """Where a text parts from an earlier one; its end where it goes on from there."""
    alike = common_length(earlier, 0, text, 0)
    return len(text) if alike == len(earlier) else alike


def _words(content: str) -> str:
    """The end of an answer, which stands in the prompt also where what comes before it is dropped."""
    return content.rstrip()[-_LAST_CHARACTERS:].lstrip()


# Enough that an answer's end is not found in another message, and no more than most answers have after their reasoning.
_LAST_CHARACTERS: Final = 48


def _message_at(text: str, conversation: Conversation, place: int) -> int:
    """The first message that ends behind a place of the prompt, or that is not written as it came."""
    before = takewhile(lambda each: each.end <= place, places.of(text, conversation.messages))
    return sum(1 for _ in before)


def _is_rewritten(template: ChatTemplate, turn: Turn) -> bool:
    earlier, later = _text(template, turn.earlier), _text(template, turn.later)
    if earlier is None or later is None or turn.last not in earlier:
        return False
    return not later.startswith(earlier[: earlier.rfind(turn.last) + len(turn.last)])


def _drops_reasoning(template: ChatTemplate) -> bool:
    earlier, later = (_text(template, each) for each in probes.REASONING_TURN[:2])
    if earlier and later and probes.shows_reasoning(earlier) and not probes.shows_reasoning(later):
        return True
    marks = marks_of(template.words)
    written = None if marks is None else _text(template, probes.reasoning_in_text(marks.begin, marks.end))
    return written is not None and not probes.shows_reasoning(written)


def _text(template: ChatTemplate, conversation: Conversation, options: RenderOptions = _CLOSED) -> str | None:
    """What the template makes of a conversation; None where it takes none such."""
    try:
        template.check(conversation, options.kwargs)
        return template.render(conversation, options)
    except HermesError:
        return None
