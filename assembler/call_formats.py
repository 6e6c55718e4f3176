"""The forms in which models write tool calls, and which of them a template's model was trained on."""

import json
import re
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

from assembler.marks import NO_MARKS
from assembler.messages import Conversation, Message, Role
from assembler.templates import ChatTemplate, RenderOptions
from assembler.toolcalls import BrokenCallError, CallFormat, CallText, Parse, ToolCallFilter, new_id
from assembler.tools import Tool, ToolCall, is_name, parse_object
from shared.errors import HermesError

FormatName: TypeAlias = Literal["hermes", "llama3", "mistral"]

_JSON_SPACE: Final = re.compile(r"[ \t\r\n]*")
_DECODER: Final = json.JSONDecoder()


def _hermes(text: CallText) -> Parse[list[ToolCall]]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; its end may lack before the next one, or at the end."""
    yield from text.spaces()
    calls = read_calls((yield from text.json()))
    yield from text.spaces()
    closed = yield from text.takes("</tool_call>")
    if not closed and not text.over and not (yield from text.sees("<tool_call>")):
        raise BrokenCallError
    return calls


def _llama3(text: CallText) -> Parse[list[ToolCall]]:
    """`{"name": …, "parameters": {…}}`, several with `;` or white space between them."""
    calls = yield from _declared(text)
    while True:
        end = text.at
        yield from text.spaces()
        yield from text.takes(";")
        yield from text.spaces()
        if text.over:
            return calls
        try:
            yield from text.takes("<|python_tag|>")
            calls += yield from _declared(text)
        except BrokenCallError:
            text.at = end
            return calls


def _declared(text: CallText) -> Parse[list[ToolCall]]:
    """One object, which has to name a tool and give arguments: nothing else tells it from an answer in JSON."""
    yield from text.spaces()
    begin = text.at
    if not (yield from text.takes("{")):
        raise BrokenCallError
    yield from text.spaces()
    for key in ("name", "parameters", "arguments", "type", "id"):
        if (yield from text.takes(f'"{key}"')):
            break
    else:
        raise BrokenCallError
    text.at = begin
    written = yield from text.json()
    calls = read_calls(written)
    if calls[0].name not in text.tools or not {"parameters", "arguments"}.intersection(_members(written)):
        raise BrokenCallError
    return calls


def _mistral(text: CallText) -> Parse[list[ToolCall]]:
    """`[TOOL_CALLS][{…}, {…}]`, or newer `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`, where the middle may lack."""
    yield from text.spaces()
    if (yield from text.letter()) in ("[", "{"):
        return read_calls((yield from text.json()))
    name = yield from text.name()
    yield from text.spaces()
    call_id = (yield from text.name()) if (yield from text.takes("[CALL_ID]")) else new_id()
    yield from text.takes("[ARGS]")
    yield from text.spaces()
    written = yield from text.json()
    arguments = _object(written)
    if arguments is None:
        raise BrokenCallError
    return [ToolCall(name, written, arguments, call_id)]


_HERMES: Final = CallFormat("hermes", ("<tool_call>",), ("<tool_call>", "</tool_call>"), _hermes)
_LLAMA3: Final = CallFormat("llama3", ("<|python_tag|>",), ("<|python_tag|>",), _llama3, bare=True)
_MISTRAL: Final = CallFormat("mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _mistral)
# Those with marks first: one without them finds its JSON in the others' too.
FORMATS: Final = {each.name: each for each in (_MISTRAL, _HERMES, _LLAMA3)}


def read_calls(text: str) -> list[ToolCall]:
    """The calls that a JSON object, or an array of them, describes. Raises BrokenCallError where one is none."""
    try:
        parse_object(f'{{"calls": {text}}}')
    except ValueError:
        raise BrokenCallError from None
    objects = [text] if text.startswith("{") else [value for _, value in _entries(text)]
    if not objects:
        raise BrokenCallError
    return [_call(each) for each in objects]


def _call(text: str) -> ToolCall:
    if not text.startswith("{"):
        raise BrokenCallError
    members = _members(text)
    name = json.loads(members.get("name", "null"))
    if not isinstance(name, str) or not is_name(name):
        raise BrokenCallError
    call_id = json.loads(members.get("id", "null"))
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if arguments.startswith('"'):  # some models write the object as text
        inner = json.loads(arguments)
        arguments = inner if _object(inner) is not None else arguments
    return ToolCall(name, arguments, _object(arguments), call_id if isinstance(call_id, str) and call_id else new_id())


def _object(text: str) -> dict[str, object] | None:
    try:
        return parse_object(text)
    except ValueError:
        return None


def _members(text: str) -> dict[str, str]:
    """The values of a JSON object as they are written, by key."""
    return dict(_entries(text))


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Keys and values, as they are written, of a JSON object or array that is known to be one; an array has no keys."""
    at = _skipped(text, 1)
    while text[at] not in "}]":
        key = ""
        if text[0] == "{":
            key, at = _DECODER.raw_decode(text, at)
            at = _skipped(text, _skipped(text, at) + 1)
        _, end = _DECODER.raw_decode(text, at)
        yield key, text[at:end]
        at = _skipped(text, end)
        if text[at] == ",":
            at = _skipped(text, at + 1)


