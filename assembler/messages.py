"""A caller's chat as one canonical conversation: roles, content, validation."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from assembler import tools
from assembler.tools import Tool, ToolCall
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import invalid_argument

UnknownRole = Literal["error", "user"]


class Role(StrEnum):
    """The roles that templates know."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


_ALIASES: Final[Mapping[Role, tuple[str, ...]]] = {
    Role.SYSTEM: ("system_prompt", "developer", "instruction", "instructions"),
    Role.USER: ("human", "prompter"),
    Role.ASSISTANT: ("bot", "ai", "model", "gpt"),
    Role.TOOL: ("function", "tool_result", "observation", "ipython"),
}


def _squashed(role: str) -> str:
    """The role without case, spaces and the marks that people put in place of spaces."""
    return "".join(character for character in role.casefold() if not character.isspace() and character not in "_-")


_ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {_squashed(name): role for role, aliases in _ALIASES.items() for name in (role, *aliases)}
)
_PLAIN: Final = tuple(types_pb2.Message.DESCRIPTOR.fields_by_name[name] for name in ("role", "content"))
_KNOWN_ROLES: Final = ", ".join(f"{role} ({', '.join(aliases)})" for role, aliases in _ALIASES.items())


class Message(NamedTuple):  # of which there are many, and a frozen dataclass takes twice as long to make
    """One message in canonical form. What the caller left out is None, but content, which is then empty."""

    role: Role
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def characters(self) -> int:
        calls = sum(len(call.text) + len(call.name) for call in self.tool_calls) if self.tool_calls else 0
        names = len(self.name or "") + len(self.tool_call_id or "")
        return len(self.content) + len(self.reasoning or "") + names + calls


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as they came, in order, never none; and the tools that the model may call."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    @property
    def characters(self) -> int:
        """Characters of all the caller's text: how much work rendering and encoding will be."""
        return sum(message.characters for message in self.messages) + sum(tool.characters for tool in self.tools)


def canonical(chat: assembler_pb2.Chat, unknown_role: UnknownRole) -> Conversation:
    """The conversation of a chat.

    Raises HermesError: NO_MESSAGES, UNKNOWN_ROLE, CONTENT_CONFLICT, EMPTY_CONTENT_PART, MISPLACED_TOOL_CALLS, BAD_TOOL,
    BAD_TOOL_CALL or BAD_TOOL_NAME, with the index of the message or tool concerned.
    """
    if not chat.messages:
        raise invalid_argument("NO_MESSAGES", "The chat has no messages: send at least one.", field="messages")
    return Conversation(
        tuple([_plain(each) or _message(at, each, unknown_role) for at, each in enumerate(chat.messages)]),
        tools.read_tools(chat.tools),
    )


def _plain(message: types_pb2.Message) -> Message | None:
    """A message of a known role with a text and nothing else, as most are; to ask for each field takes longer."""
    fields = message.ListFields()
    if len(fields) == len(_PLAIN):
        (field, name), (other, content) = fields
        role = _ROLES.get(name) if (field, other) == _PLAIN else None
        if role is not None:
            return Message(role, content)
    return None


def _message(index: int, message: types_pb2.Message, unknown_role: UnknownRole) -> Message:
    role = _ROLES.get(message.role) or _role(index, message.role, unknown_role)
    calls = message.tool_calls
    if calls and role is not Role.ASSISTANT:
        raise invalid_argument(
            "MISPLACED_TOOL_CALLS",
            f"Message {index} has tool calls, but is a {role} message: only the assistant calls tools.",
            message_index=str(index),
        )
    name = message.name if message.HasField("name") else None
    if name is not None and role is Role.TOOL and not tools.is_name(name):
        raise invalid_argument(
            "BAD_TOOL_NAME",
            f"Message {index} names the tool {name[:_QUOTED_CHARACTERS]!r}: a tool's name has letters, digits and "
            "_ - . : / $ @ alone.",
            message_index=str(index),
        )
    content = _joined_parts(index, message) if message.content_parts else message.content
    tool_call_id = message.tool_call_id if message.HasField("tool_call_id") else None
    reasoning = message.reasoning if message.HasField("reasoning") else None
    tool_calls = tuple(tools.read_call(call, index) for call in calls) if calls else ()
    return Message(role, content, name, tool_call_id, reasoning, tool_calls)


def _role(index: int, role: str, unknown_role: UnknownRole) -> Role:
    known = _ROLES.get(_squashed(role))
    if known is not None:
        return known
    if unknown_role == "user":
        return Role.USER
    raise invalid_argument(
        "UNKNOWN_ROLE",
        f"Message {index} has the unknown role {role[:_QUOTED_CHARACTERS]!r}. Known roles, with their aliases: "
        f"{_KNOWN_ROLES}.",
        message_index=str(index),
        role=role,
    )


# Enough to recognise a mistyped role by.
_QUOTED_CHARACTERS: Final = 60


def _joined_parts(index: int, message: types_pb2.Message) -> str:
    if message.HasField("content"):
        raise invalid_argument(
            "CONTENT_CONFLICT",
            f"Message {index} has both content and content_parts: send one of them.",
            message_index=str(index),
        )
    for place, part in enumerate(message.content_parts):
        if part.WhichOneof("part") is None:
            raise invalid_argument(
                "EMPTY_CONTENT_PART",
                f"Part {place} of message {index} holds nothing that this server knows: send text.",
                message_index=str(index),
                part_index=str(place),
            )
    # Joined by nothing: the prompt has no character that neither the caller nor the template wrote.
    return "".join(part.text for part in message.content_parts)
