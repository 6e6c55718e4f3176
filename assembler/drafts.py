"""One conversation on its way to token ids: its text, the beginning of it that is known, and the ids of the rest."""

from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from assembler.beginnings import Beginnings, Known, Plan
from assembler.frames import Frames
from assembler.messages import Conversation
from assembler.rendering import Rendered, Renderer
from assembler.splice import Given, LostError, Outcome, Splicer, going_on
from assembler.templates import RenderOptions
from assembler.tokenizer import TokenIds
from shared.errors import HermesError


class Asked(NamedTuple):
    """How a conversation is to be rendered. kwargs_json: the options' template variables as the caller wrote them.

    namespace: whose beginnings may be known; None where nobody asks.
    """

    options: RenderOptions
    kwargs_json: str
    namespace: str | None


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
    """A prompt. known_tokens: of its beginning, which was known. made: beginnings of it to keep, by key."""

    sheet: Sheet
    ids: TokenIds
    known_tokens: int
    made: tuple[tuple[bytes, TokenIds], ...]

    @property
    def tokens(self) -> int:
        return len(self.ids)


class Drafts:
    """Makes drafts with one template. Its methods may be called from any thread."""

    def __init__(self, renderer: Renderer, beginnings: Beginnings, splicer: Splicer) -> None:
        self.template = renderer.template
        self._renderer = renderer
        self._beginnings = beginnings
        self._splicer = splicer
        self._frames = Frames(renderer.template, beginnings.closing)
        self.pace = renderer.pace

    def sheet(self, conversation: Conversation, asked: Asked) -> Sheet:
        """Renders the template. Raises HermesError as Renderer.render does."""
        if asked.namespace is None:
            rendered = self._renderer.render(conversation, asked.options)
            return Sheet(conversation, asked, rendered, Plan())
        scope = (asked.namespace, asked.kwargs_json, str(asked.options.add_generation_prompt))
        rendered = self._renderer.render(conversation, asked.options, scope)
        frame = self._frames.of(asked.options, asked.kwargs_json)
        plan = self._beginnings.plan(rendered.reading, conversation, frame, asked.namespace)
        return Sheet(conversation, asked, rendered, plan)

    def draft(self, sheet: Sheet, known: Known) -> Draft:
        """Tokenizes what comes after the beginning that is known."""
        encoded = self._beginnings.encode(sheet.rendered.reading, sheet.plan, known)
        return Draft(sheet, encoded.ids, len(known.ids), encoded.made)

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
