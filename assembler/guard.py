"""A tokenizer in which control tokens go by secret names, so that nothing a caller writes can be one of them."""

import copy
import json
import re
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import tokenizers

from assembler.control import ControlTokens, Live

_TokenIds: TypeAlias = "array[int]"

# Private-use characters of plane 16: no normalizer changes them, no pattern takes them for letters.
_PRIVATE: Final = range(0x100000, 0x10FFFE)
# 16 bits each, drawn anew in every process; nobody can guess them, and no id depends on them.
_SECRET_CHARACTERS: Final = 5
_WORD: Final = re.compile(r"\w")


class Guard:
    """Encodes a prompt in which some control tokens are only text. tokens: finds them as the tokenizer would.

    Nothing is cut: the live tokens are written by their secret names and the whole text is encoded at once, so that
    white space, normalizers and whatever a tokenizer does between tokens come out as ever.
    """

    def __init__(self, definition: Mapping[str, Any], control: Iterable[str]) -> None:
        """definition: a parsed tokenizer.json. Raises what `tokenizers` raises where it cannot be loaded."""
        secret = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_SECRET_CHARACTERS))
        control = sorted(control)
        self.tokens = ControlTokens(control, (token["content"] for token in definition["added_tokens"]))
        self._names = {token: secret + chr(_PRIVATE[place]) for place, token in enumerate(control)}
        self._single_words = {token["content"] for token in definition["added_tokens"] if token["single_word"]}
        self._tokenizer: Any = _load(definition, self._names)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        renamed: dict[int, int] = {
            self._tokenizer.token_to_id(self._names.get(token["content"], token["content"])): token["id"]
            for token in definition["added_tokens"]
        }
        self._ids = {given: own for given, own in renamed.items() if given != own}

    def encode(self, text: str, live: Sequence[Live]) -> _TokenIds:
        """Ids of rendered text in which the live tokens count, and no others."""
        pieces: list[str] = []
        end = 0
        for token in live:
            if token.token in self._single_words and _is_in_word(text, token):
                continue  # the tokenizer would not take it for one
            pieces += (text[end : token.start], self._names[token.token])
            end = token.end
        named = "".join((*pieces, text[end:]))
        # The batch call, also for one text: `encode` holds the interpreter's lock for all of it.
        (encoding,) = self._tokenizer.encode_batch_fast([named], add_special_tokens=False)
        ids: _TokenIds = array("I", encoding.ids)
        return array("I", (self._ids.get(token_id, token_id) for token_id in ids)) if self._ids else ids

    def spans(self, text: str) -> tuple[_TokenIds, list[tuple[int, int]]]:
        """Ids of a text in which no control token counts, and from where to where in the text each of them is."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return array("I", (self._ids.get(token_id, token_id) for token_id in encoding.ids)), encoding.offsets

    def encode_all_live(self, text: str) -> _TokenIds:
        """Ids of a text in which every control token counts: those that the tokenizer itself would give."""
        return self.encode(text, tuple(self.tokens.found(text)))


def _is_in_word(text: str, token: Live) -> bool:
    return any(map(_WORD.match, (text[token.start - 1 : token.start], text[token.end : token.end + 1])))


def _load(definition: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    renamed = dict(definition)
    renamed["added_tokens"] = [
        token | {"content": names.get(token["content"], token["content"])} for token in definition["added_tokens"]
    ]
    renamed["post_processor"] = None  # it would look for tokens by the names that they had
    model = copy.copy(definition["model"])
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), *rest] for piece, *rest in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(renamed | {"model": model}, ensure_ascii=False))
    except Exception:  # the library raises plain Exception: a merge makes one of the tokens
        return tokenizers.Tokenizer.from_str(json.dumps(renamed, ensure_ascii=False))
