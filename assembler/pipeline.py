"""From a caller's prompt to token ids: the left column of the flow."""

import asyncio
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from assembler import messages, templates, tokenizer, tokenizer_config
from assembler.messages import UnknownRole
from assembler.templates import ChatTemplate
from assembler.tokenizer import TokenIds, Tokenizer
from hermes.v1 import assembler_pb2
from shared.errors import HermesError, failed_precondition, invalid_argument

T = TypeVar("T")

# Above this, rendering and encoding take longer than handing the work to a thread, and long enough to delay others.
_INLINE_CHARACTERS: Final = 32_768
# A message costs a template about as much as so many characters (2.2 ms for 400 short messages).
_CHARACTERS_PER_MESSAGE: Final = 64


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the assembler knows of the model, from its directory.

    context_length: prompt and answer together, in tokens; None where config.json does not say.
    vocab_size: ids of ready token prompts are below this.
    template: None where the model has none; then only text and ids can be assembled.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_length: int | None
    vocab_size: int


def load(directory: Path) -> ModelFiles:
    """Reads the model's tokenizer, template and limits; blocks for up to some seconds. Raises StartupError."""
    declared = tokenizer_config.load(directory)
    loaded = tokenizer.load(directory, declared.added)
    template = declared.chat_template
    config = tokenizer_config.read_json(directory / "config.json")
    return ModelFiles(
        tokenizer=loaded,
        template=None if template is None else templates.JinjaTemplate(template, declared.named),
        context_length=_limit(config, "max_position_embeddings"),
        vocab_size=_limit(config, "vocab_size") or loaded.vocabulary.size,
    )


def _limit(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name) or (config.get("text_config") or {}).get(name)
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
class Assembled:
    """text: where it was asked for. template_version: empty where no template had a part in it. seconds: time spent."""

    ids: TokenIds
    text: str | None
    template_version: str
    seconds: float


class Assembler:
    """Assembles prompts for one model. Owns the threads on which long ones are worked on."""

    def __init__(self, files: ModelFiles, unknown_role: UnknownRole) -> None:
        self.files = files
        self._unknown_role = unknown_role
        self._threads = ThreadPoolExecutor(thread_name_prefix="assemble")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def assemble(self, order: Order) -> Assembled:
        """The prompt's token ids. Raises HermesError for everything that is wrong with the prompt."""
        started = time.perf_counter()
        version, text = "", None
        match order.prompt.WhichOneof("input"):
            case "chat":
                template = self._template()
                text = await self._render(order.prompt.chat, template)
                version = template.version
                ids = await self._encode(text, self.files.tokenizer.encode, order.max_tokens)
            case "text":
                text = order.prompt.text
                ids = await self._encode(text, self.files.tokenizer.encode_raw, order.max_tokens)
            case "token_ids":
                ids = self._checked(array("I", order.prompt.token_ids.ids))
            case _:
                raise invalid_argument(
                    "PROMPT_MISSING", "The request has no prompt: set chat, text or token_ids.", field="prompt"
                )
        _check_length(len(ids), order.max_tokens)
        if not order.return_text:
            text = None
        elif text is None:
            text = self.files.tokenizer.decode(ids)
        return Assembled(ids, text, version, time.perf_counter() - started)

    def _template(self) -> ChatTemplate:
        if self.files.template is None:
            raise failed_precondition(
                "NO_CHAT_TEMPLATE",
                "The served model has no chat template: send the prompt as text, or add a chat_template.jinja to the "
                "model directory.",
            )
        return self.files.template

    async def _render(self, chat: assembler_pb2.Chat, template: ChatTemplate) -> str:
        conversation = messages.canonical(chat, self._unknown_role)
        options = templates.render_options(
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
            continue_final_message=chat.continue_final_message,
            kwargs_json=chat.template_kwargs_json,
        )
        template.check_kwargs(options.kwargs)
        work = conversation.characters + _CHARACTERS_PER_MESSAGE * len(conversation.messages)
        return await self._worked(work, lambda: template.render(conversation, options))

    async def _encode(self, text: str, encode: Callable[[str], TokenIds], max_tokens: int | None) -> TokenIds:
        least = self.files.tokenizer.least_tokens(text)
        if max_tokens is not None and least > max_tokens:
            raise _too_long(f"at least {least}", max_tokens)
        return await self._worked(len(text), lambda: encode(text))

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


def _check_length(tokens: int, max_tokens: int | None) -> None:
    if not tokens:
        raise invalid_argument("PROMPT_EMPTY", "The prompt has no tokens: send some text.", field="prompt")
    if max_tokens is not None and tokens > max_tokens:
        raise _too_long(str(tokens), max_tokens)


def _too_long(tokens: str, max_tokens: int) -> HermesError:
    return invalid_argument(
        "PROMPT_TOO_LONG",
        f"The prompt has {tokens} tokens, but no more than {max_tokens} are allowed: shorten it.",
        prompt_tokens=tokens,
        max_prompt_tokens=str(max_tokens),
    )
