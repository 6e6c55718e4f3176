"""Control text: which control tokens in a rendered prompt are the template's own, and which a caller only wrote.

A control token counts where every character of it is the template's, as `assembler.traced` tells. All others are text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final, NamedTuple

from assembler.messages import Conversation, Message, Role
from assembler.traced import Traced, own_of, plain, traced
from assembler.words import Words

# About half a millisecond of searching.
_STRETCH: Final = 65_536
_OWN: Final = re.compile(b"\1+")


class Live(NamedTuple):
    """A control token in a rendered text that the template wrote, from `start` to before `end`."""

    start: int
    end: int
    token: str


class Reading(NamedTuple):
    """A rendered prompt. live: the control tokens that count; None where all do, because none is the caller's."""

    text: str
    live: tuple[Live, ...] | None = None


class Literal(NamedTuple):
    """A control token in a caller's text. message_index: None where it is in a tool or a template variable."""

    token: str
    message_index: int | None


class ControlTokens:
    """Finds control tokens as the tokenizer does: the leftmost, of those the longest, none inside another."""

    def __init__(self, control: Iterable[str], added: Iterable[str], lone: Iterable[str] = ()) -> None:
        """control: tokens that must not be forged. added: all that the tokenizer finds before it splits the rest.

        lone: those of them that no other can touch or overlap.
        """
        self.texts = frozenset(control)
        self.firsts = frozenset(token[0] for token in self.texts)
        # Other added tokens matter where they lie over a control token and so keep it from being found.
        tokens = self.texts.union(token for token in added if self.firsts.intersection(token))
        self._token = longest_of(tokens)
        self._reach = max(map(len, tokens), default=0)
        self._are_lone = tokens.issubset(lone)

    def found(self, text: str, start: int = 0, end: int | None = None) -> Iterator[Live]:
        """All between two places of a text, in order, as if all of it were the template's."""
        for match in stretches(self._token, text, self._reach, start, end):
            if match[0] in self.texts:
                yield Live(match.start(), match.end(), match[0])

    def are_all(self, text: str, own: bytes, known: slice = slice(0, 0)) -> bool:
        """Whether every token in the text is the template's, and none of the template's is hidden by a longer one.

        known: a part of the text for which that was found before.
        """
        if known.stop - known.start < 2 * self._reach or not self._are_lone:
            return self._are_all(text, own, 0, len(text))
        # A token at the part's edge reaches no further into it.
        head, tail = known.start + self._reach, known.stop - self._reach
        return self._are_all(text, own, 0, head) and self._are_all(text, own, tail, len(text))

    def _are_all(self, text: str, own: bytes, first: int, last: int) -> bool:
        for match in stretches(self._token, text, self._reach, first, last):
            start, end = match.span()
            if own.find(0, start, end) >= 0 and (match[0] in self.texts or own.find(1, start, end) >= 0):
                return False
        return True


