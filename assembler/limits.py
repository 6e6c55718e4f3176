"""How long a prompt may be: refused as early as it can be told, with the counts."""

from array import array
from collections.abc import Sequence
from typing import Final

from assembler.tokenizer import TokenIds
from hermes.v1 import assembler_pb2
from shared.errors import HermesError, invalid_argument

# Ids that are read without a pause, 2 ms of work; other threads wait meanwhile.
_READ_AT_ONCE: Final = 32_768


def check_count(prompt: assembler_pb2.Prompt, max_tokens: int | None) -> None:
    """Refuses what cannot fit by a count that costs nothing, before any work that others would have to wait for."""
    if max_tokens is None:
        return
    if len(prompt.token_ids.ids) > max_tokens:
        raise _too_long(str(len(prompt.token_ids.ids)), max_tokens)
    if len(prompt.chat.messages) > max_tokens:  # a template marks each of them with a token at least
        raise _too_long(f"{len(prompt.chat.messages)} messages, at least as many", max_tokens)


def check_least(least_tokens: int, max_tokens: int | None) -> None:
    """Refuses a text that has at least so many tokens."""
    if max_tokens is not None and least_tokens > max_tokens:
        raise _too_long(f"at least {least_tokens}", max_tokens)


def check_length(tokens: int, max_tokens: int | None) -> None:
    """Refuses a prompt of so many tokens where that is none, or more than is allowed."""
    if not tokens:
        raise invalid_argument("PROMPT_EMPTY", "The prompt has no tokens: send some text.", field="prompt")
    if max_tokens is not None and tokens > max_tokens:
        raise _too_long(str(tokens), max_tokens)


def checked_ids(given: Sequence[int], vocab_size: int) -> TokenIds:
    """Ready ids, read in parts between which other threads have their turn. Refuses ids that the model lacks."""
    ids: TokenIds = array("I")
    for start in range(0, len(given), _READ_AT_ONCE):
        part = array("I", given[start : start + _READ_AT_ONCE])
        highest = max(part)
        if highest >= vocab_size:
            place = start + part.index(highest)
            raise invalid_argument(
                "TOKEN_OUT_OF_VOCABULARY",
                f"Token {place} of the prompt is {highest}, but the model's ids are below {vocab_size}.",
                position=str(place),
                token_id=str(highest),
                vocab_size=str(vocab_size),
            )
        ids += part
    return ids


def _too_long(tokens: str, max_tokens: int) -> HermesError:
    return invalid_argument(
        "PROMPT_TOO_LONG",
        f"The prompt has {tokens} tokens, but no more than {max_tokens} are allowed: shorten it.",
        prompt_tokens=tokens,
        max_prompt_tokens=str(max_tokens),
    )
