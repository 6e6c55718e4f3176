"""The order of a conversation: what is odd about it, and how it can be mended for a template that is strict."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, TypeAlias

from assembler.findings import ROLE_ORDER, TOOL_RESULT_MISMATCH, Finding
from assembler.messages import Conversation, Message, Role
from assembler.tools import ToolCall
from assembler.traced import written
from shared.errors import invalid_argument

# Between texts that become one: a paragraph's end, which says that something new begins.
_BLANK_LINE: Final = written("\n\n")


# What is odd about a role after the one before it, None at the beginning.
_PROBLEMS: Final[Mapping[tuple[Role | None, Role], str]] = {
    (Role.SYSTEM, Role.SYSTEM): "is a second system message in a row",
    (Role.USER, Role.SYSTEM): "is a system message that comes after others",
    (Role.ASSISTANT, Role.SYSTEM): "is a system message that comes after others",
    (Role.TOOL, Role.SYSTEM): "is a system message that comes after others",
    (Role.USER, Role.USER): "is a second user message in a row",
    (Role.TOOL, Role.USER): "is a user message, but nobody has answered the tool's result before it",
    (Role.ASSISTANT, Role.ASSISTANT): "is a second assistant message in a row",
    (None, Role.ASSISTANT): "is an assistant message, but no user message comes before it",
    (None, Role.TOOL): "is a tool message, but no assistant message comes before it",
    (Role.SYSTEM, Role.TOOL): "is a tool message, but no assistant message comes before it",
    (Role.USER, Role.TOOL): "is a tool message, but no assistant message comes before it",
}

_SYSTEM_REMEDY: Final = "Send one system message, as the first; what comes up later goes into a user message."
_TURNS_REMEDY: Final = (
    "Let user and assistant take turns, the user first; join messages of one role that follow each other."
)
_TOOL_REMEDY: Final = "Send each result of a tool right after the assistant message that called it."
_REMEDIES: Final[Mapping[Role, str]] = {
    Role.SYSTEM: _SYSTEM_REMEDY,
    Role.USER: _TURNS_REMEDY,
    Role.ASSISTANT: _TURNS_REMEDY,
    Role.TOOL: _TOOL_REMEDY,
}
_RESULT_REMEDY: Final = (
    "Give each result the tool_call_id of a call in an assistant message before it, and answer no call twice."
)


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """merge_system, merge_same_role: mends to try where a template refuses a conversation as it is.
    strict: a bad order is an error and not a warning.
    """

    merge_system: bool = True
    merge_same_role: bool = True
    strict: bool = False


def findings(conversation: Conversation) -> list[Finding]:
    """What is odd about the order of roles and about the answers to tool calls, in the messages' order."""
    if _is_plain(conversation.messages):
        return []
    found = [*_role_findings(conversation.messages), *_tool_findings(conversation.messages)]
    return sorted(found, key=lambda finding: finding.message_index or 0)


def _is_plain(messages: tuple[Message, ...]) -> bool:
    """Whether user and assistant take turns after one system message at most, and no tool is called, as in most."""
    roles = [message.role for message in messages]
    begin = int(roles[0] is Role.SYSTEM)
    users, assistants = roles[begin::2], roles[begin + 1 :: 2]
    take_turns = users == [Role.USER] * len(users) and assistants == [Role.ASSISTANT] * len(assistants)
    return take_turns and not any(message.tool_calls for message in messages)


def refuse(found: list[Finding]) -> None:
    """Raises HermesError ROLE_ORDER or TOOL_RESULT_MISMATCH for the first finding, if there is one."""
    if found:
        first = found[0]
        raise invalid_argument(first.code, f"{first.message} {first.remedy}", message_index=str(first.message_index))


def _role_findings(messages: tuple[Message, ...]) -> Iterator[Finding]:
    before: Role | None = None
    begun = False  # whether anybody but the system has said something
    for index, message in enumerate(messages):
        role = message.role
        problem = _PROBLEMS.get((before if begun or role is Role.SYSTEM else None, role))
        if problem is not None:
            yield Finding(ROLE_ORDER, f"Message {index} {problem}.", index, _REMEDIES[role])
        before = role
        begun = begun or role is not Role.SYSTEM


def _tool_findings(messages: tuple[Message, ...]) -> Iterator[Finding]:
    for index, asked in results(messages):
        if asked is None:
            problem = f"Message {index} answers no tool call that was open before it."
            yield Finding(TOOL_RESULT_MISMATCH, problem, index, _RESULT_REMEDY)


