"""Ids to text as they come: whole characters only, cut at stop strings."""

import codecs
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from assembler.marks import open_tail
from assembler.tokenizer import Tokenizer
from assembler.vocabulary import Joining, Vocabulary

REPLACEMENT: Final = "\ufffd"
# Enough of the prompt to decide what the answer's first tokens look like beside it.
PROMPT_TAIL: Final = 6
# So far back they are looked for, past tokens without text; 0.05 ms of work.
_LOOKED_THROUGH: Final = 1024
# A character has at most four bytes, so no more tokens than these leave it open.
_MOST_OPEN: Final = 3
# Tokens that the window waits for, where their text is none or changes with each one.
_MOST_WAITING: Final = 16

_EACH_BYTE: Final = "hermes.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


# As `tokenizers` does with broken runs of byte pieces; byte-level tokenizers give one mark for the whole break.
codecs.register_error(_EACH_BYTE, _replace_each_byte)


class Detokenizer(Protocol):
    """Turns one sample's tokens into text, each token once and in order."""

    def push(self, token_id: int) -> str:
        """The text that is whole now; empty while a character is still open."""

    def flush(self) -> str:
        """What is left at the end, or before a token that belongs to no text; an open character becomes U+FFFD."""


def detokenizer(tokenizer: Tokenizer, prompt: Sequence[int], hidden: Collection[int]) -> Detokenizer:
    """A detokenizer for one sample after the prompt. hidden: ids that have no text, besides the control tokens.

    Where the prompt ends inside a character that the answer completes, the answer has the whole character.
    """
    vocabulary = tokenizer.vocabulary
    tail = _tail(vocabulary, prompt)
    if vocabulary.joining is Joining.CONTEXT:
        return _WindowDetokenizer(tokenizer, tail, hidden)
    return _ByteDetokenizer(vocabulary, tail, hidden)


def _tail(vocabulary: Vocabulary, prompt: Sequence[int]) -> list[int]:
    """The prompt's last ids that have text."""
    shown = (
        token_id
        for token_id in islice(reversed(prompt), _LOOKED_THROUGH)
        if token_id not in vocabulary.special_ids and vocabulary.bytes_of(token_id)
    )
    return list(islice(shown, PROMPT_TAIL))[::-1]


class _ByteDetokenizer:
    """For vocabularies whose tokens are bytes: a table and an incremental UTF-8 decoder."""

    def __init__(self, vocabulary: Vocabulary, prompt_tail: Iterable[int], hidden: Collection[int]) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._special_ids = vocabulary.special_ids
        self._hidden = hidden
        errors = "replace" if vocabulary.joining is Joining.BYTES else _EACH_BYTE
        decoder = codecs.getincrementaldecoder("utf-8")(errors)
        decoder.decode(b"".join(map(vocabulary.bytes_of, prompt_tail)))
        open_bytes, _ = decoder.getstate()
        self._decode = decoder.decode
        # How the prompt's own decode ends; the answer's text follows it, or has the whole character in its place.
        self._shown = open_bytes.decode("utf-8", errors)

    def push(self, token_id: int) -> str:
        if token_id in self._special_ids or token_id in self._hidden:
            return ""
        text = self._decode(self._bytes_of(token_id))
        return self._less_shown(text) if self._shown else text

    def flush(self) -> str:
        return self._less_shown(self._decode(b"", True))

    def _less_shown(self, text: str) -> str:
        """The text without what the prompt's decode has of it already."""
        if not text:
            return ""
        shown, self._shown = self._shown, ""
        return text.removeprefix(shown)


class _WindowDetokenizer:
    """For tokens whose text depends on their neighbours: decode a window of them, with and without the new ones."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Iterable[int], hidden: Collection[int]) -> None:
        self._decode = tokenizer.decode_shown
        self._special_ids = tokenizer.vocabulary.special_ids
        self._hidden = hidden
        self._window = list(prompt_tail)
        self._given = len(self._window)  # the text of so many of the window's ids has been given out

    def push(self, token_id: int) -> str:
        # Control tokens are left out of what is shown before tokens are joined, so they tell nothing of each other.
        if token_id in self._special_ids or token_id in self._hidden:
            return ""
        self._window.append(token_id)
        text = self._new_text(len(self._window))
        # A mark at the end may be a character whose other bytes are still to come.
        if text and not text.endswith(REPLACEMENT):
            self._settle(len(self._window))
            return text
        waiting = len(self._window) - self._given
        oldest = "" if waiting <= _MOST_OPEN else self._oldest(text)
        return oldest if oldest or waiting <= _MOST_WAITING else self._all(text)

    def flush(self) -> str:
        text = self._new_text(len(self._window))
        if text:
            self._settle(len(self._window))
        return text

    def _oldest(self, text: str) -> str:
        """The text of the token that has waited longest, where those behind it left it as it is."""
        end = self._given + 1
        first = self._new_text(end)
        if not first or not text.startswith(first):
            return ""
        self._settle(end)
        return first

    def _all(self, text: str) -> str:
        """The waiting tokens' text as it is now; of those without any, the oldest has nothing to tell any more."""
        if text:
            self._settle(len(self._window))
        else:
            del self._window[self._given]
        return text

    def _settle(self, end: int) -> None:
        """The text up to there has been given out; the last tokens stay to tell what the next ones look like."""
        del self._window[: self._given]
        self._given = end - self._given

    def _new_text(self, end: int) -> str:
        """The text of the window up to there that has not been given out."""
        before, text = self._decode(self._window[: self._given]), self._decode(self._window[:end])
        kept = before.rstrip(REPLACEMENT)
        if before != kept and not text.startswith(before) and text.startswith(kept):
            return text[len(kept) :]  # a character that was open is whole now
        return text[len(before) :]


class StopMatcher:
    """Finds stop strings in text that comes in pieces.

    Holds back no more than the longest tail that can still become a stop string. The match is the one that ends first,
    and of those the longest, so that it does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Iterable[str], *, include_stop: bool) -> None:
        """stops: not empty strings. include_stop: a matched stop string stays in the text."""
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def feed(self, piece: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text to give out, and the stop string that the piece completed. Nothing is matched while not armed."""
        if not self._stops:
            return piece, None
        text, known = self._held + piece, len(self._held)
        if armed and (match := self._first_match(text, known)) is not None:
            end, stop = match
            self._held = ""
            return text[: end if self._include_stop else end - len(stop)], stop
        held = open_tail(text, self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def release(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, known: int) -> tuple[int, str] | None:
        """End and text of the first stop string that ends behind the first `known` characters."""
        ends = []
        for stop in self._stops:
            at = text.find(stop, max(0, known + 1 - len(stop)))
            if at >= 0:
                ends.append((at + len(stop), -len(stop), stop))
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop


@dataclass(frozen=True, slots=True)
class StopRule:
    """stops: strings that end a sample; include_stop keeps them in its text.
    min_tokens: none of them counts before the sample has this many tokens.
    hidden: token ids that have no text, besides the control tokens.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    hidden: frozenset[int] = frozenset()
