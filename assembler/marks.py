"""Marks in an answer: told from text that only looks like them, wherever the tokenizer has a token for them."""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from assembler.tokenizer import Tokenizer
from assembler.vocabulary import Joining

# Surrogates are no characters, so no decoded text has them, and there are more of them than marks.
_FIRST_SYMBOL: Final = 0xD800


def open_tail(text: str, words: Collection[str]) -> int:
    """Length of the longest end of the text that one of the words begins with, and goes on from."""
    longest = 0
    for word in words:
        at = text.find(word[0], max(0, len(text) + 1 - len(word)))
        while 0 <= at < len(text) - longest:
            if word.startswith(text[at:]):
                longest = len(text) - at
            at = text.find(word[0], at + 1)
    return longest


class Marks:
    """The marks that are tokens of their own. Such a mark counts only where the model wrote that token.

    In a sample's text a symbol, which no text can have, stands for the token. Special tokens have no text besides;
    after the symbol of another one stands its text.
    """

    def __init__(self, special: Mapping[str, int], plain: Mapping[str, int]) -> None:
        """Ids of the marks that are special tokens, which have no text, and of those that are other added tokens."""
        symbols = {mark: chr(_FIRST_SYMBOL + place) for place, mark in enumerate((*special, *plain))}
        self.symbols: Final = {token: symbols[mark] for mark, token in (*special.items(), *plain.items())}
        self._written = {mark: symbols[mark] for mark in special} | {mark: symbols[mark] + mark for mark in plain}
        self._shown = str.maketrans(dict.fromkeys(symbols.values(), ""))
        self._restored = str.maketrans({symbol: mark if mark in special else "" for mark, symbol in symbols.items()})

    @classmethod
    def of(cls, tokenizer: Tokenizer, marks: Iterable[str]) -> "Marks":
        """Those of the marks that are tokens."""
        ids = tokenizer.added.control
        tokens = {mark: ids[mark] for mark in marks if mark in ids}
        special = {mark: token for mark, token in tokens.items() if token in tokenizer.vocabulary.special_ids}
        # Where only a whole text can be decoded, a token's own text is not to be had.
        plain = {} if tokenizer.vocabulary.joining is Joining.CONTEXT else tokens
        return cls(special, {mark: token for mark, token in plain.items() if mark not in special})

    def written(self, mark: str) -> str:
        """The mark as it stands in a sample's text."""
        return self._written.get(mark, mark)

    def shown(self, text: str) -> str:
        """A sample's text as a caller sees it: without special tokens."""
        return text.translate(self._shown) if self.symbols else text

    def restored(self, text: str) -> str:
        """A sample's text with special tokens written out."""
        return text.translate(self._restored) if self.symbols else text


NO_MARKS: Final = Marks({}, {})
