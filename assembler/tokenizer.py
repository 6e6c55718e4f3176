"""Text to ids and back, by the fastest library that agrees with the reference."""

import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import tokenizers

from assembler import cuts
from assembler.control import Live
from assembler.cuts import Cuts
from assembler.guard import Guard
from assembler.tokenizer_config import AddedToken, read_json
from assembler.vocabulary import Vocabulary, changes_letters
from assembler.vocabulary import read as read_vocabulary
from shared.errors import StartupError

# Token ids in order, 32 bits each.
TokenIds: TypeAlias = "array[int]"

_log: Final = logging.getLogger(__name__)

# Where tokenizers differ: spaces, line ends, joined emoji, marks, scripts without spaces, digits, broken-up specials.
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
    "def f(x):\n    return x ** 2  # code\n\n\n",
    "\x00\x07\u200b\u202e\ufeff\ufffd",
    "<|im_st art|> <| [INST ] <s </s>",
    "▁under▁scores Ġ Ċ",
    "a" * 300,
    " " * 70 + "\n" * 9,
)
# Every flag of an added token shows on its neighbours; more tokens than this are alike (reserved ones).
_TRIED_ADDED_TOKENS: Final = 512


class _Backend(Protocol):
    name: str

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class _Reference:
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


class _Fast:
    """`fastokens`: the same ids, many times as fast, for the tokenizers that it knows."""

    name = "fastokens"

    def __init__(self, definition: str) -> None:
        import fastokens  # noqa: PLC0415 - where it cannot be loaded, the reference serves

        self._tokenizer: Any = fastokens.Tokenizer.from_json_str(definition)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        data, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        return array("I", data)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


@dataclass(frozen=True, slots=True)
class Added:
    """Tokens that are found before the text is split.

    texts: all of them. control: those that must not be forged, with their ids. guard: encodes where some are only text.
    always: a normalizer could make a control token of other letters, so that every prompt has to go through the guard.
    cuts: after which of them a text may be cut, as far as tokenizer.json tells.
    """

    texts: frozenset[str]
    control: Mapping[str, int]
    guard: Guard
    always: bool
    cuts: Cuts


class Tokenizer:
    """Encodes and decodes. Its methods may be called from any thread."""

    def __init__(self, backend: _Backend, vocabulary: Vocabulary, added: Added) -> None:
        self._backend = backend
        self.vocabulary = vocabulary
        self.added = added

    @property
    def library(self) -> str:
        """The library that encodes: "fastokens" or "tokenizers"."""
        return self._backend.name

    def encode(self, text: str) -> TokenIds:
        """Ids of rendered text. Control tokens in it count; none are added, because the template wrote its own."""
        return self._backend.encode(text, add_special_tokens=False)

    def encode_guarded(self, text: str, live: Sequence[Live]) -> TokenIds:
        """Ids of rendered text in which the live control tokens count, and all others are text."""
        return self.added.guard.encode(text, live)

    def encode_raw(self, text: str) -> TokenIds:
        """Ids of a completion prompt, with the special tokens that the tokenizer itself adds, such as BOS."""
        return self._backend.encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text with control tokens written out."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def decode_shown(self, ids: Sequence[int]) -> str:
        """The text as a reader sees it: without control tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text surely has, told without encoding it."""
        bound = self.vocabulary.length_bound
        return 0 if bound is None else bound.least_tokens(text)


