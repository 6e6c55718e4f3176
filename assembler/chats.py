"""A model's chat templates: the one for chats that offer tools, and the one for all others."""

from assembler.beginnings import Beginnings
from assembler.drafts import Drafts
from assembler.histories import Rewrite
from assembler.model_files import ModelFiles
from assembler.orders import Policies
from assembler.rendering import Renderer
from assembler.splice import Splicer
from assembler.templates import ChatTemplate
from hermes.v1 import assembler_pb2
from shared.errors import failed_precondition


class Chats:
    """What makes drafts of chats."""

    def __init__(self, files: ModelFiles, policies: Policies, beginnings: Beginnings) -> None:
        """Takes a fraction of a second, for trying the templates."""
        splicer = Splicer(files.tokenizer, beginnings)

        def drafting(template: ChatTemplate | None) -> Drafts | None:
            if template is None:
                return None
            renderer = Renderer(template, files.tokenizer, policies.order, policies.control_text)
            return Drafts(renderer, beginnings, splicer)

        self._plain = drafting(files.template)
        self._with_tools = drafting(files.tool_template) or self._plain

    @property
    def rewrites(self) -> list[Rewrite]:
        """What the templates do to earlier turns, so that those are computed again."""
        histories = [each.history for each in (self._plain, self._with_tools) if each is not None]
        return list(dict.fromkeys(rewrite for history in histories for rewrite in history.rewrites))

    def forget(self, tag: str | None) -> None:
        """Forgets the conversations of the namespace of that tag, or of all."""
        for each in (self._plain, self._with_tools):
            if each is not None:
                each.renderer.turns.flush(tag)

    def drafts(self, chat: assembler_pb2.Chat) -> Drafts:
        """What makes drafts of a chat. Raises HermesError NO_CHAT_TEMPLATE."""
        drafts = self._with_tools if chat.tools else self._plain
        if drafts is None:
            raise failed_precondition(
                "NO_CHAT_TEMPLATE",
                "The served model has no chat template: send the prompt as text, or add a chat_template.jinja to the "
                "model directory.",
            )
        return drafts
