"""An answer's own tokens, put where its text comes back.

An answer tokenized afresh need not give the ids that the model generated, and the prefix tree holds those. So of the
next turn's prompt the beginning up to the answer's end is made of ids alone: those of the prompt that was answered,
those that were generated, and those of what the template writes behind them. Bytes decide: whatever is put together
here is, byte for byte, what the template writes for the conversation with its answer.
"""

import logging
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final, NamedTuple

from assembler.beginnings import Beginning, Beginnings, Plan
from assembler.control import Live, Reading
from assembler.messages import Conversation, Message, Role
from assembler.tokenizer import TokenIds, Tokenizer
from assembler.tools import ToolCall
from assembler.vocabulary import Joining

# What is said after the answer, so that the template writes that as it will in the next turn; no template has it.
_NEXT: Final = "And what comes next?"
# Shows what a tokenizer puts before a text that stands behind a control token.
_ANY_LETTER: Final = "x"

_log: Final = logging.getLogger(__name__)


class Given(NamedTuple):
    """One sample as its caller has it, and the ids that the model generated for it.

    hidden: ids that have no text, because they end a sample. stopped: a stop string ended it.
    """

    ids: TokenIds
    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    hidden: Collection[int] = frozenset()
    stopped: bool = False


class Outcome(StrEnum):
    """What became of an answer: it is kept with its own ids, or not, and why not."""

    KEPT = "kept"
    TOKENIZER = "tokenizer"  # its texts cannot be cut, or what its tokens stand for is not known one by one
    REFUSED = "refused"  # the template takes no conversation that goes on so
    HISTORY = "history"  # the template writes what was before the answer in another way
    REWRITTEN = "rewritten"  # or the answer itself
    CONTROL = "control"  # a control token is in it that is text when it comes back, or the other way round
    STOPPED = "stopped"  # a stop string ended it inside a token
    LATE = "late"  # others would have waited too long for it: a long conversation, or many samples
    OPEN = "open"  # the template writes no control token behind it after which texts may be cut


class LostError(Exception):
    """An answer's own ids cannot be used when it comes back."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class _Taken(NamedTuple):
    """The generated ids that the template's text goes on with. end: of them in the text. spans: control tokens."""

    ids: TokenIds
    end: int
    spans: list[Live]


def going_on(conversation: Conversation, given: Given, *, continued: bool) -> Conversation:
    """The conversation with its answer, as a caller sends it in the next turn.

    continued: the answer goes on with the last message.
    """
    answer = Message(Role.ASSISTANT, given.text, reasoning=given.reasoning or None, tool_calls=given.calls)
    messages = conversation.messages
    if continued:
        *before, begun = messages
        calls = (*begun.tool_calls, *given.calls)
        messages = tuple(before)
        answer = begun._replace(content=begun.content + given.text, tool_calls=calls)
    following = [Message(Role.TOOL, _NEXT, name=call.name, tool_call_id=call.id) for call in given.calls]
    return replace(conversation, messages=(*messages, answer, *(following or [Message(Role.USER, _NEXT)])))


