"""Chat templates: a conversation in, the text that the model was trained on out."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, Protocol

from assembler import tools
from assembler.clock import Clock
from assembler.messages import Conversation
from assembler.turns import Page, Told
from assembler.words import Words
from shared.errors import HermesError, invalid_argument

# Templates may quote what the caller sent; errors are sentences, not prompts.
QUOTED_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """kwargs: extra template variables, JSON values. now: the time that it may print; else it looks itself."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    now: datetime | None = None


class ChatTemplate(Protocol):
    """version: digest of all that decides what this template writes, 64 hex digits.
    words: what it writes itself and what it looks for, by which control tokens are told from a caller's text.
    clock: what it takes from outside of the conversation.
    """

    @property
    def version(self) -> str: ...

    @property
    def words(self) -> Words: ...

    @property
    def clock(self) -> Clock: ...

    def check(self, conversation: Conversation, kwargs: Mapping[str, Any]) -> None:
        """Refuses what the template would leave out.

        Raises HermesError BAD_TEMPLATE_KWARGS, TOOLS_NOT_SHOWN or TOOL_CALLS_NOT_SHOWN.
        """

    def render(self, conversation: Conversation, options: RenderOptions) -> str:
        """The prompt's text. Raises HermesError TEMPLATE_ERROR with what the template said, or RENDER_LIMIT."""

    def write(self, conversation: Conversation, options: RenderOptions, told: Told | None = None) -> Page:
        """As `render`, going on from the conversation's beginning, if that was told with the same options."""


def render_options(
    *, add_generation_prompt: bool | None, continue_final_message: bool, kwargs_json: str, now: datetime | None = None
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
        now=now,
    )


def _kwargs(text: str) -> Mapping[str, Any]:
    if not text:
        return MappingProxyType({})
    try:
        return MappingProxyType(tools.parse_object(text))
    except ValueError as error:
        raise invalid_argument(
            "BAD_TEMPLATE_KWARGS",
            f'template_kwargs_json has to be a JSON object, such as {{"enable_thinking": false}}: {error}.',
            field="template_kwargs_json",
        ) from error


def bad_kwarg(name: str, problem: str) -> HermesError:
    """BAD_TEMPLATE_KWARGS for a variable that the caller cannot set."""
    return invalid_argument(
        "BAD_TEMPLATE_KWARGS",
        f"The template variable {name[:QUOTED_CHARACTERS]!r} {problem}: leave it out.",
        field="template_kwargs_json",
        name=name,
    )


def tools_not_shown() -> HermesError:
    """The template has no place for descriptions of tools."""
    return invalid_argument(
        "TOOLS_NOT_SHOWN",
        "The model's chat template does not show tools: send the chat without tools.",
        field="tools",
    )


def tool_calls_not_shown(message_index: int, name: str) -> HermesError:
    """The template leaves calls of tools out, in whatever form they come."""
    return invalid_argument(
        "TOOL_CALLS_NOT_SHOWN",
        f"Message {message_index} calls the tool {name[:QUOTED_CHARACTERS]!r}, but the model's chat template shows no "
        "tool calls: send the conversation without them.",
        field="tool_calls",
        message_index=str(message_index),
    )


def template_error(message: str) -> HermesError:
    """TEMPLATE_ERROR: the template does not take this conversation."""
    return invalid_argument("TEMPLATE_ERROR", message)


def digest(*parts: str) -> str:
    """SHA-256 over the parts, each framed by its length."""
    result = hashlib.sha256()
    for part in parts:
        data = part.encode()
        result.update(len(data).to_bytes(8, "little") + data)
    return result.hexdigest()


def digest_of(values: Mapping[str, Any]) -> str:
    """Digest of a mapping, whatever the order of its keys."""
    return digest(json.dumps(values, sort_keys=True, ensure_ascii=False))
