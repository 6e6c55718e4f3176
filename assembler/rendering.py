"""From a conversation to the prompt's text: the template as it is, mends where it refuses, control text told apart."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from assembler import order
from assembler.control import ControlText, Reading
from assembler.findings import CONTROL_TEXT, ROLE_ORDER, Finding
from assembler.messages import Conversation, Message, Role
from assembler.order import OrderPolicy
from assembler.pace import Pace
from assembler.templates import ChatTemplate, RenderOptions
from assembler.tokenizer import Tokenizer
from assembler.traced import blanked, plain
from assembler.turns import Scope, Turns
from shared.errors import HermesError, invalid_argument

T = TypeVar("T")
ControlPolicy: TypeAlias = Literal["encode", "reject"]

_log: Final = logging.getLogger(__name__)

# Turns of a conversation that a template is timed with, and how often: the first time is no measure.
_TIMED: Final = Conversation((Message(Role.USER, "Why? " * 40), Message(Role.ASSISTANT, "So. " * 150)) * 40)
_TIMES: Final = 4

# Tokens beyond these are reserved ones, alike in all but a number.
_TRIED_TOKENS: Final = 1024

_JOINED: Final = Finding(
    ROLE_ORDER,
    "Messages were joined, because the model's chat template takes no such order.",
    remedy="Send one system message at the beginning, and let user and assistant take turns.",
)
_CONTROL_REMEDY: Final = (
    "It is plain text for the model and forges nothing; leave it out where it was not meant to be read as text."
)


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
        self.turns = Turns()
        self.pace = Pace()
        self._control = ControlText(
            tokenizer.added.control, tokenizer.added.texts, template.words, tokenizer.added.cuts.tokens
        )
        self._tokenizer = tokenizer
        # A normalizer could make a control token of a caller's other letters.
        self._is_normalized = tokenizer.added.always
        lost = _lost(self._control, template)
        problem = _problem(self._control, tokenizer) or (
            lost and f"the template writes {lost!r} in a way that hides its origin"
        )
        self._hides_origin = lost is not None
        self._refuses = control == "reject" or problem is not None
        if problem is not None:
            _log.warning("prompts with control tokens in their texts are refused, because %s", problem)
        self._try_pace()

    def _try_pace(self) -> None:
        """Renders a conversation, so that the first long one finds a pace."""
        with contextlib.suppress(HermesError):  # a template that takes no such conversation is learned as others come
            for _ in range(_TIMES):
                self.render(_TIMED, RenderOptions())

    def render(self, conversation: Conversation, options: RenderOptions, scope: Scope | None = None) -> Rendered:
        """scope: of the earlier turns that may be gone on from; None for none.

        Raises HermesError: what the template's check and render raise, CONTROL_TEXT, ROLE_ORDER or
        TOOL_RESULT_MISMATCH.
        """
        self.template.check(conversation, options.kwargs)
        findings = order.findings(conversation)
        if self._policy.strict:
            order.refuse(findings)
        try:
            reading = self._read(conversation, options, scope)
        except HermesError as error:
            if error.reason != "TEMPLATE_ERROR":
                raise
            refusal = _Refusal(conversation, error)
            reading = self._first_taken(refusal, lambda mended: self._read(mended, options, scope))
            findings.append(_JOINED)
        if reading.live is not None:
            findings.append(self._control_finding(conversation, options))
        elif self._is_normalized and not self._refuses:
            reading = Reading(reading.text, tuple(self._control.tokens.found(reading.text)))
        return Rendered(reading, tuple(findings))

    def _read(self, conversation: Conversation, options: RenderOptions, scope: Scope | None) -> Reading:
        trusted = self._control.trusted(conversation)
        told = None if scope is None else self.turns.find(scope, trusted.messages)
        if told is None:
            length = trusted.characters, len(trusted.messages)
            page = self.pace.timed(*length, lambda: self.template.write(trusted, options))
        else:  # which tells nothing of a render of all messages
            page = self.template.write(trusted, options, told)
        rendered = page.text
        reading = self._control.read(rendered, page.again)
        if reading.live is None:
            if scope is not None and page.told is not None:
                self.turns.keep(scope, page.told, told)
            if (
                self._refuses
                and self._is_normalized
                and self._counted(reading.text) != self._counted(blanked(rendered))
            ):
                raise self._refusal(conversation, options)
            return reading
        if (
            self._hides_origin
            and not self._control.may_begin(conversation, options.kwargs)
            and not self._control.is_glued(rendered)
        ):
            return Reading(reading.text)
        if self._refuses:
            raise self._refusal(conversation, options)
        return reading

    @property
    def reasoning(self) -> frozenset[str]:
        """Control tokens that count in answers and reasoning, because the model wrote them there."""
        return self._control.reasoning

    def signed(self, conversation: Conversation, options: RenderOptions) -> str:
        """The text that `render` makes of a conversation, whose texts tell where they are from; raises the same."""
        try:
            return self.template.render(conversation, options)
        except HermesError as error:
            if error.reason != "TEMPLATE_ERROR":
                raise
            return self._first_taken(
                _Refusal(conversation, error), lambda mended: self.template.render(mended, options)
            )

    def _counted(self, text: str) -> list[int]:
        """The control tokens that count where the whole text is encoded."""
        ids = frozenset(self._tokenizer.added.control.values())
        return [token_id for token_id in self._tokenizer.encode(text) if token_id in ids]

    def _first_taken(self, refusal: _Refusal, attempt: Callable[[Conversation], T]) -> T:
        """What comes of the first mended form that the template takes."""
        for mended in order.mends(refusal.conversation, self._policy):
            try:
                return attempt(mended)
            except HermesError as error:
                if error.reason != "TEMPLATE_ERROR":
                    raise
        raise refusal.error

    def _refusal(self, conversation: Conversation, options: RenderOptions) -> HermesError:
        found = self._control_finding(conversation, options)
        index = {} if found.message_index is None else {"message_index": str(found.message_index)}
        return invalid_argument(CONTROL_TEXT, f"{found.message} This server refuses it: leave it out.", **index)

    def _control_finding(self, conversation: Conversation, options: RenderOptions) -> Finding:
        literal = self._control.literal(conversation, options.kwargs)
        if literal is None:
            return Finding(
                CONTROL_TEXT,
                "Parts of the request's texts make up a control token of the model's.",
                remedy=_CONTROL_REMEDY,
            )
        where = "The request" if literal.message_index is None else f"Message {literal.message_index}"
        return Finding(
            CONTROL_TEXT,
            f"{where} has the control token {literal.token!r} in its text.",
            literal.message_index,
            _CONTROL_REMEDY,
        )


def _dense(text: str) -> str:
    """Without white space, which some tokenizers put between all tokens when they decode."""
    return "".join(text.split())


def _problem(control: ControlText, tokenizer: Tokenizer) -> str | None:
    """Why this tokenizer cannot keep a control token in a caller's text as text, if it cannot."""
    ids = frozenset(tokenizer.added.control.values())
    for token in sorted(tokenizer.added.control)[:_TRIED_TOKENS]:
        text = f"a{token}b"
        literal = tokenizer.encode_guarded(text, ())
        if ids.intersection(literal) or _dense(token) not in _dense(tokenizer.decode(literal)):
            return f"the tokenizer cannot write {token!r} as text"
        if tokenizer.encode_guarded(text, tuple(control.tokens.found(text))) != tokenizer.encode(text):
            return f"the tokenizer knows {token!r} by no other name"
    return None


def _lost(control: ControlText, template: ChatTemplate) -> str | None:
    """A token that the template writes in simple conversations, but not so that it can be told from a caller's."""
    for sample in template.words.samples:
        live = control.read(sample).live
        if live is None:
            continue
        for found in control.tokens.found(plain(sample)):
            if found not in live:
                return found.token
    return None
