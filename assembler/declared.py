"""Declared templates: a table of role tags and separators in TOML, for models whose format needs no more."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from assembler.clock import Clock
from assembler.messages import Conversation, Message, Role
from assembler.templates import (
    RenderOptions,
    bad_kwarg,
    digest_of,
    template_error,
    tool_calls_not_shown,
    tools_not_shown,
)
from assembler.tools import ToolCall
from assembler.traced import joined, written
from assembler.turns import Page, Told
from assembler.words import Words
from shared.errors import StartupError, invalid_argument

# Special tokens that a table may have in its texts, by the names that the tokenizer has for them.
_NAMED: Final = ("bos_token", "eos_token")
_LINE_END: Final = written("\n")

_Text: TypeAlias = Annotated[str, AfterValidator(written)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tags(_Table):
    """Texts around a message."""

    open: _Text
    close: _Text


class Roles(_Table):
    """system and tool: None where the format has no place for such a message."""

    user: Tags
    assistant: Tags
    system: Tags | None = None
    tool: Tags | None = None
    """Around all results that follow each other; `tools.result` is around each."""


class ToolFragments(_Table):
    """How tools are told to the model, how it calls them, and how their results come."""

    list: Tags
    """Around the descriptions, each a line of JSON, at the end of the system text."""
    call: Tags
    """Around a call's JSON, `{"name": …, "arguments": …}`; calls and the text before them are on lines of their own."""
    result: Tags


class Format(_Table):
    """A declared template as its file has it. `{bos_token}` and `{eos_token}` stand for the tokenizer's own."""

    about: str
    begin: _Text = written("")
    """Before everything."""
    generation: _Text
    """Opens the answer."""
    system: Literal["first", "in_first_user", "as_message"]
    """Where a system message goes: before the others alone, into the first user message, or wherever it stands."""
    default_system: _Text | None = None
    """System text of conversations that have none."""
    trim: Literal["none", "text", "turn"] = "none"
    """White space taken off: none, around each message's text, or around all that stands between a message's tags."""
    alternate: bool = False
    """Whether user and assistant have to take turns, the user first."""
    roles: Roles
    tools: ToolFragments | None = None


class DeclaredTemplate:
    """Renders by a declared format."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], name: str) -> None:
        """source: TOML text. name: what an operator knows it by. Raises StartupError."""
        try:
            table = tomllib.loads(source)
            self._format = Format.model_validate(_filled(table, named_tokens))
        except (tomllib.TOMLDecodeError, ValidationError, KeyError) as error:
            raise StartupError(f"The template {name} cannot be used: {_first_line(error)}.") from error
        values = self._format.model_dump(exclude={"about"})
        self.version = digest_of({"kind": "declared", "format": values})
        self.clock = Clock()
        self.words = Words(literals=tuple(sorted(set(_texts(values)))))

    def check(self, conversation: Conversation, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            raise bad_kwarg(name, "is never read by a declared template")
        if self._format.tools is not None:
            return
        if conversation.tools:
            raise tools_not_shown()
        for index, message in enumerate(conversation.messages):
            if message.tool_calls:
                raise tool_calls_not_shown(index, message.tool_calls[0].name)

    def write(self, conversation: Conversation, options: RenderOptions, told: Told | None = None) -> Page:  # noqa: ARG002
        return Page(self.render(conversation, options))

    def render(self, conversation: Conversation, options: RenderOptions) -> str:
        if options.continue_final_message and conversation.messages[-1].role is not Role.ASSISTANT:
            raise invalid_argument(
                "NOTHING_TO_CONTINUE",
                "continue_final_message goes on with an assistant message, but the last one is a "
                f"{conversation.messages[-1].role} message.",
                field="continue_final_message",
            )
        text: str = joined([self._format.begin, *self._turns(conversation)])
        if options.continue_final_message:
            text = text.removesuffix(self._format.roles.assistant.close)
        return text + self._format.generation if options.add_generation_prompt else text

    def _turns(self, conversation: Conversation) -> Iterator[str]:
        messages = list(conversation.messages)
        system = messages.pop(0).content if messages[0].role is Role.SYSTEM else self._format.default_system
        system = self._with_tools(system, conversation)
        if system is not None and self._format.system != "in_first_user":
            yield self._tagged(self._tags(Role.SYSTEM), self._text(system))
        opening = ""
        if system is not None and self._format.system == "in_first_user":
            tags = self._tags(Role.SYSTEM)
            opening = tags.open + system + tags.close
        self._check_order(messages)
        for role, group in groupby(messages, lambda message: message.role):
            if role is Role.TOOL:
                yield self._results([message.content for message in group])
                continue
            for message in group:
                yield self._tagged(self._tags(role), opening + self._body(message))
                opening = ""

    def _check_order(self, messages: list[Message]) -> None:
        if self._format.system != "as_message" and any(message.role is Role.SYSTEM for message in messages):
            raise template_error("The chat template takes a system message at the beginning alone.")
        if self._format.system == "in_first_user" and (not messages or messages[0].role is not Role.USER):
            raise template_error("The chat template takes a user message first.")
        turns = [message.role for message in messages if message.role is not Role.TOOL]
        if self._format.alternate and any(
            role is not (Role.USER, Role.ASSISTANT)[place % 2] for place, role in enumerate(turns)
        ):
            raise template_error("The chat template takes user and assistant messages in turn, a user's first.")

    def _tags(self, role: Role) -> Tags:
        tags: Tags | None = getattr(self._format.roles, role)
        if tags is None:
            raise template_error(f"The chat template has no place for {role} messages.")
        return tags

    def _text(self, text: str) -> str:
        return text.strip() if self._format.trim == "text" else text

    def _tagged(self, tags: Tags, body: str) -> str:
        return tags.open + (body.strip() if self._format.trim == "turn" else body) + tags.close

    def _body(self, message: Message) -> str:
        parts = [self._text(message.content)] if message.content or not message.tool_calls else []
        return _LINE_END.join([*parts, *map(self._call, message.tool_calls)])

    def _with_tools(self, system: str | None, conversation: Conversation) -> str | None:
        if not conversation.tools or self._format.tools is None:
            return system
        lines = _LINE_END.join(_json({"type": "function", "function": tool.function}) for tool in conversation.tools)
        tags = self._format.tools.list
        return joined([*((system, _LINE_END, _LINE_END) if system else ()), tags.open, lines, tags.close])

    def _call(self, call: ToolCall) -> str:
        if self._format.tools is None:
            return ""
        arguments = call.text if call.arguments is None else _json(call.arguments)
        tags = self._format.tools.call
        return joined([tags.open, f'{{"name": {_json(call.name)}, "arguments": {arguments}}}', tags.close])

    def _results(self, results: list[str]) -> str:
        tags = self._tags(Role.TOOL)
        around = self._format.tools.result if self._format.tools is not None else Tags(open="", close="")
        texts = [around.open + self._text(result) + around.close for result in results]
        return joined([tags.open, *texts, tags.close])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _filled(value: Any, named_tokens: Mapping[str, str]) -> Any:
    """The table with the tokenizer's tokens in it. Raises KeyError for one that the tokenizer does not have."""
    if isinstance(value, dict):
        return {key: _filled(each, named_tokens) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    for name in _NAMED:
        if f"{{{name}}}" in value:
            if name not in named_tokens:
                raise KeyError(f"it needs the tokenizer's {name}, but the model has none")
            value = value.replace(f"{{{name}}}", named_tokens[name])
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        # A word that is unknown tells more than one that is missing, often for being misspelt.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return str(error.args[0]).partition("\n")[0].rstrip(".")
