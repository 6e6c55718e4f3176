"""The libraries that make ids of text: the quick one where it agrees with the reference, else the reference."""

import json
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import tokenizers

from assembler import digits

# Token ids in order, 32 bits each.
TokenIds: TypeAlias = "array[int]"
# Takes a text apart into pieces that are encoded each for itself.
_Cut: TypeAlias = Callable[[str], Iterator[str]]

_log: Final = logging.getLogger(__name__)

# Where tokenizers differ: spaces, line ends, joined emoji, marks, scripts without spaces, numerals, broken-up specials.
_TRICKY_TEXTS: Final = (
    "",
    " ",
    "  \n\n\t \r\n x",
    "Hello, world!  It's 12345 o'clock.",
    "don't I'LL we'Ve ЁЖ-2024",
    "naïve café ﬁ Å e\u0301 \u212b",
    "中文\uff0c没有空格\u3002日本語テキスト 한국어",
    "\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2708\ufe0f \U0001f9d1\U0001f3fd",
    "नमस्ते สวัสดี مرحبا",
    "x² + ½ = 1½ ٣٤ Ⅷ \u2460 \U0001d7d8, 3 cm³",
    "def f(x):\n    return x ** 2  # code\n\n\n",
    "\x00\x07\u200b\u202e\ufeff\ufffd",
    "<|im_st art|> <| [INST ] <s </s>",
    "▁under▁scores Ġ Ċ",
    "a" * 300,
    " " * 70 + "\n" * 9,
)
# Every flag of an added token shows on its neighbours; more tokens than this are alike (reserved ones).
_TRIED_ADDED_TOKENS: Final = 512
_ANY_TEXT: Final = "a"
# The list of them is made and read while all other threads wait.
_PIECES_AT_ONCE: Final = 4096


class Encoder(Protocol):
    """name: the library's."""

    name: str

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Reference:
    """Hugging Face's `tokenizers`."""

    name = "tokenizers"

    def __init__(self, definition: str) -> None:
        self._tokenizer: Any = tokenizers.Tokenizer.from_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        # The batch call, also for one text: `encode` holds the interpreter's lock for all of it.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


class Fast:
    """`fastokens`: the same ids, many times as fast, for the tokenizers that it knows."""

    name = "fastokens"

    def __init__(self, definition: str, cut: _Cut, otherwise: Callable[[str], TokenIds]) -> None:
        """cut: into the pieces that are to be encoded. otherwise: encodes the texts that this library raises for."""
        # Requests are spread over threads already, and each of its own would keep words besides, 10 to 110 MB.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        import fastokens  # noqa: PLC0415 - where it cannot be loaded, the reference serves

        self._cut = cut
        self._otherwise = otherwise
        self._tokenizer: Any = fastokens.Tokenizer.from_json_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        try:
            pieces = self._cut(text)
            ids = self._ids(list(islice(pieces, _PIECES_AT_ONCE)))
            while batch := list(islice(pieces, _PIECES_AT_ONCE)):
                ids += self._ids(batch)
        except ValueError:  # a byte of the text is no token; the reference leaves such out
            ids = self._otherwise(text)
        return self._surrounded(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def _ids(self, texts: list[str], *, add_special_tokens: bool = False) -> TokenIds:
        data, _ = self._tokenizer.encode_batch_flat(texts, add_special_tokens=add_special_tokens)
        return array("I", data)

    def _surrounded(self, ids: TokenIds) -> TokenIds:
        """The ids with those that the tokenizer itself puts before and after every raw text's."""
        own, around = self._ids([_ANY_TEXT]), self._ids([_ANY_TEXT], add_special_tokens=True)
        place = next(at for at in range(len(around)) if around[at : at + len(own)] == own)
        return around[:place] + ids + around[place + len(own) :]


def _whole(text: str) -> Iterator[str]:
    yield text


class Source(NamedTuple):
    """A tokenizer.json as each library is to read it. cut: for the quick one. probes: texts to compare them by."""

    reference: str
    fast: str
    cut: _Cut
    probes: tuple[str, ...]


def source(definition: Mapping[str, Any]) -> Source:
    """What is needed of a parsed tokenizer.json, which takes many times as much memory."""
    reference = json.dumps(definition, ensure_ascii=False)
    probes = tuple(_probes(token["content"] for token in definition["added_tokens"]))
    apart = digits.apart(definition)
    if apart is None:
        return Source(reference, reference, _whole, probes)
    return Source(reference, json.dumps(apart, ensure_ascii=False), digits.pieces, probes)


def fastest(source: Source, otherwise: Callable[[str], TokenIds]) -> Encoder:
    """fastokens, if it can be loaded and gives the reference's ids; else the reference, and the log says why.

    otherwise: encodes texts that the quick library cannot, as the reference does.
    Raises what `tokenizers` raises where it cannot be loaded.
    """
    expected = _answers(Reference(source.reference), source.probes)  # let go of before the next one is loaded
    try:
        fast = Fast(source.fast, source.cut, otherwise)
        answers = _answers(fast, source.probes)
    except Exception as error:  # whatever it raises, there is another library that does the work
        _log.warning("fastokens cannot serve this tokenizer (%s); tokenizers encodes instead, more slowly", error)
        return Reference(source.reference)
    differing = sum(answer != reference for answer, reference in zip(answers, expected, strict=True))
    if differing:
        _log.warning(
            "fastokens differs from tokenizers on %d of %d texts; tokenizers encodes instead, more slowly",
            differing,
            len(source.probes),
        )
        return Reference(source.reference)
    return fast


def _probes(added: Iterable[str]) -> Iterator[str]:
    yield from _TRICKY_TEXTS
    for place, token in enumerate(added):
        if place == _TRIED_ADDED_TOKENS:
            return
        yield f"a{token}b {token} \n{token}{token}é{token[1:]}{token[:-1]}"


def _answers(encoder: Encoder, probes: Iterable[str]) -> list[tuple[TokenIds, TokenIds, str]]:
    """What a library makes of the probes: ids as rendered text, ids as raw text, and the text of those again."""
    answers = []
    for probe in probes:
        ids = encoder.encode(probe, add_special_tokens=False)
        raw = encoder.encode(probe, add_special_tokens=True)
        answers.append((ids, raw, encoder.decode(list(raw), skip_special_tokens=True)))
    return answers
