"""Conversations in which a test plays the model, token by token."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from assembler.answer_format import AnswerFormats
from assembler.detokenizer import StopRule
from assembler.orders import Assembled, Fitting, Order
from assembler.pipeline import Assembler
from assembler.recall import COMMON, CacheUse
from assembler.sample import Sample
from assembler.tools import ToolCall
from hermes.v1 import assembler_pb2, types_pb2

# The longest token that is tried where a text is split at random.
LONGEST_BYTES = 16


class Splits:
    """Splits of texts into tokens of one vocabulary that are no tokens in themselves, as a model may write them."""

    def __init__(self, assembler: Assembler) -> None:
        vocabulary, added = assembler.files.tokenizer.vocabulary, assembler.files.tokenizer.added
        special = vocabulary.special_ids.union(added.control.values())
        self._ids: dict[bytes, list[int]] = {}
        for token_id, piece in enumerate(vocabulary.token_bytes):
            if piece and token_id not in special:
                self._ids.setdefault(piece, []).append(token_id)

    def random(self, text: str, chance: random.Random) -> list[int]:
        """Any split of the text."""
        data, place, ids = text.encode(), 0, []
        while place < len(data):
            ends = [
                end
                for end in range(place + 1, min(len(data), place + LONGEST_BYTES) + 1)
                if data[place:end] in self._ids
            ]
            end = chance.choice(ends)
            ids.append(chance.choice(self._ids[data[place:end]]))
            place = end
        return ids


class Talk:
    """One conversation. prompt: the last one that was assembled."""

    def __init__(
        self, assembler: Assembler, cache: CacheUse = COMMON, fitting: Fitting | None = None, **fields: Any
    ) -> None:
        self.assembler = assembler
        self.cache = cache
        self.messages: list[types_pb2.Message] = []
        self.prompt: Assembled
        self._formats = AnswerFormats(assembler.files)
        self._fitting = fitting or Fitting()
        self._fields = fields
        self._order: Order

    async def ask(self, *messages: types_pb2.Message | str, **fields: Any) -> Assembled:
        """Assembles the conversation with more messages; a text is a user's."""
        for each in messages:
            self.messages.append(types_pb2.Message(role="user", content=each) if isinstance(each, str) else each)
        chat = assembler_pb2.Chat(messages=self.messages, **self._fields, **fields)
        self._order = Order(assembler_pb2.Prompt(chat=chat), None, True, self._fitting, self.cache)
        self.prompt = await self.assembler.assemble(self._order)
        return self.prompt

    async def fresh(self, assembler: Assembler | None = None) -> Assembled:
        """The same prompt, tokenized anew."""
        return await (assembler or Assembler(self.assembler.files)).assemble(
            Order(self._order.prompt, None, return_text=True)
        )

    async def answer(
        self, ids: Iterable[int], ends: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> types_pb2.Message:
        """The model's answer, which its caller puts into the conversation. ends: ids that end an answer."""
        tokenizer, form = self.assembler.files.tokenizer, self._formats.of(self._order.prompt, self.prompt.ids)
        sample = Sample(tokenizer, self.prompt.ids, StopRule(tuple(stops), hidden=frozenset(ends)), form)
        sample.push(ids)
        sample.finish()
        given = sample.given
        keeping = self.assembler.keeping(self._order, self.prompt)
        if keeping is not None:
            await keeping.keep(given)
        message = types_pb2.Message(
            role="assistant",
            content=given.text,
            reasoning=given.reasoning or None,
            tool_calls=[_as_sent(call) for call in given.calls],
        )
        self.messages.append(message)
        return message


def _as_sent(call: ToolCall) -> types_pb2.ToolCall:
    return types_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.text)
