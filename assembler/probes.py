"""Simple conversations that a template is tried with at start, and what its renders of them tell."""

from typing import Final, NamedTuple

from assembler.messages import Conversation, Message, Role
from assembler.tools import Tool, ToolCall

# Texts that stand nowhere else in a render: a question, an answer, and a call's name, its argument's name and value.
_QUESTION: Final = "probe question"
_ANSWER: Final = "probe answer"
_CALL_WORDS: Final = ("probe_tool", "probe_argument", "probe value")

_SYSTEM: Final = Message(Role.SYSTEM, "s")
_ASK: Final = Message(Role.USER, _QUESTION)
# An id of nine letters and digits, as Mistral's templates ask for.
_CALL: Final = Message(
    Role.ASSISTANT,
    "",
    tool_calls=(
        ToolCall("probe_tool", '{"probe_argument": "probe value"}', {"probe_argument": "probe value"}, "call00001"),
    ),
)
_RESULT: Final = Message(Role.TOOL, "5", name="probe_tool", tool_call_id="call00001")
_REPLY: Final = Message(Role.ASSISTANT, _ANSWER)
_TOOLS: Final = (
    Tool({"name": "other_tool", "description": "d", "parameters": {"type": "object", "properties": {}}}, 80),
)

# With a call.
CALLED: Final = (
    Conversation((_ASK, _CALL, _RESULT, _REPLY), _TOOLS),
    Conversation((_ASK, _CALL), _TOOLS),
    Conversation((_ASK, _CALL, _RESULT, _REPLY)),
    Conversation((_ASK, _CALL)),
)
# Without a word of the assistant's.
ASKED: Final = (
    Conversation((_ASK,)),
    Conversation((_SYSTEM, _ASK)),
    Conversation((_SYSTEM, _ASK), _TOOLS),
    Conversation((_ASK, _RESULT)),
)
# With a result after its call.
TOLD: Final = (
    Conversation((_ASK, _CALL, _RESULT), _TOOLS),
    Conversation((_ASK, _CALL, _RESULT)),
    Conversation((_SYSTEM, _ASK, _CALL, _RESULT), _TOOLS),
)
# With an answer in the middle.
ANSWERED: Final = (
    Conversation((_ASK, _REPLY, Message(Role.USER, "r"))),
    Conversation((_SYSTEM, _ASK, _REPLY, Message(Role.USER, "r"))),
)
SAMPLES: Final = (
    *CALLED,
    *ASKED,
    *ANSWERED,
    Conversation((_SYSTEM, _ASK, Message(Role.ASSISTANT, _ANSWER, reasoning="r"))),
)
# To be written message by message.
GROWN: Final = (
    Conversation((_SYSTEM, *(_ASK, _REPLY) * 4)),
    Conversation((_ASK, _CALL, _RESULT, _REPLY, _ASK, _CALL, _RESULT, _REPLY), _TOOLS),
    Conversation((_ASK, _REPLY) * 4),
)


class Turn(NamedTuple):
    """A conversation, and the same with more after it. last: the text that the earlier one ends with."""

    earlier: Conversation
    later: Conversation
    last: str


_REASONING: Final = "probe reasoning"
_AGAIN: Final = Message(Role.USER, "probe question again")
_TOLD: Final = Message(Role.TOOL, "probe result", name="probe_tool", tool_call_id="call00001")
_THOUGHT: Final = Message(Role.ASSISTANT, _ANSWER, reasoning=_REASONING)


def _turn(*messages: Message, tools: tuple[Tool, ...] = (), more: tuple[Message, ...] = (_REPLY, _AGAIN)) -> Turn:
    return Turn(Conversation(messages, tools), Conversation((*messages, *more), tools), messages[-1].content)


ASKED_TURN: Final = _turn(_ASK)
SYSTEM_TURN: Final = _turn(_SYSTEM, _ASK)
TOOLS_TURN: Final = _turn(_ASK, tools=_TOOLS)
CALL_TURN: Final = _turn(_ASK, more=(_CALL, _TOLD))
RESULT_TURN: Final = _turn(_ASK, _CALL, _TOLD)
THIRD_TURN: Final = _turn(_ASK, _REPLY, Message(Role.USER, "probe question in between"))
REASONING_TURN: Final = _turn(_ASK, _THOUGHT, more=(_AGAIN,))
SPACED: Final = Conversation((_ASK, Message(Role.ASSISTANT, f" {_ANSWER} \n"), _AGAIN))
SPACED_ANSWER: Final = SPACED.messages[1].content


def reasoning_in_text(begin: str, end: str) -> Conversation:
    """An answer with its reasoning in its text, and a question after it."""
    answer = f"{begin}\n{_REASONING}\n{end}\n\n{_ANSWER}"
    return Conversation((_ASK, Message(Role.ASSISTANT, answer), _AGAIN))


def shows_reasoning(text: str) -> bool:
    return _REASONING in text


class Renders(NamedTuple):
    """What a template made of the conversations of these names, without those that it refused."""

    samples: tuple[str, ...]
    asked: tuple[str, ...]
    told: tuple[str, ...]
    answered: tuple[str, ...]


def shows_call(text: str) -> bool:
    """Whether the call is there, and not in Python's own way of writing a mapping: that template wants text."""
    return all(word in text for word in _CALL_WORDS) and f"'{_CALL_WORDS[1]}': " not in text


def after_call(text: str) -> str:
    """What comes after the call's argument; nothing where the call is not shown."""
    return text.rpartition(_CALL_WORDS[2])[2] if _CALL_WORDS[2] in text else ""


def after_answer(text: str) -> str:
    return text.rpartition(_ANSWER)[2] if _ANSWER in text else ""


def opening(text: str, asked: str) -> str | None:
    """What comes between a user's turn and the answer. asked: the same without an answer. None where none is shown."""
    before, answer, _ = text.partition(_ANSWER)
    return before.rpartition(_QUESTION)[2].removeprefix(asked.rpartition(_QUESTION)[2]) if answer else None