class ControlText:
    """Tells control tokens from a caller's text, for one tokenizer and one template."""

    def __init__(self, control: Iterable[str], added: Iterable[str], words: Words, lone: Iterable[str] = ()) -> None:
        """control, added, lone: as ControlTokens has them."""
        self.tokens = ControlTokens(control, added, lone)
        # Marks that the template looks for in an answer, such as </think>: the model wrote them, and they count there.
        self.reasoning = self._reasoning(words)
        self._reasoning_mark = longest_of(self.reasoning)

    def trusted(self, conversation: Conversation) -> Conversation:
        """The conversation with the reasoning marks in its answers as the template's own."""
        if not self.reasoning or not any(map(self._has_marks, conversation.messages)):
            return conversation
        return replace(conversation, messages=tuple(map(self._trusted, conversation.messages)))

    def read(self, rendered: str, known: slice = slice(0, 0)) -> Reading:
        """What a rendered text says. known: a part of it in which all control tokens are known to count."""
        text = plain(rendered)
        return Reading(text, None if self.tokens.are_all(text, own_of(rendered), known) else self.live(rendered))

    def live(self, rendered: str) -> tuple[Live, ...]:
        """The control tokens of a rendered text that the template wrote."""
        text = plain(rendered)
        runs = _OWN.finditer(own_of(rendered))
        return tuple(found for run in runs for found in self.tokens.found(text, run.start(), run.end()))

    def is_glued(self, rendered: str) -> bool:
        """Whether a control token is the template's in a part, and in another part cannot be told to be."""
        own = own_of(rendered)
        return any(0 < own.count(1, *found[:2]) < len(found.token) for found in self.tokens.found(plain(rendered)))

    def may_begin(self, conversation: Conversation, kwargs: Mapping[str, Any]) -> bool:
        """Whether one of the caller's texts has a letter that a control token begins with."""
        return any(first in text for _, text in _texts(conversation, kwargs) for first in self.tokens.firsts)

    def literal(self, conversation: Conversation, kwargs: Mapping[str, Any]) -> Literal | None:
        """The first control token in the caller's texts that is only text there, if there is one."""
        for index, text in _texts(conversation, kwargs):
            message = None if index is None else conversation.messages[index]
            is_answer = message is not None and _is_answer(message, text)
            for found in self.tokens.found(text):
                if not (is_answer and found.token in self.reasoning):
                    return Literal(found.token, index)
        return None

    def _reasoning(self, words: Words) -> frozenset[str]:
        """What is looked for, but neither opens nor closes a turn."""
        searched = self.tokens.texts.intersection(words.searched)
        turns = {found.token for text in words.turns for found in self.tokens.found(plain(text))}
        turns.update(found.token for text in words.openings for found in islice(self.tokens.found(plain(text)), 1))
        return searched - turns if words.openings else frozenset()

    def _has_marks(self, message: Message) -> bool:
        return message.role is Role.ASSISTANT and any(
            mark in text for text in (message.content, message.reasoning or "") for mark in self.reasoning
        )

    def _trusted(self, message: Message) -> Message:
        if not self._has_marks(message):
            return message
        reasoning = None if message.reasoning is None else self._with_marks(message.reasoning)
        return message._replace(content=self._with_marks(message.content), reasoning=reasoning)

    def _with_marks(self, text: str) -> Traced:
        own = bytearray(len(text))
        for mark in self._reasoning_mark.finditer(text):
            own[mark.start() : mark.end()] = b"\1" * len(mark[0])
        return traced(text, bytes(own))


def stretches(
    pattern: re.Pattern[str], text: str, reach: int, start: int = 0, end: int | None = None
) -> Iterator[re.Match[str]]:
    """The pattern's matches between two places of the text. reach: how far from its beginning a match can go on.

    A text is searched bit by bit, because one long search would keep every other thread from running.
    """
    place, last = start, len(text) if end is None else end
    while place < last:
        stop = place + _STRETCH
        for match in pattern.finditer(text, place, min(stop + reach, last)):
            if match.start() >= stop:
                break
            yield match
            place = match.end()
        place = max(place, stop)


def longest_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of the texts that stands at a place."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_longest(tree) if tree else "(?!)")


def _longest(node: dict[str, Any]) -> str:
    branches = []
    for first, child in node.items():
        if not first:
            continue
        run = first
        while len(child) == 1 and "" not in child:
            ((letter, child),) = child.items()  # noqa: PLW2901 - down to where texts part
            run += letter
        branches.append(re.escape(run) + _longest(child))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")


def _is_answer(message: Message, text: str) -> bool:
    """Whether a text of a message is one that the model wrote freely."""
    return message.role is Role.ASSISTANT and (text is message.content or text is message.reasoning)


def _texts(conversation: Conversation, kwargs: Mapping[str, Any]) -> Iterator[tuple[int | None, str]]:
    """All of the caller's texts, with the index of their message where they are in one."""
    for index, message in enumerate(conversation.messages):
        yield index, message.content
        for text in (message.name, message.tool_call_id, message.reasoning):
            if text is not None:
                yield index, text
        for call in message.tool_calls:
            yield index, call.name
            yield index, call.text
            if call.id is not None:
                yield index, call.id
            for text in _strings(call.arguments):
                yield index, text
    for tool in conversation.tools:
        for text in _strings(tool.function):
            yield None, text
    for text in _strings(kwargs):
        yield None, text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
