"""What a template writes around an answer, found by renders of two short conversations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from assembler.messages import Conversation, Message, Role
from assembler.templates import ChatTemplate, RenderOptions
from shared.errors import HermesError

# Frames that are remembered; one for each set of template variables in use.
_MOST_FRAMES: Final = 256
_MOST_KWARGS_CHARACTERS: Final = 1024
_ANSWER: Final = "So it is."
_ASKED: Final = Conversation((Message(Role.USER, "q"),))
_ANSWERED: Final = Conversation((*_ASKED.messages, Message(Role.ASSISTANT, _ANSWER), *_ASKED.messages))


class Frame(NamedTuple):
    """opening: what opens an answer. closing: the first token behind one after which a text may be cut."""

    opening: str = ""
    closing: str | None = None


class Frames:
    """What one template writes around an answer, with each set of template variables."""

    def __init__(self, template: ChatTemplate, closing: Callable[[str, int], str | None]) -> None:
        """closing: finds the first token behind a place after which a text may be cut."""
        self._template = template
        self._find_closing = closing
        self._known: dict[str, Frame] = {}

    def of(self, options: RenderOptions, kwargs_json: str) -> Frame:
        """kwargs_json: the options' variables as the caller wrote them."""
        frame = self._known.get(kwargs_json)
        if frame is None:
            frame = Frame(self._opening(options), self._closing(options))
            if len(self._known) < _MOST_FRAMES and len(kwargs_json) <= _MOST_KWARGS_CHARACTERS:
                self._known[kwargs_json] = frame
        return frame if options.add_generation_prompt else frame._replace(opening="")

    def _opening(self, options: RenderOptions) -> str:
        opened, closed = self._tried(_ASKED, options, opens=True), self._tried(_ASKED, options, opens=False)
        if opened is None or closed is None or not opened.startswith(closed):
            return ""
        return opened.removeprefix(closed)

    def _closing(self, options: RenderOptions) -> str | None:
        text = self._tried(_ANSWERED, options, opens=False)
        place = -1 if text is None else text.find(_ANSWER)
        return None if text is None or place < 0 else self._find_closing(text, place + len(_ANSWER))

    def _tried(self, probe: Conversation, options: RenderOptions, *, opens: bool) -> str | None:
        """The probe's text; None where the template takes no such conversation."""
        options = replace(options, add_generation_prompt=opens, continue_final_message=False)
        try:
            return self._template.render(probe, options)
        except HermesError:
            return None
