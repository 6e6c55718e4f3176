"""Which characters of a prompt's text each of its tokens stands for.

Told from the ids as they are, however they came to be, and not by encoding the text again: an answer's own ids need not
be those that its text would be encoded in.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from assembler.control import Live
from assembler.origins import Origins
from assembler.tokenizer import TokenIds, Tokenizer

_CONTINUATION: Final = bytes(range(0x80, 0xC0))
_SPACE: Final = b" "


class Atom(NamedTuple):
    """Tokens that cannot be told apart in a text, as a rule one: up to before `tokens` in the ids and before `end` in
    the text, from where the atom before ends. control: a single control token, with white space that it takes in.
    """

    tokens: int
    end: int
    control: bool = False


class Alignment:
    """Aligns ids with texts. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = {token_id: text for text, token_id in tokenizer.added.control.items()}

    def control(self, token_id: int) -> str | None:
        """The text of a control token; None where the id is none."""
        return self._control.get(token_id)

    def atoms(self, ids: TokenIds, origins: Origins) -> list[Atom]:
        """The atoms that make up a text and its ids, of which there are some.

        Between control tokens they are told by the tokens' bytes, else by what the tokenizer says of the same text;
        where neither fits, all between two control tokens is one atom.
        """
        text = origins.text
        atoms = self._spelled(ids, text.encode()) or self._between(ids, text, self._places(ids, origins))
        return [*atoms[:-1], Atom(len(ids), len(text), atoms[-1].control)]

    def _places(self, ids: TokenIds, origins: Origins) -> Sequence[tuple[int, Live]]:
        """The control tokens in the ids, each with where it stands in the text; none where that cannot be told."""
        places = [place for place, token_id in enumerate(ids) if token_id in self._control]
        found = [each for each in self._tokenizer.added.guard.tokens.found(origins.text) if origins.may_count(each)]
        if [self._control[ids[place]] for place in places] != [each.token for each in found]:
            return ()
        return list(zip(places, found, strict=True))

    def _between(self, ids: TokenIds, text: str, places: Sequence[tuple[int, Live]]) -> list[Atom]:
        """The control tokens, and what stands between them."""
        atoms: list[Atom] = []
        start, character = 0, 0
        for place, live in (*places, (len(ids), None)):
            skipped, found = self._stretch(ids[start:place], text[character : None if live is None else live.start])
            if atoms:
                atoms[-1] = atoms[-1]._replace(end=character + skipped)
            atoms += (Atom(start + each.tokens, character + each.end) for each in found)
            if live is not None:
                start, character = place + 1, live.end
                atoms.append(Atom(start, character, control=True))
        return atoms

    def _stretch(self, ids: TokenIds, text: str) -> tuple[int, list[Atom]]:
        """The atoms of a text without control tokens, and how many characters the token before it takes in."""
        if not ids:
            return 0, []
        for inner in dict.fromkeys((text, text.lstrip(), text.rstrip(), text.strip())):
            atoms = self._spelled(ids, inner.encode())
            if atoms:
                skipped = text.find(inner)
                return skipped, [each._replace(end=skipped + each.end) for each in atoms]
        return 0, self._encoded(ids, text) or [Atom(len(ids), len(text))]

    def _spelled(self, ids: TokenIds, data: bytes) -> list[Atom]:
        """The atoms of tokens whose bytes are a text's; none where they are not.

        Some tokenizers write a space before every text, which is no part of it.
        """
        bytes_of = self._tokenizer.vocabulary.bytes_of
        spelled = b"".join(map(bytes_of, ids))
        less = int(spelled != data and spelled[:1] == _SPACE)
        if spelled[less:] != data:
            return []
        atoms, place, character, last = [], -less, -less, len(data)
        for at, token_id in enumerate(ids, 1):
            piece = bytes_of(token_id)
            place += len(piece)
            character += len(piece.translate(None, _CONTINUATION))
            if place >= last or data[place] not in _CONTINUATION:
                atoms.append(Atom(at, character, token_id in self._control))
        return atoms

    def _encoded(self, ids: TokenIds, text: str) -> list[Atom]:
        """The atoms of a text that is encoded in just these ids; none where it is not."""
        found, spans = self._tokenizer.added.guard.spans(text)
        if found != ids:
            return []
        atoms, last = [], 0
        begins = [begin for begin, _ in spans[1:]]
        for at, ((_, end), following) in enumerate(zip(spans, (*begins, len(text)), strict=True), 1):
            last = max(last, end)
            if following >= last:  # else the next token has a part of the same character
                atoms.append(Atom(at, last))
        return atoms
