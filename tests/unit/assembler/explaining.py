"""Explanations for tests, and a way to tell whose a text is that has nothing to do with them."""

import codecs
import json
from collections.abc import Callable
from typing import Any

from assembler.explain import Explainer, Explanation
from assembler.orders import Order
from assembler.pipeline import Assembler
from assembler.tokenizer import TokenIds
from hermes.v1 import assembler_pb2

Segment = assembler_pb2.Segment


async def nothing_held(ids: TokenIds) -> int | None:
    return None


async def explained(
    assembler: Assembler,
    chat: assembler_pb2.Chat | None = None,
    prompt: assembler_pb2.Prompt | None = None,
    **fields: Any,
) -> Explanation:
    """The explanation, which is checked against the assembly of the same prompt."""
    order = Order(prompt or assembler_pb2.Prompt(chat=chat), fields.pop("max_tokens", None), return_text=True, **fields)
    found = await Explainer(assembler).explain(order, nothing_held)
    assembled = await assembler.assemble(order)
    assert "".join(each.text for each in found.told.segments) == found.told.text
    assert [token_id for each in found.told.segments for token_id in each.token_ids] == list(assembled.ids)
    if not order.prompt.HasField("text"):
        assert found.told.text == assembled.text
    control = set(assembler.files.tokenizer.added.control.values())
    for each in found.told.segments:
        assert each.control == (each.token_ids[0] in control)
        assert len(each.token_ids) == 1 or not control.intersection(each.token_ids)
        assert each.other_before + each.other_after <= len(each.text)
    return found


def told(found: Explanation, index: int, *kinds: "Segment.Kind.ValueType") -> str:
    """A message's own text, of the kinds that are named or all, less what its tokens hold of others."""
    return "".join(
        each.text[each.other_before : len(each.text) - each.other_after]
        for each in found.told.segments
        if each.HasField("message_index") and each.message_index == index and (not kinds or each.kind in kinds)
    )


def places(found: Explanation, belongs: Callable[[Segment], bool]) -> set[int]:
    """Where the characters are of the segments that are asked for."""
    spots: set[int] = set()
    start = 0
    for each in found.told.segments:
        end = start + len(each.text)
        if belongs(each):
            spots.update(range(start + each.other_before, end - each.other_after))
        start = end
    return spots


def rewritten(value: Any) -> Any:
    """The same with other letters, each in the place of one."""
    if isinstance(value, str):
        return codecs.encode(value, "rot13")
    if isinstance(value, dict):
        return {rewritten(key): rewritten(each) for key, each in value.items()}
    return [rewritten(each) for each in value] if isinstance(value, list) else value


def with_other_letters(chat: assembler_pb2.Chat, index: int) -> assembler_pb2.Chat:
    """The chat with other letters in a message's content, reasoning and calls."""
    changed = assembler_pb2.Chat()
    changed.CopyFrom(chat)
    message = changed.messages[index]
    message.content = rewritten(message.content)
    if message.HasField("reasoning"):
        message.reasoning = rewritten(message.reasoning)
    for call in message.tool_calls:
        call.name = rewritten(call.name)
        call.arguments_json = json.dumps(rewritten(json.loads(call.arguments_json)))
    return changed


async def changed_places(assembler: Assembler, chat: assembler_pb2.Chat, index: int) -> set[int]:
    """Where the rendered text is another one when a message has other letters."""
    texts = []
    for each in (chat, with_other_letters(chat, index)):
        assembled = await assembler.assemble(Order(assembler_pb2.Prompt(chat=each), None, return_text=True))
        texts.append(assembled.text or "")
    assert len(texts[0]) == len(texts[1])
    return {place for place, (one, other) in enumerate(zip(*texts, strict=True)) if one != other}