def results(messages: tuple[Message, ...]) -> Iterator[tuple[int, int | None]]:
    """The index of each tool message, with that of the message whose call it answers; None where it answers none."""
    calls = _OpenCalls()
    for index, message in enumerate(messages):
        if message.tool_calls:
            for call in message.tool_calls:
                calls.open(index, call)
        if message.role is Role.TOOL:
            yield index, calls.answered_by(message)


_Key: TypeAlias = tuple[str, str | None]


class _OpenCalls:
    """Calls that nobody has answered yet, with the index of their message, in queues by what a result can say of them.

    So no result is compared with all calls; there can be thousands of each.
    """

    def __init__(self) -> None:
        self._calls: dict[int, tuple[int, ToolCall]] = {}
        self._queues: dict[_Key, OrderedDict[int, None]] = {}
        self._opened = 0

    def open(self, index: int, call: ToolCall) -> None:
        self._opened += 1
        self._calls[self._opened] = index, call
        for key in _keys(call):
            self._queues.setdefault(key, OrderedDict())[self._opened] = None

    def answered_by(self, message: Message) -> int | None:
        """Closes the call that the message answers, if there is one, and tells the index of the message with it."""
        keys: list[_Key] = [("any", message.name)]
        if message.tool_call_id is not None:
            keys = [("id", message.tool_call_id), ("without id", message.name)]
        for key in keys:
            if self._queues.get(key):
                index, call = self._calls.pop(number := next(iter(self._queues[key])))
                for each in _keys(call):
                    del self._queues[each][number]
                return index
        return None


def _keys(call: ToolCall) -> list[_Key]:
    """The queues of a call: those of its name, and those for results that have none."""
    keys: list[_Key] = [("any", None), ("any", call.name)]
    return [*keys, ("id", call.id)] if call.id is not None else [*keys, ("without id", None), ("without id", call.name)]


def mends(conversation: Conversation, policy: OrderPolicy) -> Iterator[Conversation]:
    """Forms of the conversation that a strict template may take, the least changed first, without the original."""
    seen = [conversation]
    for mended in _candidates(conversation, policy):
        if mended not in seen:
            seen.append(mended)
            yield mended


def _candidates(conversation: Conversation, policy: OrderPolicy) -> Iterator[Conversation]:
    if policy.merge_same_role:
        yield _same_roles_joined(conversation)
    if policy.merge_system:
        first = _systems_first(conversation)
        yield first
        if policy.merge_same_role:
            yield _same_roles_joined(first)
        inside = _system_in_first_user(first)
        yield inside
        if policy.merge_same_role:
            yield _same_roles_joined(inside)


def _joined(texts: list[str]) -> str:
    return _BLANK_LINE.join(text for text in texts if text)


def _same_roles_joined(conversation: Conversation) -> Conversation:
    """Neighbours of one role and one name as one message; results and calls of tools stay apart."""

    def kind(entry: tuple[int, Message]) -> tuple[object, ...]:
        index, message = entry
        alone = message.role is Role.TOOL or message.tool_calls or message.reasoning is not None
        return (index,) if alone else (message.role, message.name)

    joined = []
    for _, group in groupby(enumerate(conversation.messages), kind):
        messages = [message for _, message in group]
        content = messages[0].content if len(messages) == 1 else _joined([message.content for message in messages])
        joined.append(messages[0]._replace(content=content))
    return replace(conversation, messages=tuple(joined))


def _systems_first(conversation: Conversation) -> Conversation:
    systems = [message for message in conversation.messages if message.role is Role.SYSTEM]
    if not systems:
        return conversation
    others = [message for message in conversation.messages if message.role is not Role.SYSTEM]
    content = systems[0].content if len(systems) == 1 else _joined([message.content for message in systems])
    return replace(conversation, messages=(systems[0]._replace(content=content), *others))


def _system_in_first_user(conversation: Conversation) -> Conversation:
    """The one system message as the beginning of the first user message, for templates that know no system."""
    system, *others = conversation.messages
    user = next((at for at, message in enumerate(others) if message.role is Role.USER), None)
    if system.role is not Role.SYSTEM or user is None:
        return conversation
    others[user] = others[user]._replace(content=_joined([system.content, others[user].content]))
    return replace(conversation, messages=tuple(others))
