"""Ids of any number back to text, in parts between which other threads have their turn.

A library's decode holds the interpreter's lock for all of its ids, 0.4 to 0.5 s for a million.
"""

import codecs
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from assembler.vocabulary import Joining, Vocabulary

# Ids of a part, 4 ms of work: fastokens takes 380 to 500 ns for each.
PART: Final = 8192


def decode(ids: Sequence[int], vocabulary: Vocabulary, library: Callable[[Sequence[int]], str], part: int) -> str:
    """What the library gives for all ids. part: ids at a time.

    Tokens whose text depends on their neighbours stay together, and so does a run of pieces for single bytes, of which
    one broken character makes a broken run.
    """
    match vocabulary.joining:
        case Joining.BYTES:
            return "".join(_of_bytes(ids, vocabulary, part))
        case Joining.BYTE_PIECES:
            return "".join(_of_pieces(ids, vocabulary, library, part))
        case Joining.CONTEXT:
            return library(ids)


def _of_bytes(ids: Sequence[int], vocabulary: Vocabulary, part: int) -> Iterator[str]:
    of_part = codecs.getincrementaldecoder("utf-8")("replace").decode
    for start in range(0, len(ids), part):
        yield of_part(b"".join(map(vocabulary.bytes_of, ids[start : start + part])))
    yield of_part(b"", True)


def _of_pieces(
    ids: Sequence[int], vocabulary: Vocabulary, library: Callable[[Sequence[int]], str], part: int
) -> Iterator[str]:
    start = 0
    while start < len(ids):
        end = min(start + part, len(ids))
        while end < len(ids) and not _is_text(ids[end - 1], vocabulary):
            end += 1
        if start == 0:
            yield library(ids[:end])
        else:  # with the token before it, which stands for all that makes a text's beginning look different
            yield library(ids[start - 1 : end])[len(library(ids[start - 1 : start])) :]
        start = end


def _is_text(token_id: int, vocabulary: Vocabulary) -> bool:
    """Whether a token has text that is no byte of a character that others are part of."""
    return token_id not in vocabulary.byte_pieces and bool(vocabulary.bytes_of(token_id))
