"""From a caller's prompt to token ids: the left column of the flow."""

import asyncio
import logging
import os
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from assembler import messages, template_files, templates, tokenizer, tokenizer_config
from assembler.control import Reading
from assembler.findings import Finding
from assembler.messages import UnknownRole
from assembler.order import OrderPolicy
from assembler.rendering import ControlPolicy, Rendered, Renderer
from assembler.templates import ChatTemplate
from assembler.tokenizer import TokenIds, Tokenizer
from hermes.v1 import assembler_pb2
from shared.errors import HermesError, failed_precondition, invalid_argument

T = TypeVar("T")

# Up to this, rendering and encoding take 2 ms; others wait longer for a thread that has work, and for what it holds.
_INLINE_CHARACTERS: Final = 49_152
# `tokenizers` takes 400 to 600 ns a character, fastokens 4 to 30.
_SLOWER: Final = 16
# A message costs a template about as much as so many characters (2.2 ms for 400 short messages).
_CHARACTERS_PER_MESSAGE: Final = 64
# Only one can render at a time, and each keeps words that the tokenizer has met: 10 to 30 MB as a rule, 110 at most.
_MOST_THREADS: Final = 4
# Of a logged prompt, from either end.
_LOGGED_CHARACTERS: Final = 80

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the assembler knows of the model, from its directory.

    context_length: prompt and answer together, in tokens; None where config.json does not say.
    vocab_size: ids of ready token prompts are below this.
    template: None where the model has none; then only text and ids can be assembled.
    tool_template: serves chats with tools, where the model has one of its own for them.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_length: int | None
    vocab_size: int
    tool_template: ChatTemplate | None = None


def load(directory: Path, template: str | None = None) -> ModelFiles:
    """Reads the model's tokenizer, template and limits; blocks for up to some seconds.

    template: name of a built-in one or a file, in place of the model's own.
    Raises StartupError.
    """
    declared = tokenizer_config.load(directory)
    chosen = template_files.choose(template, declared)
    texts = [text for each in chosen if each is not None for text in (*each.words.literals, *each.words.samples)]
    loaded = tokenizer.load(directory, declared.added, texts)
    config = tokenizer_config.read_json(directory / "config.json")
    return ModelFiles(
        tokenizer=loaded,
        template=chosen.plain,
        context_length=_limit(config, "max_position_embeddings"),
        vocab_size=_limit(config, "vocab_size") or loaded.vocabulary.size,
        tool_template=chosen.for_tools,
    )


def _limit(config: Any, name: str) -> int | None:
    """A number of config.json's, or of its part about text in models that know more than text."""
    if not isinstance(config, dict):
        return None
    value = config.get(name) or _limit(config.get("text_config"), name)
    return value if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class Order:
    """A prompt to assemble and the limits on it.

    max_tokens: the prompt may have this many; None is no limit.
    """

    prompt: assembler_pb2.Prompt
    max_tokens: int | None
    return_text: bool = False


@dataclass(frozen=True, slots=True)
class Policies:
    """How prompts are read. log_head_tail: the log gets the first and the last characters of each prompt."""

    unknown_role: UnknownRole = "error"
    order: OrderPolicy = field(default_factory=OrderPolicy)
    control_text: ControlPolicy = "encode"
    log_head_tail: bool = False


@dataclass(frozen=True, slots=True)
class Assembled:
    """text: where it was asked for. template_version: empty where no template had a part in it. seconds: time spent."""

    ids: TokenIds
    text: str | None
    template_version: str
    seconds: float
    findings: tuple[Finding, ...] = ()


