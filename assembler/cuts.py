"""Where a text may be cut for encoding: right after control tokens of which it is proved that nothing changes.

A tokenizer takes the added tokens out of a text first, and works on each stretch between them alone. So the ids of a
text are those of its stretches, one after the other, but for flags and parts that look beyond a stretch. Those are read
off tokenizer.json; what is left is tried at start.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol

from assembler.control import Live

if TYPE_CHECKING:
    from array import array

# Parts that work on one stretch at a time.
_NORMALIZERS: Final = frozenset(
    {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend"}
    | {"Replace", "Strip", "StripAccents"}
)
_PRE_TOKENIZERS: Final = frozenset(
    {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation"}
    | {"Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"}
)
_MODELS: Final = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})
_WORD_END: Final = re.compile(r"\w\Z")
# What libraries in Rust raise where they give up; no Exception, and of a class that cannot be imported.
_PANIC: Final = "PanicException"
# More control tokens than this are reserved ones, alike in all but a number.
_TRIED_TOKENS: Final = 16
# What a tokenizer could treat in another way at the beginning or the end of a text.
_TEXTS: Final = (
    "Hello", " spaced ", "\n\n", "  \t x", "", "\u0301 a mark without a letter", "e\u0301", "\u30fb中文", "123 45",
    "\U0001f469\u200d\U0001f467", "\u200d\ufe0f", "system\nYou are", "▁a ▁", "é", "  ", "A.", "<|<s", "x" * 40,
    "'s don't",
)  # fmt: skip


class _Encoder(Protocol):
    def encode(self, text: str) -> "array[int]": ...

    def encode_guarded(self, text: str, live: Sequence[Live]) -> "array[int]": ...


@dataclass(frozen=True, slots=True)
class Cuts:
    """tokens: a text may be cut right after each of them. problem: why there are none, where there are none."""

    tokens: frozenset[str]
    problem: str | None = None


def find(tokenizer: Mapping[str, Any], control: Iterable[str]) -> Cuts:
    """The control tokens of a parsed tokenizer.json after which its texts may be cut."""
    problem = _problem(tokenizer)
    if problem is not None:
        return Cuts(frozenset(), problem)
    added = tokenizer.get("added_tokens") or ()
    control = frozenset(control)
    words_matter = any(token["single_word"] for token in added)
    texts = [token["content"] for token in added if token["content"]]
    tokens = frozenset(
        token["content"]
        for token in added
        if token["content"] in control
        and not token["rstrip"]
        and not token["single_word"]
        and not (token["normalized"] and tokenizer.get("normalizer"))
        and not (words_matter and _WORD_END.search(token["content"]))
        and not any(_touch(token["content"], other) for other in texts)
    )
    return Cuts(tokens, None if tokens else "its control tokens overlap, or take in what stands beside them")


def _problem(tokenizer: Mapping[str, Any]) -> str | None:
    model = tokenizer["model"]
    kind = model.get("type", "BPE")
    if kind not in _MODELS:
        return f"its model {kind} is not one that is known to work on one stretch at a time"
    if model.get("dropout"):
        return "its model drops merges by chance"
    for part in (*_parts(tokenizer.get("normalizer")), *_parts(tokenizer.get("pre_tokenizer"))):
        if part["type"] not in _NORMALIZERS | _PRE_TOKENIZERS:
            return f"its {part['type']} is not known to work on one stretch at a time"
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") == "first":
            return "its Metaspace treats the beginning of a text in a way of its own"
    return None


def _parts(step: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """A step of a tokenizer.json pipeline, its sequences taken apart."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _parts(part)


def _touch(token: str, other: str) -> bool:
    """Whether an added token can lie over a part of another one, so that where one is found depends on more."""
    if token == other:
        return any(token.endswith(token[:length]) for length in range(1, len(token)))
    if token in other:
        return True
    return any(
        token[-length:] == other[:length] or other[-length:] == token[:length]
        for length in range(1, min(len(token), len(other)) + 1)
    )


def tried(cuts: Cuts, tokenizer: "_Encoder") -> Cuts:
    """The same cuts, if the tokenizer does as tokenizer.json says: whole texts and pieces give the same ids."""
    try:
        problem = _difference(cuts, tokenizer)
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        problem = f"the tokenizer broke down: {error}"
    return cuts if problem is None else Cuts(frozenset(), problem)


def _difference(cuts: Cuts, tokenizer: "_Encoder") -> str | None:
    for token in sorted(cuts.tokens)[:_TRIED_TOKENS]:
        for before, after in pairwise((*_TEXTS, *_TEXTS[:1])):
            head, text = before + token, before + token + after
            cut = len(head)
            whole, first, rest = _live(text, token), _live(head, token), _live(after, token)
            if tokenizer.encode(text) != tokenizer.encode(head) + tokenizer.encode(after) or (
                tokenizer.encode_guarded(text, whole)
                != tokenizer.encode_guarded(text[:cut], first) + tokenizer.encode_guarded(text[cut:], rest)
            ):
                return f"a text cut after {token!r} came out in other ids"
    return None


def _live(text: str, token: str) -> list[Live]:
    return [Live(match.start(), match.end(), token) for match in re.finditer(re.escape(token), text)]
