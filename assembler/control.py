"""Control text: which control tokens in a rendered prompt are the template's own, and which a caller only wrote.

A control token counts where every character of it is the template's. Before a render, each place in the caller's texts
where a token could begin gets a stand-in: a symbol that nothing else in the request has, one for each letter replaced.
Texts keep their length, and templates that trim, split or compare work as ever. After it, the symbols show which
characters came from the caller; a token that has one is text. Then the letters are put back.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final, NamedTuple, Protocol

from assembler.messages import Conversation, Message, Role
from assembler.spots import Spots, longest_of, stretches
from assembler.templates import RenderOptions
from assembler.tools import Tool, ToolCall
from assembler.words import Words
from shared.errors import invalid_argument

# Blocks of symbols that hardly a text has: Braille, hexagrams, Yi radicals, boxes, dingbats. Of category So alone,
# because templates and JSON leave those as they are; private-use characters come out escaped.
_BLOCKS: Final = ((0x2800, 0x2900), (0x4DC0, 0x4E00), (0xA490, 0xA4D0), (0x2500, 0x2580), (0x2600, 0x27C0))
_SYMBOLS: Final = tuple(
    chr(code) for first, end in _BLOCKS for code in range(first, end) if unicodedata.category(chr(code)) == "So"
)
# At a time, because one long join would keep every other thread from running.
_JOINED_PIECES: Final = 10_000


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


class Marked(NamedTuple):
    """A request with stand-ins in it. letters: what each symbol stands for."""

    conversation: Conversation
    options: RenderOptions
    letters: Mapping[str, str]


class ControlTokens:
    """Finds control tokens as the tokenizer does: the leftmost, of those the longest, none inside another."""

    def __init__(self, control: Iterable[str], added: Iterable[str]) -> None:
        """control: tokens that must not be forged. added: all that the tokenizer finds before it splits the rest."""
        self._control = frozenset(control)
        firsts = {token[0] for token in self._control}
        # Other added tokens matter where they lie over a control token and so keep it from being found.
        tokens = self._control.union(token for token in added if firsts.intersection(token))
        self._token = longest_of(tokens)
        self._reach = max(map(len, tokens), default=0)

    def found(self, text: str) -> Iterator[Live]:
        """All that a text has, in order, as if all of it were the template's."""
        for match in stretches(self._token, text, self._reach):
            if match[0] in self._control:
                yield Live(match.start(), match.end(), match[0])


class ControlText:
    """Tells control tokens from a caller's text, for one tokenizer and one template."""

    def __init__(self, control: Iterable[str], added: Iterable[str], words: Words) -> None:
        """control, added: as ControlTokens has them."""
        control = frozenset(control)
        self._spots = Spots(control, words)
        self._tokens = ControlTokens(control, added)
        self._template_texts = words.literals

    def mark(self, conversation: Conversation, options: RenderOptions) -> Marked | None:
        """The request with stand-ins; None where no text of the caller's can have a part in a control token.

        Raises HermesError CONTROL_TEXT where the caller's texts leave no symbol to stand in.
        """
        texts = tuple(_texts(conversation, options.kwargs))
        if not any(self._spots.are_in(text, in_data=index is None) for index, text in texts):
            return None
        stand_ins = _StandIns((*(text for _, text in texts), *self._template_texts))

        def put(text: str, *, in_answer: bool = False, in_data: bool = False) -> str:
            spots = self._spots.find(text, in_answer=in_answer, in_data=in_data)
            return _replaced(text, spots, stand_ins.symbol)

        def elsewhere(text: str) -> str:
            return put(text, in_data=True)

        return Marked(
            replace(
                conversation,
                messages=tuple(_message(message, put) for message in conversation.messages),
                tools=tuple(Tool(_changed(tool.function, elsewhere), tool.characters) for tool in conversation.tools),
            ),
            replace(options, kwargs=_changed(options.kwargs, elsewhere)),
            stand_ins.letters,
        )

    def read(self, rendered: str, letters: Mapping[str, str]) -> Reading:
        """What a render of a marked request says, the letters put back."""
        text = marked = _unescaped(rendered, letters)
        for symbol, letter in letters.items():
            text = text.replace(symbol, letter)
        if text == marked:
            return Reading(text)
        live = tuple(self._tokens.found(marked))
        are_all = all(one == other for one, other in zip_longest(live, self._tokens.found(text)))
        return Reading(text, None if are_all else live)

    def literal(self, conversation: Conversation, options: RenderOptions) -> Literal | None:
        """The first control token in the caller's texts that would be text in the prompt, if there is one."""
        for index, text in _texts(conversation, options.kwargs):
            message = None if index is None else conversation.messages[index]
            in_answer = message is not None and _is_answer(message, text)
            if next(self._tokens.found(text), None) is None:
                continue
            spots = frozenset(self._spots.find(text, in_answer=in_answer))
            for found in self._tokens.found(text):
                if found.start in spots:
                    return Literal(found.token, index)
        return None

    def live(self, text: str) -> tuple[Live, ...]:
        """All control tokens of a text that the template wrote alone."""
        return tuple(self._tokens.found(text))


