"""One conversation on its way to token ids: its text, the beginning of it that is known, and the ids of the rest."""

import logging
from dataclasses import dataclass
from typing import Final, NamedTuple

from assembler import histories
from assembler.beginnings import Beginnings, Known, Openings, Plan
from assembler.messages import Conversation
from assembler.rendering import Rendered, Renderer
from assembler.templates import RenderOptions
from assembler.tokenizer import TokenIds

_log: Final = logging.getLogger(__name__)


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

    def __init__(self, renderer: Renderer, beginnings: Beginnings) -> None:
        self.template = renderer.template
        self.history = histories.read(renderer.template)
        self._renderer = renderer
        self._beginnings = beginnings
        self._openings = Openings(renderer.template)
        self.pace = renderer.pace
        if not self.history.is_stable:
            _log.warning(
                "turns are computed again where they need not be, because of the chat template: %s", self.history
            )

    def sheet(self, conversation: Conversation, asked: Asked) -> Sheet:
        """Renders the template. Raises HermesError as Renderer.render does."""
        if asked.namespace is None:
            rendered = self._renderer.render(conversation, asked.options)
            return Sheet(conversation, asked, rendered, Plan())
        scope = (asked.namespace, asked.kwargs_json, str(asked.options.add_generation_prompt))
        rendered = self._renderer.render(conversation, asked.options, scope)
        opening = self._openings.of(asked.options, asked.kwargs_json)
        plan = self._beginnings.plan(rendered.reading, conversation, opening, asked.namespace)
        return Sheet(conversation, asked, rendered, plan)

    def draft(self, sheet: Sheet, known: Known) -> Draft:
        """Tokenizes what comes after the beginning that is known."""
        encoded = self._beginnings.encode(sheet.rendered.reading, sheet.plan, known)
        return Draft(sheet, encoded.ids, len(known.ids), encoded.made)
