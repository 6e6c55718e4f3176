"""A model's own Jinja template, rendered as transformers renders it."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import Enum
from typing import Any, Final

import jinja2
import jinja2.meta

from assembler import clock, probes, render_limits, words
from assembler.messages import Conversation, Message, Role
from assembler.probes import Renders
from assembler.render_limits import LimitExceededError, Run, limited
from assembler.sandbox import TemplateEnvironment, collect
from assembler.templates import (
    QUOTED_CHARACTERS,
    RenderOptions,
    bad_kwarg,
    digest,
    template_error,
    tool_calls_not_shown,
    tools_not_shown,
)
from assembler.tools import ToolCall
from assembler.traced import joined, own_of, written
from assembler.turns import Page, Told, Transcript, writing
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
# Marks around a message are 60 characters in most templates; some tell of a date or a reasoning mode with each.
_MESSAGE_CHARACTERS: Final = 500


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
        self.clock = clock.read(tree)
        self._named_tokens = {name: written(token) for name, token in named_tokens.items()}
        self._seconds = seconds
        # The environment's own functions stand behind these names; no caller may put a value in their place.
        self._taken = _OWN_VARIABLES | environment.globals.keys()
        self.version = digest(_RENDERER, source, *(part for pair in sorted(named_tokens.items()) for part in pair))
        self.call_form = self._find_call_form()
        form = self.call_form or CallForm.EMPTY_TEXT_MAPPING
        self.words = words.read(tree, environment.written, self._renders(form))
        self._apart = environment.apart
        if self._apart is not None and not self._goes_on():
            self._apart = None

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
        return self.write(conversation, options).text

    def write(self, conversation: Conversation, options: RenderOptions, told: Told | None = None) -> Page:
        if options.continue_final_message:
            return Page(self._render_open(conversation, options))
        form = self.call_form or CallForm.EMPTY_TEXT_MAPPING
        known, budget = ((), 0) if told is None else (told.data, told.budget)
        new = conversation.messages[len(known) :]
        data = (*known, *[_as_template_data(message, form) for message in new])
        budget += _budget(new[:-1])
        transcript = self._render(conversation, data, options, budget + _budget(new[-1:]), told=told)
        if self._apart is None:
            return Page(joined(transcript.pieces))
        return transcript.page(conversation.messages, data, budget, sees_next=self._apart.sees_next)

    def _render(
        self,
        conversation: Conversation,
        data: Sequence[dict[str, Any]],
        options: RenderOptions,
        budget: int,
        *,
        told: Told | None = None,
        seconds: float | None = None,
    ) -> Transcript:
        """data: the messages. budget: characters that they may become."""
        transcript = Transcript(told)
        tools = conversation.tools
        run = Run(
            deadline=time.monotonic() + (self._seconds if seconds is None else seconds),
            characters=_OWN_CHARACTERS
            + budget
            + _GROWTH * (sum(tool.characters for tool in tools) + render_limits.measured(options.kwargs, {})),
            now=options.now or datetime.now(),  # noqa: DTZ005 - templates print the local date, and %Z stays empty
        )
        try:
            with limited(run), writing(transcript):
                context = self._template.new_context(
                    {
                        "documents": None,
                        **self._named_tokens,
                        **options.kwargs,
                        "messages": transcript.messages(data),
                        "tools": [{"type": "function", "function": tool.function} for tool in tools] or None,
                        "add_generation_prompt": options.add_generation_prompt,
                    }
                )
                begun = 0 if told is None else told.length
                collect(self._template.root_render_func(context), transcript.pieces, begun)
                return transcript
        except LimitExceededError as error:
            raise invalid_argument(
                "RENDER_LIMIT",
                f"The model's chat template was stopped on this conversation, because {error}: shorten it.",
                limit=error.limit,
            ) from error
        except Exception as error:
            # A template is the model's code: whatever it raises is its opinion of this conversation, not our fault.
            raise template_error(f"The model's chat template refuses this conversation: {_said(error)}.") from error

    def _render_open(self, conversation: Conversation, options: RenderOptions) -> str:
        """The prompt up to the last character of the last message, as transformers cuts it."""
        last = conversation.messages[-1]
        if last.role is not Role.ASSISTANT:
            raise invalid_argument(
                "NOTHING_TO_CONTINUE",
                f"continue_final_message goes on with an assistant message, but the last one is a {last.role} message.",
                field="continue_final_message",
            )
        mark = _unique(_END_MARK, conversation)
        marked = last._replace(content=last.content + mark + " ")
        text = self.render(
            replace(conversation, messages=(*conversation.messages[:-1], marked)),
            replace(options, continue_final_message=False),
        )
        end = text.rfind(mark)
        if end < 0 or last.content.strip() not in text:
            raise template_error(
                "continue_final_message cannot be done: the model's chat template does not write the last message as "
                "it is."
            )
        spacing_kept = text.startswith(mark + " ", end)
        return text[:end] if spacing_kept else text[:end].rstrip()

    def _goes_on(self) -> bool:
        """Whether conversations that go on come out as when they are written whole."""
        for conversation in probes.GROWN:
            told: Told | None = None
            for count in range(1, len(conversation.messages) + 1):
                grown = replace(conversation, messages=conversation.messages[:count])
                try:
                    page, whole = self.write(grown, _DEFAULT_OPTIONS, told), self.render(grown, _DEFAULT_OPTIONS)
                except HermesError as error:
                    if error.reason == "RENDER_LIMIT":  # nor will the others come to an end
                        return False
                    continue  # it refuses such a conversation, or one that ends so
                if page.text != whole or own_of(page.text) != own_of(whole):
                    return False
                told = page.told
        return True

    def _find_call_form(self) -> CallForm | None:
        """The first form in which the template shows a call, as far as a try can tell."""
        for form in CallForm:
            for text in self._tries(probes.CALLED, form):
                if probes.shows_call(text):
                    return form
        return None

    def _renders(self, form: CallForm) -> Renders:
        closed = RenderOptions(add_generation_prompt=False)
        return Renders(
            samples=tuple(self._tries(probes.SAMPLES, form)),
            asked=tuple(self._tries(probes.ASKED, form, closed)),
            told=tuple(self._tries(probes.TOLD, form, closed)),
            answered=tuple(self._tries(probes.ANSWERED, form, closed)),
        )

    def _tries(
        self,
        conversations: Iterable[Conversation],
        form: CallForm,
        options: RenderOptions = _DEFAULT_OPTIONS,
    ) -> Iterator[str]:
        """What the template makes of simple conversations, without those that it refuses."""
        for conversation in conversations:
            data = [_as_template_data(message, form) for message in conversation.messages]
            budget, seconds = _budget(conversation.messages), min(self._seconds, _PROBE_SECONDS)
            try:
                yield joined(self._render(conversation, data, options, budget, seconds=seconds).pieces)
            except HermesError as error:
                if error.reason == "RENDER_LIMIT":  # nor will it come to an end with the others
                    return


# Callers choose a role, but do not write it; templates build marks of it.
_ROLES: Final = {role: written(str(role)) for role in Role}


def _as_template_data(message: Message, form: CallForm) -> dict[str, Any]:
    """The message as transformers hands it to a template: absent keys are absent, not None."""
    data: dict[str, Any] = {"role": _ROLES[message.role]}
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


def _budget(messages: Iterable[Message]) -> int:
    """Characters that messages may become."""
    return sum(
        _MESSAGE_CHARACTERS * (1 + len(message.tool_calls)) + _GROWTH * message.characters for message in messages
    )


def _call_data(call: ToolCall, form: CallForm) -> dict[str, Any]:
    arguments = call.arguments if form.has_mapping and call.arguments is not None else call.text
    data: dict[str, Any] = {} if call.id is None else {"id": call.id}
    return data | {"type": "function", "function": {"name": call.name, "arguments": arguments}}


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
