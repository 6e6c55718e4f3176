"""Finds whose a text is by its letters, where nothing else tells."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from assembler.messages import Conversation, Message
from assembler.origins import TEMPLATE, Kind, Origin

# Fewer letters stand in many a text by chance; such a text has to be the whole of one.
_LEAST_LETTERS: Final = 8
# Messages that are looked through for one text.
_MOST_MESSAGES: Final = 64


class Letters:
    """The texts of a conversation without their white space, each squashed when somebody asks for it.

    last: the index of the last message.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._messages: dict[int, list[tuple[Kind, str]]] = {}
        self._tools: list[str] | None = None
        self.last = len(conversation.messages) - 1

    def found(self, text: str, before: int, after: int) -> Origin:
        """Where a text is from that stands between parts of these messages; the template's where it is in none."""
        wanted = _squashed(text)
        first, last = sorted((before, after))
        for index in range(first, min(last + 1, first + _MOST_MESSAGES)):
            for kind, form in self._forms(index):
                if _is_in(wanted, form):
                    return Origin(kind, index)
        return Origin(Kind.TOOLS) if any(_is_in(wanted, form) for form in self._tool_forms()) else TEMPLATE

    def _forms(self, index: int) -> list[tuple[Kind, str]]:
        if index not in self._messages:
            texts = _texts(self._conversation.messages[index])
            self._messages[index] = [(kind, _squashed(text)) for kind, text in texts]
        return self._messages[index]

    def _tool_forms(self) -> list[str]:
        if self._tools is None:
            self._tools = [_squashed(form) for tool in self._conversation.tools for form in _written(tool.function)]
        return self._tools


def _is_in(wanted: str, form: str) -> bool:
    return bool(wanted) and (wanted == form or (len(wanted) >= _LEAST_LETTERS and wanted in form))


def _squashed(text: str) -> str:
    return "".join(text.split())


def _texts(message: Message) -> Iterator[tuple[Kind, str]]:
    yield Kind.CONTENT, message.content
    yield Kind.REASONING, message.reasoning or ""
    for name in (message.name, message.tool_call_id, *(call.id for call in message.tool_calls)):
        yield Kind.NAME, name or ""
    for call in message.tool_calls:
        for text in (call.name, call.text, *_written(call.arguments)):
            yield Kind.TOOL_CALL, text


def _written(value: Any) -> Iterator[str]:
    """A value and all in it, in JSON and in Python's own way."""
    yield json.dumps(value, ensure_ascii=False)
    yield str(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _written(part)
