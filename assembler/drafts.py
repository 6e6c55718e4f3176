"""One conversation on its way to token ids: its text, the beginning of it that is known, and the ids of the rest."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, NamedTuple

from assembler import histories, templates
from assembler.beginnings import Beginnings, Known, Plan
from assembler.cache.key import tag_of
from assembler.frames import Frames
from assembler.messages import Conversation
from assembler.rendering import Rendered, Renderer
from assembler.splice import Given, LostError, Outcome, Splicer, going_on
from assembler.templates import RenderOptions
from assembler.tokenizer import TokenIds
from assembler.tools import Tool
from assembler.turns import Scope, Spoken
from shared.errors import HermesError

_log: Final = logging.getLogger(__name__)


class Asked(NamedTuple):
    """How a conversation is to be rendered. kwargs_json: the options' template variables as the caller wrote them.

    namespace: whose beginnings may be known; None where nobody asks. keeps: what is rendered is kept for later turns.
    """

    options: RenderOptions
    kwargs_json: str
    namespace: str | None
    keeps: bool = True

    def scope(self, tools: tuple[Tool, ...]) -> Scope:
        """All that a render depends on besides the messages, and whose it is."""
        # As text, because tools that are equal to Python can have other types in them, or another order.
        spelled = repr([tool.function for tool in tools]) if tools else ""
        opens = str(self.options.add_generation_prompt)
        namespace = self.namespace or ""
        return Scope(tag_of(namespace), bytes.fromhex(templates.digest(namespace, self.kwargs_json, opens, spelled)))


class Sheet(NamedTuple):
    """A conversation's text, and which of its beginnings may be known."""

    conversation: Conversation
    asked: Asked
    rendered: Rendered
    plan: Plan

    @property
    def text(self) -> str:
        return self.rendered.reading.text


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt. known_tokens: of its beginning, which was known. made: beginnings of it to keep, by key.

    has_own: whether some of its ids are those that the model chose for an answer.
    """

    sheet: Sheet
    ids: TokenIds
    known_tokens: int
    made: tuple[tuple[bytes, TokenIds], ...]
    has_own: bool = False

    @property
    def tokens(self) -> int:
        return len(self.ids)


class Drafts:
    """Makes drafts with one template. Its methods may be called from any thread."""

    def __init__(self, renderer: Renderer, beginnings: Beginnings, splicer: Splicer) -> None:
        self.template = renderer.template
        self.history = histories.read(renderer.template)
        self.renderer = renderer
        self._beginnings = beginnings
        self._splicer = splicer
        self._frames = Frames(renderer.template, beginnings.closing)
        self.pace = renderer.pace
        if not self.history.is_stable:
            _log.warning(
                "turns are computed again where they need not be, because of the chat template: %s", self.history
            )

    def goes_on(self, messages: Sequence[Spoken], namespace: str) -> bool:
        """Whether a chat seems to be one that was rendered a turn ago, and has grown."""
        return self.renderer.turns.may_go_on(tag_of(namespace), messages)

    def sheet(self, conversation: Conversation, asked: Asked) -> Sheet:
        """Renders the template. Raises HermesError as Renderer.render does."""
        if asked.namespace is None:
            rendered = self.renderer.render(conversation, asked.options)
            return Sheet(conversation, asked, rendered, Plan())
        scope = asked.scope(conversation.tools) if asked.keeps else None
        rendered = self.renderer.render(conversation, asked.options, scope)
        frame = self._frames.of(asked.options, asked.kwargs_json)
        plan = self._beginnings.plan(rendered.reading, conversation, frame, asked.namespace)
        return Sheet(conversation, asked, rendered, plan)

    def draft(self, sheet: Sheet, known: Known) -> Draft:
        """Tokenizes what comes after the beginning that is known."""
        encoded = self._beginnings.encode(sheet.rendered.reading, sheet.plan, known)
        return Draft(sheet, encoded.ids, len(known.ids), encoded.made, known.has_own)

    def answered(self, sheet: Sheet, ids: TokenIds, given: Given) -> tuple[bytes, TokenIds]:
        """The beginning that the next turn's prompt will have up to the answer's end: its key, and its ids.

        ids: of the prompt that was answered. Raises LostError.
        """
        if not self._splicer.works:
            raise LostError(Outcome.TOKENIZER)
        options = sheet.asked.options
        conversation = going_on(sheet.conversation, given, continued=options.continue_final_message)
        next_options = replace(options, add_generation_prompt=True, continue_final_message=False)
        try:
            after = self.sheet(conversation, sheet.asked._replace(options=next_options))
        except HermesError as error:
            raise LostError(Outcome.REFUSED) from error
        beginning, own = self._splicer.splice(ids, sheet.rendered.reading, after.rendered.reading, after.plan, given)
        return beginning.key, own


class Origin(NamedTuple):
    """How a chat's prompt was made, so that it can be gone on with.

    now: the time that the template could print. dropped_rounds: of the chat, which are not in the prompt.
    sheet: None where the prompt was known, and nothing was rendered.
    """

    drafts: Drafts
    now: datetime
    dropped_rounds: int
    sheet: Sheet | None
