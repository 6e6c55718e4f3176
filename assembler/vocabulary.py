"""What a tokenizer's tokens are: their bytes, which of them are control tokens, how long one can be."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

# SentencePiece's stand-in for a space.
_SPACE_MARK: Final = "▁"
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Most characters that NFC makes one character of (the Unicode FAQ's worst case for NFD in UTF-32, read backwards).
_NFC_SHRINKS: Final = 4


class Joining(Enum):
    """How tokens become text."""

    BYTES = "bytes"  # the bytes of all tokens, decoded as one UTF-8 string
    BYTE_PIECES = "byte pieces"  # pieces are text, and rare characters come as one piece a byte
    CONTEXT = "context"  # a token's text depends on its neighbours; only the tokenizer itself can tell


@dataclass(frozen=True, slots=True)
class LengthBound:
    """How few tokens a text can have, from static facts that hold for every text.

    characters_per_token: no token stands for more of a text's characters.
    vanishing: characters that may leave no token at all.
    """

    characters_per_token: int
    vanishing: str

    def least_tokens(self, text: str, above: int = 0) -> int:
        """A number of tokens that the text surely has, told without encoding it.

        above: 0 is told where it is not above that, because nobody asks then.
        """
        if len(text) <= above * self.characters_per_token:
            return 0
        lasting = len(text) - sum(map(text.count, self.vanishing))
        return math.ceil(lasting / self.characters_per_token)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """token_bytes: by id, what each token adds to the text; for Joining.CONTEXT only nearly so.
    special_ids: control tokens, which are not shown as text.
    byte_pieces: of Joining.BYTE_PIECES, the ids that stand for a byte each, of whatever character.
    length_bound: None where a token can stand for any number of characters.
    """

    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    byte_pieces: frozenset[int]
    joining: Joining
    length_bound: LengthBound | None

    @property
    def size(self) -> int:
        """Ids are below this."""
        return len(self.token_bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own bytes; none for an id that models have, for padding, above the tokenizer's last."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""


def read(tokenizer: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a parsed tokenizer.json."""
    joining = _joining(tokenizer.get("decoder"))
    added = tokenizer.get("added_tokens") or ()
    pieces = dict(_pieces(tokenizer["model"]["vocab"]))
    pieces |= {token["id"]: token["content"] for token in added}
    table = [b""] * (max(pieces, default=-1) + 1)
    for token_id, piece in pieces.items():
        table[token_id] = _piece_bytes(piece, joining)
    return Vocabulary(
        token_bytes=table,
        special_ids=frozenset(token["id"] for token in added if token["special"]),
        byte_pieces=frozenset(token_id for token_id, piece in pieces.items() if _byte(piece, joining) is not None),
        joining=joining,
        length_bound=_length_bound(tokenizer, table, joining),
    )


def changes_letters(tokenizer: Mapping[str, Any]) -> bool:
    """Whether the normalizer of a parsed tokenizer.json can make letters of other letters, and not only add some."""
    return any(part["type"] != "Prepend" for part in _parts(tokenizer.get("normalizer")))


def _pieces(vocab: Mapping[str, int] | Sequence[Sequence[Any]]) -> Iterator[tuple[int, str]]:
    if isinstance(vocab, Mapping):
        yield from ((token_id, piece) for piece, token_id in vocab.items())
    else:  # Unigram: pieces with their scores, by id
        yield from ((token_id, entry[0]) for token_id, entry in enumerate(vocab))


def _parts(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A step of a tokenizer.json pipeline, its sequences taken apart."""
    if step is None:
        return
    inner = step.get("decoders") or step.get("normalizers") or step.get("pretokenizers")
    if step["type"] == "Sequence":
        inner = inner or ()
        for part in inner:
            yield from _parts(part)
    else:
        yield step


def _joining(decoder: Mapping[str, Any] | None) -> Joining:
    parts = {part["type"]: part for part in _parts(decoder)}
    if set(parts) == {"ByteLevel"}:
        return Joining.BYTES
    # Strip takes the one space off the beginning of the whole text, where an answer never is.
    if {"Replace", "ByteFallback", "Fuse"} <= set(parts) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replace, strip = parts["Replace"], parts.get("Strip")
        marks_are_spaces = replace["pattern"] == {"String": _SPACE_MARK} and replace["content"] == " "
        if marks_are_spaces and (strip is None or (strip["start"] <= 1 and strip["stop"] == 0)):
            return Joining.BYTE_PIECES
    return Joining.CONTEXT


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the rest for letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_LETTERS: Final = _byte_letters()


def _piece_bytes(piece: str, joining: Joining) -> bytes:
    if joining is Joining.BYTES:
        try:
            return bytes([_BYTE_LETTERS[letter] for letter in piece])
        except KeyError:  # an added token, whose text is meant as it stands
            return piece.encode()
    byte = _byte(piece, joining)
    return piece.replace(_SPACE_MARK, " ").encode() if byte is None else byte


def _byte(piece: str, joining: Joining) -> bytes | None:
    """The byte that a piece stands for."""
    found = _BYTE_PIECE.fullmatch(piece) if joining is Joining.BYTE_PIECES else None
    return bytes([int(found[1], 16)]) if found else None


def _length_bound(tokenizer: Mapping[str, Any], table: Iterable[bytes], joining: Joining) -> LengthBound | None:
    vanishing = _vanishing(tokenizer["model"]["vocab"], joining)
    if vanishing is None or any(token["lstrip"] or token["rstrip"] for token in tokenizer.get("added_tokens") or ()):
        return None
    shrinks = 1
    for part in _parts(tokenizer.get("normalizer")):
        match part:
            case {"type": "NFC"}:
                shrinks = _NFC_SHRINKS
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new) >= len(old):
                pass
            case _:
                return None
    for part in _parts(tokenizer.get("pre_tokenizer")):
        keeps_all = part["type"] in ("ByteLevel", "Digits", "Metaspace") or part.get("behavior", "Removed") != "Removed"
        if not keeps_all:
            return None
    return LengthBound(shrinks * max(map(len, table), default=1), vanishing)


def _vanishing(vocab: Mapping[str, int] | Sequence[Sequence[Any]], joining: Joining) -> str | None:
    """The characters none of whose bytes is a token; None where those of more than one byte can be among them."""
    pieces = vocab if isinstance(vocab, Mapping) else {entry[0] for entry in vocab}
    match joining:
        case Joining.BYTES:
            lacking = {byte for letter, byte in _BYTE_LETTERS.items() if letter not in pieces}
        case Joining.BYTE_PIECES:
            lacking = {byte for byte in range(256) if f"<0x{byte:02X}>" not in pieces}
        case Joining.CONTEXT:
            return None
    # Every character beyond ASCII has a continuation byte, 0x80 to 0xBF.
    return (
        None if lacking.intersection(range(0x80, 0xC0)) else "".join(map(chr, sorted(lacking.intersection(range(128)))))
    )
