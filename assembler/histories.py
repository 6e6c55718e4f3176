"""What a chat template does to earlier turns.

A turn's prompt is a beginning of the next turn's, so that the prefix tree has it, where the template writes a message
always in the same way. Many do not: they drop an earlier answer's reasoning, or move the system text to the last user
message. That is found at load, in simple conversations; and where it is so, what it costs a conversation is found by
rendering its last turn again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile
from typing import Final, NamedTuple

from assembler import places, probes
from assembler.differences import common_length
from assembler.messages import Conversation, Message, Role
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
        "Where answers begin with white space, ask for none in the system message.",
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

    def keeps(self, conversation: Conversation) -> bool:
        """Whether a conversation's last turn is a beginning of it for certain: it has nothing that is rewritten."""
        return not any(_concerns(rewrite, conversation) for rewrite in self.rewrites)


def _concerns(rewrite: Rewrite, conversation: Conversation) -> bool:
    messages = conversation.messages
    match rewrite:
        case Rewrite.SYSTEM:
            return any(each.role is Role.SYSTEM for each in messages)
        case Rewrite.TOOLS:
            return bool(conversation.tools)
        case Rewrite.CALLS:
            return any(each.role is Role.TOOL or each.tool_calls for each in messages)
        case Rewrite.SPACES:
            answer = next((each for each in reversed(messages) if each.role is Role.ASSISTANT), None)
            return answer is not None and answer.content[:1].isspace()
        case _:
            return True


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
        (Rewrite.CALLS, probes.RESULT_TURN),
        (Rewrite.TURNS, probes.THIRD_TURN),
    )
    opening = _lost_end(template, probes.ASKED_TURN)
    if probes.ASKED_TURN.last in opening:
        found = {Rewrite.TURNS}  # whatever it does with the others, it does with all
    else:
        found = {rewrite for rewrite, turn in turns if len(_lost_end(template, turn)) > len(opening)}
        found |= {Rewrite.OPENING} if opening else set()
    if _drops_reasoning(template):
        found.add(Rewrite.REASONING)
    spaced = _text(template, probes.SPACED)
    if spaced is not None and probes.SPACED_ANSWER not in spaced:
        found.add(Rewrite.SPACES)
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
    is_kept = _is_kept(text, len(asked), messages[answer])
    start = min(_parting(asked, text), _parting(told, text), len(text) if is_kept else len(asked))
    end = _end(text, "" if messages[answer].tool_calls else words, messages[answer + 1 :], min(len(asked), len(text)))
    return Lost(start, end, _message_at(text, conversation, start)) if start < end else None


def _end(text: str, words: str, following: Sequence[Message], asked: int) -> int:
    """Where an answer ends in a prompt. words: its last ones; nothing where it ends in a call.

    following: the messages after it. asked: where what comes before the answer ends, at the latest.
    """
    next_one = len(text)
    for message in reversed(following):  # short texts may stand in what was said after them, too
        at = text.rfind(message.content.strip(), 0, next_one)
        next_one = at if at >= 0 else next_one
    if not words:  # the call's own text is the template's
        return max(next_one, asked)
    at = text.rfind(words, 0, next_one)
    return at + len(words) if at >= 0 else asked


def _parting(earlier: str, text: str) -> int:
    """Where a text parts from an earlier one; its end where it goes on from there."""
    alike = common_length(earlier, 0, text, 0)
    return len(text) if alike == len(earlier) else alike


def _is_kept(text: str, place: int, answer: Message) -> bool:
    """Whether an answer stands in a prompt, from a place on, as it was given."""
    content = answer.content
    if content[:1].isspace() and not answer.reasoning:
        return text.startswith(content[: len(content) - len(content.lstrip())], place)
    return places.found(text, content, place) >= 0


def _words(content: str) -> str:
    """The end of an answer, which stands in the prompt also where what comes before it is dropped."""
    return content.rstrip()[-_LAST_CHARACTERS:].lstrip()


# Enough that an answer's end is not found in another message, and no more than most answers have after their reasoning.
_LAST_CHARACTERS: Final = 48


def _message_at(text: str, conversation: Conversation, place: int) -> int:
    """The first message that ends behind a place of the prompt, or that is not written as it came.

    One without a text, such as a call, stands nowhere, and is taken to be behind the last that does.
    """
    before = takewhile(lambda each: each.end <= place, places.of(text, conversation.messages))
    return max((each.message_index + 1 for each in before if each.end > each.start), default=0)


def _lost_end(template: ChatTemplate, turn: Turn) -> str:
    """The end of a turn's prompt that the next turn's has not. Nothing where the template takes no such turn."""
    earlier, later = _text(template, turn.earlier, _OPEN), _text(template, turn.later)
    if earlier is None or later is None or turn.last not in earlier:
        return ""
    return earlier[common_length(earlier, 0, later, 0) :]


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
