"""Where the texts of messages are in a rendered prompt, as far as the template wrote them as they are."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from assembler.messages import Message

# Of a text its ends are looked for, so that nobody waits for megabytes to be compared.
_END_CHARACTERS: Final = 64
# Places that begin alike and end otherwise, before the whole text is looked for.
_TRIES: Final = 8
# White space at the ends of most texts is shorter.
_MOST_SPACE: Final = 256


class Place(NamedTuple):
    """A message's text in a prompt, from `start` to before `end`. skipped: white space before it that is not there."""

    message_index: int
    start: int
    end: int
    skipped: int


def of(text: str, messages: tuple[Message, ...]) -> Iterator[Place]:
    """In the messages' order, up to the first that is not found. Templates may leave out white space at the ends."""
    place = 0
    for index, message in enumerate(messages):
        first, last = _inner(message.content)
        start = _found(text, message.content, first, last, place)
        if start < 0:
            return
        place = start + last - first
        yield Place(index, start, place, first)


def found(text: str, content: str, place: int) -> int:
    """Where a text is in a prompt from a place on, but for white space at its ends; below 0 where it is not."""
    return _found(text, content, *_inner(content), place)


def _found(text: str, content: str, first: int, last: int, place: int) -> int:
    head, tail = content[first : min(last, first + _END_CHARACTERS)], content[max(first, last - _END_CHARACTERS) : last]
    at, in_word = place - 1, -1
    for _ in range(_TRIES):
        at = text.find(head, at + 1)
        if at < 0:
            return in_word
        if text.startswith(tail, at + last - first - len(tail)):
            # A question of one letter is not that of `user` in the mark before it.
            if not _goes_on(text, at) and not _goes_on(text, at + last - first):
                return at
            in_word = in_word if in_word >= 0 else at
    return in_word if in_word >= 0 else text.find(content[first:last], at + 1)


def _goes_on(text: str, place: int) -> bool:
    """Whether a word goes on over a place."""
    around = text[max(0, place - 1) : place + 1]
    return len(around) > 1 and around.isalnum()


def _inner(content: str) -> tuple[int, int]:
    """Where the text begins and ends without the white space at its ends."""
    head, tail = content[:_MOST_SPACE].lstrip(), content[-_MOST_SPACE:].rstrip()
    if head and tail:
        return min(len(content), _MOST_SPACE) - len(head), len(content) - min(len(content), _MOST_SPACE) + len(tail)
    words = content.strip()
    start = content.find(words) if words else 0
    return start, start + len(words)