def load(directory: Path, declared: Iterable[AddedToken], template_texts: Sequence[str] = ()) -> Tokenizer:
    """Loads tokenizer.json with the declared tokens that it lacks; takes a fraction of a second to some seconds.

    template_texts: what the model's template writes; a token that stands in it is a control token.
    Raises StartupError where there is no tokenizer.json or it cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise StartupError(
            f"{directory} has no tokenizer.json: save the model's tokenizer in that format "
            "(AutoTokenizer.from_pretrained(…).save_pretrained(…)) beside its weights."
        )
    definition = read_json(path)
    _merge(definition, declared)
    vocabulary = read_vocabulary(definition)
    probes = tuple(_probes(token["content"] for token in definition["added_tokens"]))
    text = json.dumps(definition, ensure_ascii=False)
    try:
        expected = _answers(_Reference(text), probes)  # let go of before the next one is loaded
        added = _added(definition, template_texts)
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"{path} cannot be loaded ({error}): prepare the model again.") from error
    del definition
    return Tokenizer(_fast(text, probes, expected) or _Reference(text), vocabulary, added)


def _added(definition: Mapping[str, Any], template_texts: Sequence[str]) -> Added:
    """What is a control token: every special one, and every other that the template writes, unless it is a space."""
    tokens = definition["added_tokens"]
    control = {
        token["content"]: token["id"]
        for token in tokens
        if not token["content"].isspace()
        and (token["special"] or any(token["content"] in text for text in template_texts))
    }
    # Most tokens are looked for in the text as it came. Some are looked for after the normalizer had its way with it.
    normalized = any(token["normalized"] for token in tokens if token["content"] in control)
    return Added(
        texts=frozenset(token["content"] for token in tokens),
        control=control,
        guard=Guard(definition, control),
        always=normalized and changes_letters(definition),
        cuts=cuts.find(definition, control),
    )


def _merge(definition: dict[str, Any], declared: Iterable[AddedToken]) -> None:
    """Adds declared tokens as `tokenizers` would: at their own id where the model has one, else at the next."""
    added: list[dict[str, Any]] = definition.setdefault("added_tokens", [])
    model_vocab = definition["model"]["vocab"]
    vocab = model_vocab if isinstance(model_vocab, dict) else {entry[0]: at for at, entry in enumerate(model_vocab)}
    known = {token["content"] for token in added}
    highest = max([*vocab.values(), *(token["id"] for token in added)], default=-1)
    for token in declared:
        if token.content in known or not token.content:
            continue
        token_id = vocab.get(token.content)
        if token_id is None:
            token_id = highest = highest + 1
        added.append(
            {
                "id": token_id,
                "content": token.content,
                "single_word": token.single_word,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "normalized": token.normalized,
                "special": token.special,
            }
        )
    added.sort(key=lambda token: int(token["id"]))


def _probes(added: Iterable[str]) -> Iterator[str]:
    yield from _TRICKY_TEXTS
    for place, token in enumerate(added):
        if place == _TRIED_ADDED_TOKENS:
            return
        yield f"a{token}b {token} \n{token}{token}é{token[1:]}{token[:-1]}"


def _answers(backend: _Backend, probes: Iterable[str]) -> list[tuple[TokenIds, TokenIds, str]]:
    """What a library makes of the probes: ids as rendered text, ids as raw text, and the text of those again."""
    answers = []
    for probe in probes:
        ids = backend.encode(probe, add_special_tokens=False)
        raw = backend.encode(probe, add_special_tokens=True)
        answers.append((ids, raw, backend.decode(list(raw), skip_special_tokens=True)))
    return answers


def _fast(definition: str, probes: Sequence[str], expected: Sequence[tuple[TokenIds, TokenIds, str]]) -> _Fast | None:
    """fastokens, if it can be loaded and gives the reference's ids; else None, and the log says why."""
    try:
        backend = _Fast(definition)
        answers = _answers(backend, probes)
    except Exception as error:  # whatever it raises, there is another library that does the work
        _log.warning("fastokens cannot serve this tokenizer (%s); tokenizers encodes instead, more slowly", error)
        return None
    differing = sum(answer != reference for answer, reference in zip(answers, expected, strict=True))
    if differing:
        _log.warning(
            "fastokens differs from tokenizers on %d of %d texts; tokenizers encodes instead, more slowly",
            differing,
            len(probes),
        )
        return None
    return backend
