"""What a model is to read, as a caller writes it: a string, messages, raw text or token ids."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes.arguments import bad_argument, build
from hermes.v1 import types_pb2
from shared.errors import HermesError, invalid_argument


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call that the model asked for."""

    name: str
    arguments_json: str
    """The arguments: a JSON object where the model wrote one, else its text as it was."""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    """system, user, assistant or tool, or an alias that the assembler knows."""
    content: str | None = None
    name: str | None = None
    """Participant or tool, where the model's template shows one."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    """Reasoning of an assistant message, for templates that show it."""


AnyMessage = Message | Mapping[str, Any] | types_pb2.Message
Messages = str | Iterable[AnyMessage]
"""A string is one user message. A mapping has the fields of Message; OpenAI's content parts and tool calls are read."""

_FIELDS = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "reasoning"})


def chat_messages(messages: Messages, system: str | None) -> list[types_pb2.Message]:
    """The conversation as the contract has it, opened by `system` where that is given.

    Raises HermesError (BAD_MESSAGE) for what is no message.
    """
    turns: Iterable[AnyMessage] = [Message("user", messages)] if isinstance(messages, str) else messages
    if not isinstance(turns, Iterable) or isinstance(turns, Mapping | bytes):
        raise bad_argument("messages", f"cannot be of type {type(turns).__name__}: give a text or a list of messages")
    opening = [build(types_pb2.Message, {"content": "system"}, role="system", content=system)]
    return (opening if system is not None else []) + [_message(turn, index) for index, turn in enumerate(turns)]


def chat_tools(tools: Iterable[str | Mapping[str, Any]]) -> list[types_pb2.Tool]:
    """Function descriptions, as JSON text or as mappings; OpenAI's `{"type": …, "function": …}` is unpacked."""
    try:
        texts = [tool if isinstance(tool, str) else _function_json(tool) for tool in tools]
        return [types_pb2.Tool(function_json=text) for text in texts]
    except (TypeError, ValueError, AttributeError) as error:
        raise bad_argument("tools", "has a function that JSON cannot hold: give JSON texts or mappings") from error


def _message(turn: AnyMessage, index: int) -> types_pb2.Message:
    if isinstance(turn, types_pb2.Message):
        return turn
    if not isinstance(turn, Message | Mapping):
        raise _bad_message(index, f"is a {type(turn).__name__}, and a message is a mapping or a hermes.client.Message")
    try:
        return _of_message(turn) if isinstance(turn, Message) else _of_mapping(turn, index)
    except UnicodeError as error:
        raise _bad_message(index, "is not valid Unicode: it has lone surrogates") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _bad_message(index, f"cannot be read ({type(error).__name__}: {error})") from error


def _of_message(message: Message) -> types_pb2.Message:
    return types_pb2.Message(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[_tool_call(call) for call in message.tool_calls],
        reasoning=message.reasoning,
    )


def _of_mapping(turn: Mapping[str, Any], index: int) -> types_pb2.Message:
    if unknown := sorted(set(turn) - _FIELDS):
        raise _bad_message(index, f"has the field {unknown[0]!r}, and a message has {', '.join(sorted(_FIELDS))}")
    if "role" not in turn:
        raise _bad_message(index, "has no role")
    content = turn.get("content")
    text = content if content is None or isinstance(content, str) else None
    return types_pb2.Message(
        role=turn["role"],
        content=text,
        content_parts=[] if text is not None or content is None else [_part(part) for part in content],
        name=turn.get("name"),
        tool_call_id=turn.get("tool_call_id"),
        tool_calls=[_tool_call(call) for call in turn.get("tool_calls") or ()],
        reasoning=turn.get("reasoning"),
    )


def _part(part: str | Mapping[str, Any]) -> types_pb2.ContentPart:
    return types_pb2.ContentPart(text=part if isinstance(part, str) else part["text"])


def _tool_call(call: ToolCall | Mapping[str, Any]) -> types_pb2.ToolCall:
    if isinstance(call, ToolCall):
        return types_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
    function = call.get("function", call)
    arguments = function["arguments_json"] if "arguments_json" in function else function.get("arguments", "{}")
    return types_pb2.ToolCall(
        id=call.get("id"),
        name=function["name"],
        arguments_json=arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
    )


def _function_json(tool: Mapping[str, Any]) -> str:
    return json.dumps(tool["function"] if isinstance(tool.get("function"), Mapping) else tool, ensure_ascii=False)


def _bad_message(index: int, what: str) -> HermesError:
    return invalid_argument("BAD_MESSAGE", f"Message {index} {what}.", message_index=str(index))
