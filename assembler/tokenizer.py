"""Text to ids and back, by the fastest library that agrees with the reference."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from assembler import cuts, decoding, encoders
from assembler.control import Live
from assembler.cuts import Cuts
from assembler.encoders import Encoder
from assembler.guard import Guard
from assembler.stretches import stretches
from assembler.tokenizer_config import AddedToken, read_json
from assembler.vocabulary import Vocabulary, changes_letters
from assembler.vocabulary import read as read_vocabulary
from shared.errors import StartupError

# Token ids in order, 32 bits each.
TokenIds: TypeAlias = encoders.TokenIds


@dataclass(frozen=True, slots=True)
class Added:
    """Tokens that are found before the text is split.

    texts: all of them. control: those that must not be forged, with their ids. guard: encodes where some are only text.
    always: a normalizer could make a control token of other letters, so that every prompt has to go through the guard.
    cuts: after which of them a text may be cut, as tokenizer.json tells and a try has shown.
    """

    texts: frozenset[str]
    control: Mapping[str, int]
    guard: Guard
    always: bool
    cuts: Cuts


class Tokenizer:
    """Encodes and decodes. Its methods may be called from any thread."""

    def __init__(self, encoder: Encoder, vocabulary: Vocabulary, added: Added) -> None:
        self._encoder = encoder
        self.vocabulary = vocabulary
        self.added = added

    @property
    def encodes_with(self) -> str:
        """The package that encodes: "fastokens" or "tokenizers"."""
        return self._encoder.name

    def encode(self, text: str) -> TokenIds:
        """Ids of rendered text. Control tokens in it count; none are added, because the template wrote its own."""
        return self._encoder.encode(text, add_special_tokens=False)

    def encode_guarded(self, text: str, live: Sequence[Live]) -> TokenIds:
        """Ids of rendered text in which the live control tokens count, and all others are text."""
        guard, cut_after = self.added.guard, self.added.cuts.tokens
        if not cut_after or self.added.always:
            return guard.encode(text, live)
        ids: TokenIds = array("I")
        for stretch in stretches(text, live, guard.tokens.found(text), cut_after):
            ids += self.encode(stretch.text) if stretch.live is None else guard.encode(stretch.text, stretch.live)
        return ids

    def encode_raw(self, text: str) -> TokenIds:
        """Ids of a completion prompt, with the special tokens that the tokenizer itself adds, such as BOS."""
        return self._encoder.encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text with control tokens written out. Of many ids it is made in parts, if it can be."""
        if len(ids) <= decoding.PART:
            return self._decode(ids)
        return decoding.decode(ids, self.vocabulary, self._decode, decoding.PART)

    def decode_shown(self, ids: Sequence[int]) -> str:
        """The text as a reader sees it: without control tokens."""
        return self._encoder.decode(list(ids), skip_special_tokens=True)

    def least_tokens(self, text: str, above: int = 0) -> int:
        """A number of tokens that the text surely has, told without encoding it.

        above: 0 is told where it is not above that, because nobody asks then.
        """
        bound = self.vocabulary.length_bound
        return 0 if bound is None else bound.least_tokens(text, above)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(list(ids), skip_special_tokens=False)


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
    try:
        _merge(definition, declared)
        vocabulary = read_vocabulary(definition)
        source = encoders.source(definition)
        added = _added(definition, template_texts)
        del definition
        encoder = encoders.fastest(source, added.guard.encode_all_live)
        uncut = Tokenizer(encoder, vocabulary, replace(added, cuts=Cuts(frozenset())))
        return Tokenizer(encoder, vocabulary, replace(added, cuts=cuts.tried(added.cuts, uncut)))
    except StartupError:
        raise
    except Exception as error:  # the library raises plain Exception, and a damaged file can be wrong in any way
        raise StartupError(f"{path} cannot be loaded ({error}): prepare the model again.") from error


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
    """Adds declared tokens as transformers does: at their own id where the model has one, else at the next.

    A token that is there takes the flags of a complete declaration.
    """
    added: list[dict[str, Any]] = definition.setdefault("added_tokens", [])
    model_vocab = definition["model"]["vocab"]
    vocab = model_vocab if isinstance(model_vocab, dict) else {entry[0]: at for at, entry in enumerate(model_vocab)}
    known = {token["content"]: token for token in added}
    highest = max([*vocab.values(), *(token["id"] for token in added)], default=-1)
    for token in declared:
        flags = {
            "content": token.content,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "special": token.special,
        }
        if token.content in known:
            if token.is_complete:
                known[token.content].update(flags)
        elif token.content:
            token_id = vocab.get(token.content)
            if token_id is None:
                token_id = highest = highest + 1
            added.append({"id": token_id, **flags})
    added.sort(key=lambda token: int(token["id"]))