def _replaced(text: str, places: Iterable[int], symbol: Callable[[str], str]) -> str:
    """The text with another letter in each of the places."""
    chunks: list[str] = []
    pieces: list[str] = []
    end = 0
    for place in places:
        if place < end:  # it came twice
            continue
        pieces += (text[end:place], symbol(text[place]))
        end = place + 1
        if len(pieces) > _JOINED_PIECES:
            chunks.append("".join(pieces))
            pieces.clear()
    return "".join((*chunks, *pieces, text[end:]))


class _StandIns:
    """letters: by symbol, as they were given out."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = texts
        self._symbols: dict[str, str] = {}
        self._free = iter(_SYMBOLS)
        self.letters: dict[str, str] = {}

    def symbol(self, letter: str) -> str:
        """The letter's symbol, which none of the texts has, not even escaped."""
        if letter not in self._symbols:
            symbol = next((each for each in self._free if self._is_new(each)), None)
            if symbol is None:
                raise invalid_argument(
                    "CONTROL_TEXT",
                    "The texts of this request have control tokens in them and every symbol that could stand for one: "
                    "leave the control tokens out.",
                )
            self._symbols[letter] = symbol
            self.letters[symbol] = letter
        return self._symbols[letter]

    def _is_new(self, symbol: str) -> bool:
        escaped = _escaped(symbol)
        return not any(symbol in text or escaped in text for text in self._texts)


def _escaped(letter: str) -> str:
    """The letter as JSON in ASCII has it."""
    return json.dumps(letter)[1:-1]


def _unescaped(text: str, letters: Mapping[str, str]) -> str:
    """The text with symbols where a template has escaped them; a letter that JSON escapes comes out escaped."""
    for symbol, letter in letters.items():
        if _escaped(symbol) in text:
            text = text.replace(_escaped(symbol), symbol if _escaped(letter) == letter else _escaped(letter))
    return text


def _is_answer(message: Message, text: str) -> bool:
    """Whether a text of a message is one that the model wrote freely."""
    return message.role is Role.ASSISTANT and (text is message.content or text is message.reasoning)


class _Put(Protocol):
    def __call__(self, text: str, *, in_answer: bool = False, in_data: bool = False) -> str: ...


def _message(message: Message, put: _Put) -> Message:
    in_answer = message.role is Role.ASSISTANT
    return Message(
        role=message.role,
        content=put(message.content, in_answer=in_answer),
        name=None if message.name is None else put(message.name),
        tool_call_id=None if message.tool_call_id is None else put(message.tool_call_id),
        reasoning=None if message.reasoning is None else put(message.reasoning, in_answer=in_answer),
        tool_calls=tuple(_call(call, put) for call in message.tool_calls),
    )


def _call(call: ToolCall, put: _Put) -> ToolCall:
    arguments = call.arguments
    return ToolCall(
        name=put(call.name, in_data=True),
        text=put(call.text),
        arguments=None if arguments is None else _changed(arguments, lambda text: put(text, in_data=True)),
        id=None if call.id is None else put(call.id),
    )


def _changed(value: Any, put: Callable[[str], str]) -> Any:
    """A JSON value with all its strings changed, keys too."""
    if isinstance(value, str):
        return put(value)
    if isinstance(value, Mapping):
        return {put(key): _changed(each, put) for key, each in value.items()}
    if isinstance(value, list):
        return [_changed(each, put) for each in value]
    return value


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