def _skipped(text: str, at: int) -> int:
    space = _JSON_SPACE.match(text, at)
    return at if space is None else space.end()


# A call that stands nowhere else, with an id as Mistral's templates ask for.
_CALL: Final = ToolCall("probe_tool", '{"probe_argument": "é"}', {"probe_argument": "é"}, "call00001")
_TOOL: Final = Tool({"name": _CALL.name, "description": "d", "parameters": {"type": "object", "properties": {}}}, 80)
# No format begins with it.
_TEXT: Final = "~"
_ASKED: Final = (Message(Role.USER, "q"), Message(Role.ASSISTANT, "", tool_calls=(_CALL,)))
_ANSWERED: Final = (
    *_ASKED,
    Message(Role.TOOL, "5", name=_CALL.name, tool_call_id=_CALL.id),
    Message(Role.ASSISTANT, "a"),
)
_PROBES: Final = tuple(Conversation(turns, tools) for tools in ((_TOOL,), ()) for turns in (_ASKED, _ANSWERED))


def format_of(template: ChatTemplate) -> CallFormat | None:
    """The format in which a template writes an assistant's calls; None for one that is not known.

    A template that shows no calls at all may still tell the model how to write them.
    """
    shown = False
    for probe in _PROBES:
        try:
            written = _written(template, probe)
        except HermesError as error:
            if error.reason == "RENDER_LIMIT":
                break
            continue
        shown = shown or _CALL.name in written
        for each in FORMATS.values():
            if _is_read_by(each, written):
                return each
    if shown:
        return None
    texts = template.words.literals
    return next((each for each in FORMATS.values() if any(each.openings[0] in text for text in texts)), None)


def _written(template: ChatTemplate, probe: Conversation) -> str:
    """What the template writes for the call, but for what it writes for a text in its place too."""
    options = RenderOptions(add_generation_prompt=False)
    turns = tuple(Message(each.role, _TEXT) if each.tool_calls else each for each in probe.messages)
    told, called = (template.render(each, options) for each in (Conversation(turns, probe.tools), probe))
    begin = _shared(told, called)
    end = _shared(told[begin:][::-1], called[begin:][::-1])
    return called[begin : len(called) - end]


def _shared(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    return next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), len(one))


def _is_read_by(call_format: CallFormat, written: str) -> bool:
    parts = ToolCallFilter(call_format, (_CALL.name,), NO_MARKS).feed(written, last=True)
    return [(each.name, each.arguments) for each in parts if isinstance(each, ToolCall)] == [
        (_CALL.name, _CALL.arguments)
    ]
