"""Chat templates: a conversation in, the text that the model was trained on out."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from assembler.messages import Conversation, Message, Role
from shared.errors import HermesError, StartupError, invalid_argument

# Options that change what a template writes; part of its version, so that a change of them is a change of prompts.
_RENDERER: Final = "jinja2 as in transformers 5.24"
# Templates may quote what the caller sent; errors are sentences, not prompts.
_QUOTED_CHARACTERS: Final = 300
# Arguments that transformers gives a template itself.
_OWN_VARIABLES: Final = frozenset({"messages", "tools", "add_generation_prompt"})
# The words that transformers marks the end of a final message with; the trailing space tells whether a template trims.
_END_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG"


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """kwargs: extra template variables, JSON values."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class ChatTemplate(Protocol):
    """version: digest of all that decides what this template writes, 64 hex digits."""

    @property
    def version(self) -> str: ...

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Raises HermesError BAD_TEMPLATE_KWARGS for a variable that the template never reads."""

    def render(self, conversation: Conversation, options: RenderOptions) -> str:
        """The prompt's text. Raises HermesError TEMPLATE_ERROR with what the template said."""


def render_options(
    *, add_generation_prompt: bool | None, continue_final_message: bool, kwargs_json: str
) -> RenderOptions:
    """Options as a chat asks for them. Raises HermesError GENERATION_PROMPT_CONFLICT or BAD_TEMPLATE_KWARGS."""
    if add_generation_prompt and continue_final_message:
        raise invalid_argument(
            "GENERATION_PROMPT_CONFLICT",
            "add_generation_prompt opens a new answer and continue_final_message goes on with the last one: "
            "set one of them.",
        )
    return RenderOptions(
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        kwargs=_kwargs(kwargs_json),
    )


def _kwargs(text: str) -> Mapping[str, Any]:
    if not text:
        return MappingProxyType({})
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can be escaped, but never be text
    except (ValueError, RecursionError) as error:
        raise invalid_argument(
            "BAD_TEMPLATE_KWARGS", f"template_kwargs_json is not valid JSON: {error}.", field="template_kwargs_json"
        ) from error
    if not isinstance(value, dict):
        raise invalid_argument(
            "BAD_TEMPLATE_KWARGS",
            'template_kwargs_json has to be a JSON object, such as {"enable_thinking": false}.',
            field="template_kwargs_json",
        )
    return MappingProxyType(value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class JinjaTemplate:
    """A model's own template, rendered in jinja2's immutable sandbox with what transformers gives it."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        """named_tokens: special tokens by the names that templates read, such as bos_token. Raises StartupError."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise StartupError(
                f"The model's chat template has an error in line {error.lineno} ({error.message}): repair it, or "
                "remove it to serve text prompts alone."
            ) from error
        self._source = source
        self._named_tokens = dict(named_tokens)
        # The environment's own functions stand behind these names; no caller may put a value in their place.
        self._taken = _OWN_VARIABLES | environment.globals.keys()
        self.version = _digest(_RENDERER, source, *(part for pair in sorted(named_tokens.items()) for part in pair))

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in self._taken:
                problem = "is set by the server"
            elif name not in self._variables:
                problem = "is never read by the model's chat template"
            else:
                continue
            raise invalid_argument(
                "BAD_TEMPLATE_KWARGS",
                f"The template variable {name[:_QUOTED_CHARACTERS]!r} {problem}: leave it out.",
                field="template_kwargs_json",
                name=name,
            )

    def render(self, conversation: Conversation, options: RenderOptions) -> str:
        messages = [_as_template_data(message) for message in conversation.messages]
        if options.continue_final_message:
            return self._render_open(conversation, messages, options)
        return self._render(messages, options)

    def _render(self, messages: list[dict[str, str]], options: RenderOptions) -> str:
        try:
            return self._template.render(
                {
                    "documents": None,
                    **self._named_tokens,
                    **options.kwargs,
                    "messages": messages,
                    "tools": None,
                    "add_generation_prompt": options.add_generation_prompt,
                }
            )
        except Exception as error:
            # A template is the model's code: whatever it raises is its opinion of this conversation, not our fault.
            raise _template_error(f"The model's chat template refuses this conversation: {_said(error)}.") from error

    def _render_open(self, conversation: Conversation, messages: list[dict[str, str]], options: RenderOptions) -> str:
        """The prompt up to the last character of the last message, as transformers cuts it."""
        last = conversation.messages[-1]
        if last.role is not Role.ASSISTANT:
            raise invalid_argument(
                "NOTHING_TO_CONTINUE",
                f"continue_final_message goes on with an assistant message, but the last one is a {last.role} message.",
                field="continue_final_message",
            )
        mark = _unique(_END_MARK, conversation)
        messages[-1]["content"] += mark + " "
        text = self._render(messages, options)
        end = text.rfind(mark)
        if end < 0 or last.content.strip() not in text:
            raise _template_error(
                "continue_final_message cannot be done: the model's chat template does not write the last message as "
                "it is."
            )
        spacing_kept = text.startswith(mark + " ", end)
        return text[:end] if spacing_kept else text[:end].rstrip()


def _as_template_data(message: Message) -> dict[str, str]:
    """The message as transformers hands it to a template: absent keys are absent, not None."""
    data = {"role": str(message.role), "content": message.content}
    if message.name is not None:
        data["name"] = message.name
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:  # under each of the names that templates read
        data |= dict.fromkeys(("thinking", "reasoning", "reasoning_content"), message.reasoning)
    return data


def _unique(mark: str, conversation: Conversation) -> str:
    texts = [text for message in conversation.messages for text in (message.content, message.reasoning or "")]
    while any(mark in text for text in texts):
        mark += "_"
    return mark


def _template_error(message: str) -> HermesError:
    return invalid_argument("TEMPLATE_ERROR", message)


def _said(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or "no reason given"
    if not isinstance(error, jinja2.TemplateError):
        text = f"{type(error).__name__}: {text}"
    return text[:_QUOTED_CHARACTERS]


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What `transformers.utils.chat_template_utils` compiles templates in."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _TemplateDict(),
        "namespace": _TemplateNamespace,
    }
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; a prompt just has what is in it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block and not the bare body, because what a template sets inside is not seen outside.
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` for templates: makes dictionaries, and is not the type itself, which is a way out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` without underscored attributes, which would lead to Python's insides."""

    # No named parameters, so that a template can give its namespace an attribute "self".
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, positional = args[0], args[1:]
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _TemplateNamespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the underscored attribute {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes and in the caller's key order, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates print the local date, and %Z stays empty
