"""Which characters of a prompt's text each of its tokens stands for.

Told from the ids as they are, however they came to be, and not by encoding the text again: an answer's own ids need not
be those that its text would be encoded in.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from assembler.control import Live
from assembler.origins import Origins
from assembler.tokenizer import TokenIds, Tokenizer

_CONTINUATION: Final = bytes(range(0x80, 0xC0))
_SPACE: Final = b" "
# Tokens that are gone through without a pause, 2 ms of work; other threads wait meanwhile.
_AT_ONCE: Final = 32_768


@dataclass(frozen=True, slots=True)
class Aligned:
    """ends: for each token, the place behind its last character. goes_on: 1 for a token that cannot be told from the
    next one, as when both hold bytes of one character; then `ends` is of both.
    """

    ends: Sequence[int]
    goes_on: Sequence[int]


class Alignment:
    """Aligns ids with texts. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = {token_id: text for text, token_id in tokenizer.added.control.items()}
        # The last one stands for ids that models have, for padding, above the tokenizer's last.
        spelled = (*tokenizer.vocabulary.token_bytes, b"")
        self._sizes = array("I", map(len, spelled))
        # Characters are counted where they begin.
        self._characters = array("I", (len(each.translate(None, _CONTINUATION)) for each in spelled))

    def control(self, token_id: int) -> str | None:
        """The text of a control token; None where the id is none."""
        return self._control.get(token_id)

    def controls(self, ids: TokenIds) -> list[int]:
        """The places of control tokens."""
        return [place for place, token_id in enumerate(ids) if token_id in self._control]

    def aligned(self, ids: TokenIds, origins: Origins) -> Aligned:
        """The alignment of a text with its ids, of which there are some.

        Between control tokens it is told by the tokens' bytes, else by what the tokenizer says of the same text; where
        neither fits, the tokens between two control tokens cannot be told apart. Control tokens take in white space.
        """
        text = origins.text
        found = self._spelled(ids, text) or self._between(ids, text, self._places(ids, origins))
        ends = array("L", found.ends)
        ends[-1] = len(text)
        return Aligned(ends, found.goes_on)

    def _places(self, ids: TokenIds, origins: Origins) -> Sequence[tuple[int, Live]]:
        """The control tokens in the ids, each with where it stands in the text; none where that cannot be told."""
        places = self.controls(ids)
        found = [each for each in self._tokenizer.added.guard.tokens.found(origins.text) if origins.may_count(each)]
        if [self._control[ids[place]] for place in places] != [each.token for each in found]:
            return ()
        return list(zip(places, found, strict=True))

    def _between(self, ids: TokenIds, text: str, places: Sequence[tuple[int, Live]]) -> Aligned:
        """The control tokens, and what stands between them."""
        ends, goes_on = array("L"), bytearray()
        start, character = 0, 0
        for place, live in (*places, (len(ids), None)):
            stretch = text[character : None if live is None else live.start]
            skipped, found = self._stretch(ids[start:place], stretch)
            if ends:
                ends[-1] += skipped
            ends.extend(character + end for end in found.ends)
            goes_on += bytes(found.goes_on)
            if live is not None:
                start, character = place + 1, live.end
                ends.append(character)
                goes_on.append(0)
        return Aligned(ends, goes_on)

    def _stretch(self, ids: TokenIds, text: str) -> tuple[int, Aligned]:
        """The alignment of a text without control tokens, and how many characters the token before it takes in."""
        for inner in dict.fromkeys((text, text.lstrip(), text.rstrip(), text.strip())) if ids else ():
            found = self._spelled(ids, inner)
            if found is not None:
                skipped = text.find(inner)
                return skipped, Aligned([skipped + end for end in found.ends], found.goes_on)
        return 0, self._encoded(ids, text) or _as_one(len(ids), len(text))

    def _spelled(self, ids: TokenIds, text: str) -> Aligned | None:
        """By the tokens' bytes; None where those are not the text's.

        Some tokenizers write a space before every text, which is no part of it.
        """
        data = text.encode()
        bytes_of = self._tokenizer.vocabulary.bytes_of
        spelled = b"".join(
            b"".join(map(bytes_of, ids[start : start + _AT_ONCE])) for start in range(0, len(ids), _AT_ONCE)
        )
        less = int(spelled != data and spelled[:1] == _SPACE)
        if spelled[less:] != data:
            return None
        if len(data) == len(text):
            return Aligned(self._counted(self._sizes, ids, less), bytes(len(ids)))
        following = data + _SPACE  # where no character goes on
        goes_on = bytes(following[place] in _CONTINUATION for place in self._counted(self._sizes, ids, less))
        return Aligned(self._counted(self._characters, ids, less), goes_on)

    def _counted(self, of_each: Sequence[int], ids: TokenIds, less: int) -> "array[int]":
        """Counts up to the end of each token. less: than there are in the first one."""
        counts, last = array("L"), len(of_each) - 1
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            known = some if max(some) < last else (min(each, last) for each in some)
            sums = accumulate(map(of_each.__getitem__, known), initial=counts[-1] if counts else -less)
            next(sums)
            counts.extend(sums)
        return counts

    def _encoded(self, ids: TokenIds, text: str) -> Aligned | None:
        """As the tokenizer tells; None where it encodes the text in other ids."""
        found, spans = self._tokenizer.added.guard.spans(text)
        if found != ids or not ids:
            return None
        # What is in no token belongs to the one before it.
        begins = [*(begin for begin, _ in spans[1:]), len(text)]
        goes_on = bytes(begin < end for begin, (_, end) in zip(begins, spans, strict=True))
        return Aligned(list(accumulate(begins, max)), goes_on)


def _as_one(tokens: int, characters: int) -> Aligned:
    """Tokens that cannot be told apart."""
    return Aligned([characters] * tokens, bytes([*[1] * (tokens - 1), 0][:tokens]))
