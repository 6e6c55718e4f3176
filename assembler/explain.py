"""A prompt taken apart, as it would be assembled now, and what each cache has of it."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, NamedTuple

from assembler import signing, truncation
from assembler.alignment import Alignment
from assembler.histories import Rewrite
from assembler.messages import Conversation
from assembler.orders import Assembled, Order
from assembler.origins import TEMPLATE, UNTOLD, Origins, Run
from assembler.pace import Pace
from assembler.pipeline import Assembler
from assembler.segments import Segment, segments
from assembler.templates import options_of
from assembler.tokenizer import TokenIds
from hermes.v1 import assembler_pb2

# Ids that are put into a message without a pause, 2 ms of work; other threads wait meanwhile.
_AT_ONCE: Final = 32_768

_log: Final = logging.getLogger(__name__)

# How much of a prompt the prefix tree has, in tokens; None where it cannot be asked.
Held = Callable[[TokenIds], Awaitable[int | None]]


class Explanation(NamedTuple):
    """assembled: the prompt. told: its text, its segments and what the prefix tree has of it."""

    assembled: Assembled
    told: assembler_pb2.ExplainResponse


class Explainer:
    """Takes prompts apart. What it looks at stays as it is: nothing is kept, counted, or made to stay longer."""

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler.looking()
        self._tokenizer = assembler.files.tokenizer
        self._alignment = Alignment(self._tokenizer)
        self._pace = Pace()

    async def explain(self, order: Order, held: Held) -> Explanation:
        """The prompt that Assemble and Generate would make of the same order. Raises what Assembler.assemble raises."""
        now = order.now or datetime.now()  # noqa: DTZ005 - templates print the local date
        order = replace(order, return_text=True, now=now, cache=order.cache._replace(write=False))
        assembled = await self._assembler.assemble(order)
        tree_tokens = await held(assembled.ids)
        text = assembled.text or ""
        chat = order.prompt.chat if order.prompt.HasField("chat") else None
        origins = None if chat is None else await self._chat_origins(order, assembled)
        rewrites = () if chat is None else self._assembler.chats.drafts(chat).history.rewrites

        def work() -> assembler_pb2.ExplainResponse:
            cut = self._cut(order.prompt, assembled, origins)
            return _as_told(cut, assembled.ids, assembled.cached_tokens, tree_tokens, rewrites)

        return Explanation(assembled, await self._assembler.bench.encoding(len(text), work, slowly=True))

    async def _chat_origins(self, order: Order, assembled: Assembled) -> Origins:
        chat, dropped = order.prompt.chat, assembled.dropped_rounds
        renderer = self._assembler.chats.drafts(chat).renderer

        def kept(conversation: Conversation) -> Conversation:
            return truncation.without(conversation, dropped) if dropped else conversation

        def work() -> Origins:
            conversation, options = self._assembler.conversation(chat), options_of(chat, order.now)
            return signing.read(renderer.signed, conversation, options, kept, renderer.reasoning)

        length = chat.ByteSize(), len(chat.messages)
        origins = await self._assembler.bench.lasting(
            self._pace.seconds(*length), lambda: self._pace.timed(*length, work)
        )
        if origins.text == assembled.text:
            return origins
        _log.warning("the model's chat template writes another text each time, so its parts cannot be told")
        return Origins.untold(assembled.text or "")

    def _cut(self, prompt: assembler_pb2.Prompt, assembled: Assembled, origins: Origins | None) -> list[Segment]:
        """origins: of a chat; other prompts have none of a template's."""
        ids, text = assembled.ids, assembled.text or ""
        if origins is None and prompt.HasField("text"):
            origins = self._around(ids, text)
        if origins is None:
            found = list(self._of_ids(ids))
            if "".join(each.text for each in found) == text:
                return found
        return list(segments(self._alignment, ids, origins or Origins.untold(text)))

    def _around(self, ids: TokenIds, text: str) -> Origins:
        """Raw text with the tokens that the tokenizer puts around it."""
        own = self._tokenizer.encode(text)
        place = next((at for at in range(len(ids) - len(own) + 1) if ids[at : at + len(own)] == own), None)
        if place is None:
            return Origins.untold(self._tokenizer.decode(ids))
        before = self._tokenizer.decode(ids[:place])
        after = self._tokenizer.decode(ids[place + len(own) :])
        end = len(before) + len(text)
        runs = (Run(len(before), TEMPLATE), Run(end, UNTOLD), Run(end + len(after), TEMPLATE))
        return Origins(before + text + after, tuple(run for run in runs if run.end))

    def _of_ids(self, ids: TokenIds) -> Iterator[Segment]:
        """Ready ids: control tokens and what stands between them. What those are spelled as is no control token."""
        start, before = 0, ""
        for place, token_id in enumerate((*ids, None)):
            token = None if token_id is None else self._alignment.control(token_id)
            if token is None and token_id is not None:
                continue
            if start < place:  # with the token before it, because what a text begins with may be shown in another way
                shown = self._tokenizer.decode(ids[start - 1 : place] if before else ids[:place])
                yield Segment(start, place, shown.removeprefix(before), UNTOLD)
            if token is not None:
                yield Segment(place, place + 1, token, UNTOLD, control=True)
                start, before = place + 1, token


def _as_told(
    found: Sequence[Segment],
    ids: TokenIds,
    cached_tokens: int,
    tree_tokens: int | None,
    rewrites: Iterable[Rewrite],
) -> assembler_pb2.ExplainResponse:
    told = assembler_pb2.ExplainResponse(text="".join(each.text for each in found), tree_cached_tokens=tree_tokens)
    told.rewrites.extend(each.told for each in rewrites)
    for each in found:
        tokens = each.end - each.start
        segment = told.segments.add(
            text=each.text,
            message_index=each.origin.message_index,
            control=each.control,
            kind=assembler_pb2.Segment.Kind.Value(f"KIND_{each.origin.kind.name}"),
            other_before=each.other_before,
            other_after=each.other_after,
            cached_tokens=min(max(cached_tokens - each.start, 0), tokens),
            tree_cached_tokens=min(max((tree_tokens or 0) - each.start, 0), tokens),
        )
        for start in range(each.start, each.end, _AT_ONCE):
            segment.token_ids.extend(ids[start : min(start + _AT_ONCE, each.end)])
    return told