class Assembler:
    """Assembles prompts for one model. Owns the threads on which long ones are worked on."""

    def __init__(self, files: ModelFiles, policies: Policies | None = None) -> None:
        self.files = files
        self._policies = policies or Policies()
        self._renderer = self._rendering(files.template)
        self._tool_renderer = self._rendering(files.tool_template) or self._renderer
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="assemble")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def assemble(self, order: Order) -> Assembled:
        """The prompt's token ids. Raises HermesError for everything that is wrong with the prompt."""
        started = time.perf_counter()
        version, text = "", None
        findings: tuple[Finding, ...] = ()
        _check_count(order)
        match order.prompt.WhichOneof("input"):
            case "chat":
                renderer = self._renderer_for(order.prompt.chat)
                rendered = await self._render(order.prompt.chat, renderer)
                reading, findings, version = rendered.reading, rendered.findings, renderer.template.version
                text = reading.text
                ids = await self._encode(reading, order.max_tokens)
            case "text":
                text = raw = order.prompt.text
                ids = await self._encode_raw(raw, order.max_tokens)
            case "token_ids":
                ids = self._checked(array("I", order.prompt.token_ids.ids))
            case _:
                raise invalid_argument(
                    "PROMPT_MISSING", "The request has no prompt: set chat, text or token_ids.", field="prompt"
                )
        _check_length(len(ids), order.max_tokens)
        if text is None and (order.return_text or self._policies.log_head_tail):
            text = self.files.tokenizer.decode(ids)
        if self._policies.log_head_tail and text is not None:
            _log.info("prompt of %d tokens: %s", len(ids), _head_tail(text))
        return Assembled(ids, text if order.return_text else None, version, time.perf_counter() - started, findings)

    def _rendering(self, template: ChatTemplate | None) -> Renderer | None:
        if template is None:
            return None
        return Renderer(template, self.files.tokenizer, self._policies.order, self._policies.control_text)

    def _renderer_for(self, chat: assembler_pb2.Chat) -> Renderer:
        renderer = self._tool_renderer if chat.tools else self._renderer
        if renderer is None:
            raise failed_precondition(
                "NO_CHAT_TEMPLATE",
                "The served model has no chat template: send the prompt as text, or add a chat_template.jinja to the "
                "model directory.",
            )
        return renderer

    async def _render(self, chat: assembler_pb2.Chat, renderer: Renderer) -> Rendered:
        def work() -> Rendered:
            options = templates.render_options(
                add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
                continue_final_message=chat.continue_final_message,
                kwargs_json=chat.template_kwargs_json,
            )
            return renderer.render(messages.canonical(chat, self._policies.unknown_role), options)

        # Bytes on the wire are about characters, and counting them is quick however many messages there are.
        return await self._worked(chat.ByteSize() + _CHARACTERS_PER_MESSAGE * len(chat.messages), work)

    async def _encode(self, reading: Reading, max_tokens: int | None) -> TokenIds:
        text, live = reading
        await self._refuse_early(text, max_tokens)
        if live is not None:
            return await self._worked(_SLOWER * len(text), lambda: self.files.tokenizer.encode_guarded(text, live))
        return await self._worked(self._work(text), lambda: self.files.tokenizer.encode(text))

    async def _encode_raw(self, text: str, max_tokens: int | None) -> TokenIds:
        await self._refuse_early(text, max_tokens)
        return await self._worked(self._work(text), lambda: self.files.tokenizer.encode_raw(text))

    def _work(self, text: str) -> int:
        """How much work encoding is, in characters of the quick library's."""
        return len(text) if self.files.tokenizer.library == "fastokens" else _SLOWER * len(text)

    async def _refuse_early(self, text: str, max_tokens: int | None) -> None:
        """Refuses what cannot fit, without encoding it."""
        if max_tokens is not None:
            least = await self._worked(len(text), lambda: self.files.tokenizer.least_tokens(text, above=max_tokens))
            if least > max_tokens:
                raise _too_long(f"at least {least}", max_tokens)

    async def _worked(self, characters: int, work: Callable[[], T]) -> T:
        if characters <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _checked(self, ids: TokenIds) -> TokenIds:
        highest = max(ids, default=0)
        if highest >= self.files.vocab_size:
            raise invalid_argument(
                "TOKEN_OUT_OF_VOCABULARY",
                f"Token {ids.index(highest)} of the prompt is {highest}, but the model's ids are below "
                f"{self.files.vocab_size}.",
                position=str(ids.index(highest)),
                token_id=str(highest),
                vocab_size=str(self.files.vocab_size),
            )
        return ids


def _check_count(order: Order) -> None:
    """Refuses what cannot fit by a count that costs nothing, before any work that others would have to wait for."""
    prompt, limit = order.prompt, order.max_tokens
    if limit is None:
        return
    if len(prompt.token_ids.ids) > limit:
        raise _too_long(str(len(prompt.token_ids.ids)), limit)
    if len(prompt.chat.messages) > limit:  # a template marks each of them with a token at least
        raise _too_long(f"{len(prompt.chat.messages)} messages, at least as many", limit)


def _check_length(tokens: int, max_tokens: int | None) -> None:
    if not tokens:
        raise invalid_argument("PROMPT_EMPTY", "The prompt has no tokens: send some text.", field="prompt")
    if max_tokens is not None and tokens > max_tokens:
        raise _too_long(str(tokens), max_tokens)


def _head_tail(text: str) -> str:
    """The first and last characters of a prompt, on one line."""
    if len(text) <= 2 * _LOGGED_CHARACTERS:
        return repr(text)
    return f"{text[:_LOGGED_CHARACTERS]!r} … {text[-_LOGGED_CHARACTERS:]!r}"


def _too_long(tokens: str, max_tokens: int) -> HermesError:
    return invalid_argument(
        "PROMPT_TOO_LONG",
        f"The prompt has {tokens} tokens, but no more than {max_tokens} are allowed: shorten it.",
        prompt_tokens=tokens,
        max_prompt_tokens=str(max_tokens),
    )