class Splicer:
    """Puts ids together for one tokenizer. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, beginnings: Beginnings) -> None:
        self._tokenizer = tokenizer
        self._beginnings = beginnings
        self._bytes_of = tokenizer.vocabulary.bytes_of
        self._tokens = tokenizer.added.guard.tokens
        self._control = {token_id: token for token, token_id in tokenizer.added.control.items()}
        can_cut, has_bytes = bool(tokenizer.added.cuts.tokens), tokenizer.vocabulary.joining is not Joining.CONTEXT
        if can_cut and not has_bytes:
            _log.info(
                "answers are tokenized anew when they come back, because this tokenizer joins tokens in its own way"
            )
        self.works = can_cut and has_bytes
        # Llama's older tokenizers begin whatever stands behind a control token with a space.
        first = self._bytes(tokenizer.encode(_ANY_LETTER)) if self.works else b""
        self._lead = first.removesuffix(_ANY_LETTER.encode())

    def splice(
        self, prompt: TokenIds, before: Reading, after: Reading, plan: Plan, given: Given
    ) -> tuple[Beginning, TokenIds]:
        """The next turn's beginning up to the answer's end, and its ids. Raises LostError.

        before: the text of the prompt that was answered. after: that of the conversation that goes on, with its plan.
        """
        start = len(before.text)
        if not after.text.startswith(before.text) or not self._same(before, after, start):
            raise LostError(Outcome.HISTORY)
        taken = self._taken(after.text, start, given)
        if taken.spans != self._counting(after, start, taken.end):
            raise LostError(Outcome.CONTROL)
        beginning = _first_behind(plan, taken.end)
        if beginning is None or beginning.end > max(after.text.find(_NEXT, taken.end), taken.end):
            raise LostError(Outcome.OPEN)
        tail = self._tail(after, start, taken, beginning.end)
        return beginning, prompt + taken.ids + tail

    def _same(self, before: Reading, after: Reading, end: int) -> bool:
        """Whether the same control tokens count in both up to there, where their texts are the same."""
        if before.live is None and after.live is None:
            return True
        return self._counting(before, 0, end) == self._counting(after, 0, end)

    def _counting(self, reading: Reading, start: int, end: int) -> list[Live]:
        """The control tokens that count and begin between two places."""
        if reading.live is not None:
            return [each for each in reading.live if start <= each.start < end]
        found = self._tokens.found(reading.text, start)
        counting = []
        for each in found:
            if each.start >= end:
                break
            counting.append(each)
        return counting

    def _taken(self, text: str, start: int, given: Given) -> _Taken:
        """As many of the generated ids as the text has behind the prompt. Raises LostError where some are missing."""
        written = text[start:].encode()
        leads = (b"", self._lead) if self._lead and self._ends_with_control(text, start) else (b"",)
        data, (count, end) = max(
            ((lead + written, self._matched(given.ids, lead + written)) for lead in leads), key=lambda each: each[1]
        )
        lead = len(data) - len(written)
        self._check_rest(given, count, data[lead:end])
        ids = given.ids[:count]
        try:
            shown = data[lead:end].decode()
        except UnicodeDecodeError:
            raise LostError(Outcome.REWRITTEN) from None
        return _Taken(ids, start + len(shown), list(self._spans(ids, data, lead, start)))

    def _matched(self, ids: Iterable[int], data: bytes) -> tuple[int, int]:
        """How many ids, and how many bytes, the data begins with."""
        count = place = 0
        for token_id in ids:
            piece = self._bytes_of(token_id)
            if not piece or not data.startswith(piece, place):
                break
            place += len(piece)
            count += 1
        return count, place

    def _check_rest(self, given: Given, count: int, matched: bytes) -> None:
        """Raises LostError if the text lacks more than white space and what ended the sample."""
        special = self._tokenizer.vocabulary.special_ids
        rest = given.ids[count:]
        shown = [token_id for token_id in rest if token_id not in special and token_id not in given.hidden]
        if not self._bytes(shown).strip():
            return
        if not given.stopped:
            raise LostError(Outcome.CONTROL if rest[0] in special else Outcome.REWRITTEN)
        text = given.text.strip()
        if not text or not matched.rstrip().endswith(text.encode()):
            raise LostError(Outcome.STOPPED)

    def _spans(self, ids: Iterable[int], data: bytes, lead: int, start: int) -> Iterable[Live]:
        """The control tokens among the ids, with their places in the text."""
        place, counted, at = 0, lead, start
        for token_id in ids:
            end = place + len(self._bytes_of(token_id))
            token = self._control.get(token_id)
            if token is not None:
                at += len(data[counted:place].decode(errors="replace"))
                counted = place
                yield Live(at, at + len(token), token)
            place = end

    def _tail(self, after: Reading, start: int, taken: _Taken, end: int) -> TokenIds:
        """Ids of what the template writes behind the generated ones, up to where the beginning ends."""
        cuts, place = self._tokenizer.added.cuts.tokens, taken.end
        if place == end:
            return array("I")
        if taken.spans and taken.spans[-1].end == place and taken.spans[-1].token in cuts:
            return self._beginnings.piece(after, place, end)
        closing = self._counting(after, place, end)[0]  # with one of them the beginning ends
        if closing.token not in cuts:  # what stands before it could matter to it
            raise LostError(Outcome.OPEN)
        words = self._words(after.text[start:place], after.text[place : closing.start])
        return words + self._beginnings.piece(after, closing.start, end)

    def _words(self, answer: str, words: str) -> TokenIds:
        """Ids of the template's words behind an answer, as they are where both are encoded together."""
        ids = self._tokenizer.encode_guarded(answer + words, ())
        missing, place = len(words.encode()), len(ids)
        while missing > 0 and place > 0:
            place -= 1
            missing -= len(self._bytes_of(ids[place]))
        if missing or self._bytes(ids[place:]) != words.encode():
            raise LostError(Outcome.REWRITTEN)
        return ids[place:]

    def _ends_with_control(self, text: str, end: int) -> bool:
        return any(text.endswith(token, 0, end) for token in self._control.values())

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._bytes_of, ids))


def _first_behind(plan: Plan, place: int) -> Beginning | None:
    """The shortest beginning that may be known and has all up to a place in it."""
    found = None
    for each in plan.candidates:  # the longest first
        if each.end < place:
            break
        found = each
    return found
