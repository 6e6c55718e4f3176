"""A model's own Jinja template, rendered as transformers renders it."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from enum import Enum
from typing import Any, Final

import jinja2
import jinja2.meta

from assembler import clock, words
from assembler.messages import Conversation, Message, Role
from assembler.sandbox import LimitExceededError, Run, TemplateEnvironment, limited
from assembler.templates import (
    QUOTED_CHARACTERS,
    RenderOptions,
    bad_kwarg,
    digest,
    template_error,
    tool_calls_not_shown,
    tools_not_shown,
)
from assembler.tools import Tool, ToolCall
from shared.errors import HermesError, StartupError, invalid_argument

# Options that change what a template writes; part of its version, so that a change of them is a change of prompts.
_RENDERER: Final = "jinja2 as in transformers 5.24"
# Arguments that transformers gives a template itself.
_OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})
# The words that transformers marks the end of a final message with; the trailing space tells whether a template trims.
_END_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG"
# Simple conversations take a template less than a thousandth of this.
_PROBE_SECONDS: Final = 1.0
# A render of 10,000 messages takes 0.06 s; templates that go through all messages for each take seconds.
RENDER_SECONDS: Final = 10.0
# A text may be this many times what the caller sent, for escapes and repeated tools, and this much for the template.
_GROWTH: Final = 8
_OWN_CHARACTERS: Final = 1_000_000


_DEFAULT_OPTIONS: Final = RenderOptions()


class CallForm(Enum):
    """Forms of a message with tool calls that templates can show; most can show the first."""

    EMPTY_TEXT_MAPPING = ("empty", "mapping")
    ABSENT_TEXT_JSON = ("absent", "json")
    EMPTY_TEXT_JSON = ("empty", "json")
    ABSENT_TEXT_MAPPING = ("absent", "mapping")

    @property
    def keeps_empty_text(self) -> bool:
        return self.value[0] == "empty"

    @property
    def has_mapping(self) -> bool:
        return self.value[1] == "mapping"


class JinjaTemplate:
    """Renders in jinja2's immutable sandbox, with what transformers gives a template and within limits."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], seconds: float = RENDER_SECONDS) -> None:
        """named_tokens: special tokens by the names that templates read, such as bos_token. seconds: for one render.

        Raises StartupError.
        """
        environment = TemplateEnvironment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            self._variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(
                f"The model's chat template has an error in line {error.lineno} ({error.message}): repair it, or "
                "remove it to serve text prompts alone."
            ) from error
        except Exception as error:  # constants are worked out at once, and can be wrong in any way
            raise StartupError(
                f"The model's chat template cannot be compiled ({_said(error)}): repair it, or remove it to serve text "
                "prompts alone."
            ) from error
        self.words = words.read(tree)
        self.clock = clock.read(tree)
        self._named_tokens = dict(named_tokens)
        self._seconds = seconds
        # The environment's own functions stand behind these names; no caller may put a value in their place.
        self._taken = _OWN_VARIABLES | environment.globals.keys()
        self.version = digest(_RENDERER, source, *(part for pair in sorted(named_tokens.items()) for part in pair))
        self.call_form = self._find_call_form()
        form = self.call_form or CallForm.EMPTY_TEXT_MAPPING
        self.words = replace(
            self.words,
            samples=tuple(self._tries(_SAMPLES, form)),
            turns="".join(self._tries([_TURNS], form, RenderOptions(add_generation_prompt=False))),
        )

    def check(self, conversation: Conversation, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in self._taken:
                raise bad_kwarg(name, "is set by the server")
            if name not in self._variables:
                raise bad_kwarg(name, "is never read by the model's chat template")
        if conversation.tools and "tools" not in self._variables:
            raise tools_not_shown()
        if self.call_form is None:
            for index, message in enumerate(conversation.messages):
                if message.tool_calls:
                    raise tool_calls_not_shown(index, message.tool_calls[0].name)

    def render(self, conversation: Conversation, options: RenderOptions) -> str:
        form = self.call_form or CallForm.EMPTY_TEXT_MAPPING
        messages = [_as_template_data(message, form) for message in conversation.messages]
        if options.continue_final_message:
            return self._render_open(conversation, messages, options)
        return self._render(conversation, messages, options)

    def _render(
        self,
        conversation: Conversation,
        messages: list[dict[str, Any]],
        options: RenderOptions,
        seconds: float | None = None,
    ) -> str:
        run = Run(
            deadline=time.monotonic() + (self._seconds if seconds is None else seconds),
            characters=_OWN_CHARACTERS + _GROWTH * conversation.characters,
            now=options.now or datetime.now(),  # noqa: DTZ005 - templates print the local date, and %Z stays empty
        )
        tools = [{"type": "function", "function": tool.function} for tool in conversation.tools]
        try:
            with limited(run):
                return self._template.render(
                    {
                        "documents": None,
                        **self._named_tokens,
                        **options.kwargs,
                        "messages": messages,
                        "tools": tools or None,
                        "add_generation_prompt": options.add_generation_prompt,
                    }
                )
        except LimitExceededError as error:
            raise invalid_argument(
                "RENDER_LIMIT",
                f"The model's chat template was stopped on this conversation, because {error}: shorten it.",
                limit=error.limit,
            ) from error
        except Exception as error:
            # A template is the model's code: whatever it raises is its opinion of this conversation, not our fault.
            raise template_error(f"The model's chat template refuses this conversation: {_said(error)}.") from error

    def _render_open(self, conversation: Conversation, messages: list[dict[str, Any]], options: RenderOptions) -> str:
        """The prompt up to the last character of the last message, as transformers cuts it."""
        last = conversation.messages[-1]
        if last.role is not Role.ASSISTANT:
            raise invalid_argument(
                "NOTHING_TO_CONTINUE",
                f"continue_final_message goes on with an assistant message, but the last one is a {last.role} message.",
                field="continue_final_message",
            )
        mark = _unique(_END_MARK, conversation)
        messages[-1]["content"] = last.content + mark + " "
        text = self._render(conversation, messages, options)
        end = text.rfind(mark)
        if end < 0 or last.content.strip() not in text:
            raise template_error(
                "continue_final_message cannot be done: the model's chat template does not write the last message as "
                "it is."
            )
        spacing_kept = text.startswith(mark + " ", end)
        return text[:end] if spacing_kept else text[:end].rstrip()

    def _find_call_form(self) -> CallForm | None:
        """The first form in which the template shows a call, as far as a try can tell."""
        for form in CallForm:
            for text in self._tries(_PROBES, form):
                # Python's own way of writing a mapping is not JSON: that template wants text.
                if all(word in text for word in _PROBE_WORDS) and f"'{_PROBE_WORDS[1]}': " not in text:
                    return form
        return None

    def _tries(
        self,
        conversations: Iterable[Conversation],
        form: CallForm,
        options: RenderOptions = _DEFAULT_OPTIONS,
    ) -> Iterator[str]:
        """What the template makes of simple conversations, without those that it refuses."""
        for conversation in conversations:
            messages = [_as_template_data(message, form) for message in conversation.messages]
            try:
                yield self._render(conversation, messages, options, min(self._seconds, _PROBE_SECONDS))
            except HermesError as error:
                if error.reason == "RENDER_LIMIT":  # nor will it come to an end with the others
                    return


def _as_template_data(message: Message, form: CallForm) -> dict[str, Any]:
    """The message as transformers hands it to a template: absent keys are absent, not None."""
    data: dict[str, Any] = {"role": str(message.role)}
    if message.content or not message.tool_calls or form.keeps_empty_text:
        data["content"] = message.content
    if message.name is not None:
        data["name"] = message.name
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:  # under each of the names that templates read
        data |= dict.fromkeys(("thinking", "reasoning", "reasoning_content"), message.reasoning)
    if message.tool_calls:
        data["tool_calls"] = [_call_data(call, form) for call in message.tool_calls]
    return data


def _call_data(call: ToolCall, form: CallForm) -> dict[str, Any]:
    arguments = call.arguments if form.has_mapping and call.arguments is not None else call.text
    data: dict[str, Any] = {} if call.id is None else {"id": call.id}
    return data | {"type": "function", "function": {"name": call.name, "arguments": arguments}}


# A name, an argument's name and its value, which stand nowhere else; an id of nine letters and digits, as Mistral's
# templates ask for.
_PROBE_WORDS: Final = ("probe_tool", "probe_argument", "probe value")
_PROBE_CALL: Final = ToolCall(
    "probe_tool", '{"probe_argument": "probe value"}', {"probe_argument": "probe value"}, "call00001"
)
_PROBE_TOOL: Final = Tool(
    {"name": "other_tool", "description": "d", "parameters": {"type": "object", "properties": {}}}, 80
)
_PROBE_TURNS: Final = (
    Message(Role.USER, "q"),
    Message(Role.ASSISTANT, "", tool_calls=(_PROBE_CALL,)),
    Message(Role.TOOL, "5", name="probe_tool", tool_call_id="call00001"),
    Message(Role.ASSISTANT, "a"),
)
_PROBES: Final = (
    Conversation(_PROBE_TURNS, (_PROBE_TOOL,)),
    Conversation(_PROBE_TURNS[:2], (_PROBE_TOOL,)),
    Conversation(_PROBE_TURNS),
    Conversation(_PROBE_TURNS[:2]),
)


_TURNS: Final = Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "a"), Message(Role.USER, "r")))
_SAMPLES: Final = (
    *_PROBES,
    Conversation((Message(Role.SYSTEM, "s"), Message(Role.USER, "q"), Message(Role.ASSISTANT, "a", reasoning="r"))),
    Conversation((Message(Role.SYSTEM, "s"), Message(Role.USER, "q")), (_PROBE_TOOL,)),
    _TURNS,
)


def _unique(mark: str, conversation: Conversation) -> str:
    texts = [text for message in conversation.messages for text in (message.content, message.reasoning or "")]
    while any(mark in text for text in texts):
        mark += "_"
    return mark


def _said(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or "no reason given"
    if not isinstance(error, jinja2.TemplateError):
        text = f"{type(error).__name__}: {text}"
    return text[:QUOTED_CHARACTERS]
