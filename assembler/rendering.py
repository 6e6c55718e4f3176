"""From a conversation to the prompt's text: the template as it is, mends where it refuses, control text told apart."""

import logging
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from assembler import order
from assembler.control import ControlText, Live, Reading
from assembler.findings import CONTROL_TEXT, ROLE_ORDER, Finding
from assembler.messages import Conversation, Message, Role
from assembler.order import OrderPolicy
from assembler.templates import ChatTemplate, RenderOptions
from assembler.tokenizer import Tokenizer
from shared.errors import HermesError, invalid_argument

ControlPolicy: TypeAlias = Literal["encode", "reject"]

_log: Final = logging.getLogger(__name__)

# Tokens beyond these are reserved ones, alike in all but a number.
_TRIED_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text, which of its control tokens count, and what looked wrong."""

    reading: Reading
    findings: tuple[Finding, ...]


class _Refusal(NamedTuple):
    conversation: Conversation
    error: HermesError


class Renderer:
    """Renders conversations with one template for one tokenizer."""

    def __init__(
        self, template: ChatTemplate, tokenizer: Tokenizer, policy: OrderPolicy, control: ControlPolicy
    ) -> None:
        self.template = template
        self._policy = policy
        self._control = ControlText(tokenizer.added.control, tokenizer.added.texts, template.words)
        self._guards_all = tokenizer.added.always
        problem = _problem(self._control, template, tokenizer)
        # Where a literal may count as a token after all, what looks like one is refused before it is rendered.
        self._refuses_early = problem is not None
        self._refuses = control == "reject" or problem is not None
        if problem is not None:
            _log.warning("prompts with control tokens in their texts are refused, because %s", problem)

    def render(self, conversation: Conversation, options: RenderOptions) -> Rendered:
        """Raises HermesError: what the template's check and render raise, CONTROL_TEXT, ROLE_ORDER or
        TOOL_RESULT_MISMATCH."""
        self.template.check(conversation, options.kwargs)
        findings = order.findings(conversation)
        if self._policy.strict:
            order.refuse(findings)
        try:
            reading = self._read(conversation, options)
        except HermesError as error:
            if error.reason != "TEMPLATE_ERROR":
                raise
            reading = self._mended(_Refusal(conversation, error), options)
            findings.append(
                Finding(ROLE_ORDER, "Messages were joined, because the model's chat template takes no such order.")
            )
        if reading.live is not None:
            findings.append(self._control_finding(conversation, options))
        elif self._guards_all:
            reading = Reading(reading.text, self._control.live(reading.text))
        return Rendered(reading, tuple(findings))

    def _read(self, conversation: Conversation, options: RenderOptions) -> Reading:
        marked = self._control.mark(conversation, options)
        if marked is None:
            return Reading(self.template.render(conversation, options))
        if self._refuses_early and self._control.literal(conversation, options) is not None:
            raise self._refusal(conversation, options)
        reading = self._control.read(self.template.render(marked.conversation, marked.options), marked.letters)
        if reading.live is None:
            return self._plain(conversation, options, reading)
        if self._refuses:
            raise self._refusal(conversation, options)
        return reading

    def _plain(self, conversation: Conversation, options: RenderOptions, reading: Reading) -> Reading:
        """The prompt without stand-ins, where none of its control tokens came from the caller.

        A template may write another text for those: for the caller's own it is the one that the model's makers meant.
        """
        text = self.template.render(conversation, options)
        if text == reading.text or _tokens(self._control.live(text)) == _tokens(self._control.live(reading.text)):
            return Reading(text)
        return reading

    def _mended(self, refusal: _Refusal, options: RenderOptions) -> Reading:
        for mended in order.mends(refusal.conversation, self._policy):
            try:
                return self._read(mended, options)
            except HermesError as error:
                if error.reason != "TEMPLATE_ERROR":
                    raise
        raise refusal.error

    def _refusal(self, conversation: Conversation, options: RenderOptions) -> HermesError:
        found = self._control_finding(conversation, options)
        index = {} if found.message_index is None else {"message_index": str(found.message_index)}
        return invalid_argument(CONTROL_TEXT, f"{found.message} This server refuses it: leave it out.", **index)

    def _control_finding(self, conversation: Conversation, options: RenderOptions) -> Finding:
        literal = self._control.literal(conversation, options)
        if literal is None:
            return Finding(CONTROL_TEXT, "Parts of the request's texts make up a control token of the model's.")
        where = "The request" if literal.message_index is None else f"Message {literal.message_index}"
        return Finding(
            CONTROL_TEXT, f"{where} has the control token {literal.token!r} in its text.", literal.message_index
        )


def _tokens(live: tuple[Live, ...]) -> list[str]:
    return [each.token for each in live]


def _dense(text: str) -> str:
    """Without white space, which some tokenizers put between all tokens when they decode."""
    return "".join(text.split())


def _problem(control: ControlText, template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    """Why this tokenizer or this template cannot keep a control token in a caller's text as text, if it cannot."""
    tokens = sorted(tokenizer.added.control)[:_TRIED_TOKENS]
    ids = frozenset(tokenizer.added.control.values())
    for token in tokens:
        text = f"a{token}b"
        literal = tokenizer.encode_guarded(text, ())
        if ids.intersection(literal) or _dense(token) not in _dense(tokenizer.decode(literal)):
            return f"the tokenizer cannot write {token!r} as text"
        if tokenizer.encode_guarded(text, control.live(text)) != tokenizer.encode(text):
            return f"the tokenizer knows {token!r} by no other name"
    for token in tokens[:1]:
        rest = (Message(Role.ASSISTANT, "c"), Message(Role.USER, "d"))
        told = Conversation((Message(Role.USER, f"a{token}b"), *rest))
        clean = Conversation((Message(Role.USER, f"a{'-' * len(token)}b"), *rest))
        options = RenderOptions()
        try:
            marked = control.mark(told, options)
            expected = control.live(template.render(clean, options))
            if marked is None:
                return f"the template's searches hide {token!r}"
            reading = control.read(template.render(marked.conversation, marked.options), marked.letters)
        except HermesError:  # it refuses even the plainest conversation, and will say so when one comes
            return None
        live = reading.live if reading.live is not None else control.live(reading.text)
        if _tokens(live) != _tokens(expected):
            return f"the template changes texts that have {token!r} in them"
    return None
