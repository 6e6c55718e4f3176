"""Finds out where each part of a rendered prompt comes from, by rendering the conversation once more, signed.

Each of the caller's texts gets a sign, which `assembler.traced` then carries through whatever the template does to the
text. A sign is one byte, so where there are more texts than signs there are two renders, for the lower and the higher
digit of a text's number. What comes of an operation that is not followed has no sign; it is looked for by its letters
in the messages near its place, and is the template's where it is in none.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from assembler.letters import Letters
from assembler.messages import Conversation, Message, Role
from assembler.origins import TEMPLATE, Kind, Origin, Origins, Run
from assembler.signed_json import FIRST, signing
from assembler.templates import RenderOptions
from assembler.tools import Tool, ToolCall
from assembler.traced import Traced, own_of, plain, traced

# Signs in one render: the values of a byte, less those that mean something else.
_SIGNS: Final = 256 - FIRST
# Marks that are searched without a pause, a millisecond of work; other threads wait meanwhile.
_AT_ONCE: Final = 16_384
_RUN: Final = re.compile(rb"(.)\1*", re.DOTALL)


def read(
    render: Callable[[Conversation, RenderOptions], str],
    conversation: Conversation,
    options: RenderOptions,
    kept: Callable[[Conversation], Conversation],
    reasoning: frozenset[str] = frozenset(),
) -> Origins:
    """The origins of a conversation's text.

    render: what makes the text. kept: what of the conversation is rendered; indices are those of the whole. reasoning:
    as Origins has it.
    Raises what render raises.
    """
    numbers: dict[Origin, int] = {}
    marks: list[bytes] = []
    text = ""
    while not marks or _SIGNS ** len(marks) < len(numbers):
        signs = _Signs(numbers, _SIGNS ** len(marks))
        with signing():
            rendered = render(kept(signs.conversation(conversation)), signs.options(options))
        text = plain(rendered)
        marks.append(own_of(rendered))
    found = list(_merged(_runs(marks, list(numbers))))
    answers = (index for index, each in enumerate(conversation.messages) if each.role is Role.ASSISTANT)
    return Origins(text, tuple(_resolved(found, text, conversation)), frozenset(answers), reasoning)


class _Signs:
    """Signs a caller's texts with one digit of the numbers that their origins have. unit: what the digit counts."""

    def __init__(self, numbers: dict[Origin, int], unit: int) -> None:
        self._numbers = numbers
        self._unit = unit

    def conversation(self, conversation: Conversation) -> Conversation:
        return Conversation(
            tuple(self._message(index, each) for index, each in enumerate(conversation.messages)),
            tuple(self._tool(each) for each in conversation.tools),
        )

    def options(self, options: RenderOptions) -> RenderOptions:
        origin = Origin(Kind.VARIABLE)
        return replace(options, kwargs={name: self._value(each, origin) for name, each in options.kwargs.items()})

    def _message(self, index: int, message: Message) -> Message:
        name, call_id, reasoning = message.name, message.tool_call_id, message.reasoning
        return message._replace(
            content=self._signed(message.content, Origin(Kind.CONTENT, index)),
            name=None if name is None else self._signed(name, Origin(Kind.NAME, index)),
            tool_call_id=None if call_id is None else self._signed(call_id, Origin(Kind.NAME, index)),
            reasoning=None if reasoning is None else self._signed(reasoning, Origin(Kind.REASONING, index)),
            tool_calls=tuple(self._call(index, each) for each in message.tool_calls),
        )

    def _call(self, index: int, call: ToolCall) -> ToolCall:
        origin = Origin(Kind.TOOL_CALL, index)
        return ToolCall(
            name=self._signed(call.name, origin),
            text=self._signed(call.text, origin),
            arguments=None if call.arguments is None else self._value(call.arguments, origin),
            id=None if call.id is None else self._signed(call.id, Origin(Kind.NAME, index)),
        )

    def _tool(self, tool: Tool) -> Tool:
        return Tool(self._value(tool.function, Origin(Kind.TOOLS)), tool.characters)

    def _value(self, value: Any, origin: Origin) -> Any:
        if isinstance(value, str):
            return self._signed(value, origin)
        if isinstance(value, Mapping):
            return {self._signed(key, origin): self._value(each, origin) for key, each in value.items()}
        if isinstance(value, list):
            return [self._value(each, origin) for each in value]
        return value

    def _signed(self, text: str, origin: Origin) -> Traced:
        number = self._numbers.setdefault(origin, len(self._numbers)) if text else 0
        return traced(text, bytes([FIRST + number // self._unit % _SIGNS]) * len(text))


def _runs(marks: list[bytes], origins: list[Origin]) -> Iterator[tuple[int, Origin | None]]:
    """The end and the origin of each run; None where it has no sign."""
    end = 0
    for signs, length in _equal(marks):
        end += length
        if min(signs) < FIRST:
            yield end, None if 0 in signs else TEMPLATE
            continue
        number = sum((sign - FIRST) * _SIGNS**place for place, sign in enumerate(signs))
        yield end, origins[number]


def _equal(marks: list[bytes]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Runs of equal marks, and how long each is; a long one in pieces."""
    if len(marks) == 1:
        for start in range(0, len(marks[0]), _AT_ONCE):
            for run in _RUN.finditer(marks[0], start, start + _AT_ONCE):
                yield (run[0][0],), len(run[0])
    else:
        for signs, run_of in groupby(zip(*marks, strict=True)):
            yield signs, sum(1 for _ in run_of)


def _merged(runs: Iterable[tuple[int, Origin | None]]) -> Iterator[tuple[int, Origin | None]]:
    for origin, same in groupby(runs, key=lambda run: run[1]):
        *_, (end, _) = same
        yield end, origin


def _resolved(runs: list[tuple[int, Origin | None]], text: str, conversation: Conversation) -> Iterator[Run]:
    """The runs with an origin for each."""
    if any(origin is None for _, origin in runs):
        runs = list(_merged(_looked_for(runs, text, Letters(conversation))))
    yield from (Run(end, origin) for end, origin in runs if origin is not None)


def _looked_for(
    runs: list[tuple[int, Origin | None]], text: str, letters: Letters
) -> Iterator[tuple[int, Origin | None]]:
    after = letters.last
    following = []
    for _, origin in reversed(runs):
        after = _index(origin, after)
        following.append(after)
    start, before = 0, 0
    for (end, origin), next_index in zip(runs, reversed(following), strict=True):
        known = letters.found(text[start:end], before, next_index) if origin is None else origin
        before = _index(known, before)
        start = end
        yield end, known


def _index(origin: Origin | None, otherwise: int) -> int:
    return otherwise if origin is None or origin.message_index is None else origin.message_index
