"""One sample of an answer: tokens in; text, reasoning and tool calls out, up to where a stop string ends it."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from assembler.answer_format import PLAIN, AnswerFormat, AnswerReader, Reasoning
from assembler.detokenizer import StopMatcher, StopRule, detokenizer
from assembler.splice import Given
from assembler.tokenizer import TokenIds, Tokenizer
from assembler.tools import ToolCall


class Piece(NamedTuple):
    """What is new of a sample: text, reasoning, how many of the pushed tokens belong to it, and the stop string that
    ended it."""

    text: str
    reasoning: str
    tokens: int
    stop: str | None


class Sample:
    """Reads one sample, as its tokens come.

    calls: those that are whole. ids: tokens that belong to the sample. stop: the stop string that ended it.
    Stop strings are looked for in the text alone, not in reasoning and not in calls.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: TokenIds, rule: StopRule, form: AnswerFormat = PLAIN) -> None:
        self.calls: list[ToolCall] = []
        self.ids: TokenIds = array("I")
        self.stop: str | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._rule = rule
        self._symbols = form.marks.symbols
        self._detokenizer = detokenizer(tokenizer, prompt, rule.hidden)
        self._reader = None if form is PLAIN else AnswerReader(form)
        self._matcher = StopMatcher(rule.stops, include_stop=rule.include_stop)
        # Most answers have no marks, and each token counts.
        self._written = self._with_symbol if self._symbols else self._detokenizer.push

    @property
    def tokens(self) -> int:
        """How many belong to the sample."""
        return len(self.ids)

    @property
    def given(self) -> Given:
        """All that the caller has of it by now."""
        text, reasoning = "".join(self._texts), "".join(self._thoughts)
        return Given(self.ids, text, reasoning, tuple(self.calls), self._rule.hidden, self.stop is not None)

    def push(self, token_ids: Iterable[int]) -> Piece:
        """Takes the next tokens; those behind one that ended the sample do not count."""
        before, texts, thoughts = self.tokens, list[str](), list[str]()
        for token_id in token_ids:
            if self.stop is not None:
                break
            self.ids.append(token_id)
            if written := self._written(token_id):
                self._read(written, texts, thoughts)
        return self._piece(texts, thoughts, self.tokens - before)

    def finish(self) -> Piece:
        """The rest, when no more tokens come."""
        texts, thoughts = list[str](), list[str]()
        if self.stop is None:
            self._read(self._detokenizer.flush(), texts, thoughts, last=True)
            texts.append(self._matcher.release())
        return self._piece(texts, thoughts, 0)

    def _piece(self, texts: list[str], thoughts: list[str], tokens: int) -> Piece:
        self._texts += texts
        self._thoughts += thoughts
        return Piece("".join(texts), "".join(thoughts), tokens, self.stop)

    def _with_symbol(self, token_id: int) -> str:
        """A token's text, behind its symbol where it is a mark; that ends whatever came before."""
        symbol = self._symbols.get(token_id)
        if symbol is None or token_id in self._rule.hidden:
            return self._detokenizer.push(token_id)
        return self._detokenizer.flush() + symbol + self._detokenizer.push(token_id)

    def _read(self, written: str, texts: list[str], thoughts: list[str], *, last: bool = False) -> None:
        armed = self.tokens >= self._rule.min_tokens
        for part in (written,) if self._reader is None else self._reader.feed(written, last=last):
            match part:
                case str():
                    text, self.stop = self._matcher.feed(part, armed=armed)
                    texts.append(text)
                    if self.stop is not None:
                        return
                case Reasoning():
                    thoughts.append(part.text)
                case ToolCall():
                    self.calls.append(part)
