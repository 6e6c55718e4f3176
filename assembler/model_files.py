"""What the assembler reads of a model's directory: tokenizer, template and limits."""

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from assembler import template_files, tokenizer, tokenizer_config
from assembler.templates import ChatTemplate
from assembler.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the assembler knows of the model, from its directory.

    context_length: prompt and answer together, in tokens; None where config.json does not say.
    vocab_size: ids of ready token prompts are below this.
    template: None where the model has none; then only text and ids can be assembled.
    tool_template: serves chats with tools, where the model has one of its own for them.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_length: int | None
    vocab_size: int
    tool_template: ChatTemplate | None = None

    def encoding_facts(self) -> tuple[str, ...]:
        """What besides the tokenizer's files can change the ids of a rendered text."""
        package = self.tokenizer.encodes_with
        return (package, metadata.version(package), *sorted(self.tokenizer.added.control))

    def template_facts(self) -> tuple[str, ...]:
        """What can change the text of a chat."""
        versions = ("" if each is None else each.version for each in (self.template, self.tool_template))
        return (*versions, jinja2.__version__)


def load(directory: Path, template: str | None = None) -> ModelFiles:
    """Reads the model's tokenizer, template and limits; blocks for up to some seconds.

    template: name of a built-in one or a file, in place of the model's own.
    Raises StartupError.
    """
    declared = tokenizer_config.load(directory)
    chosen = template_files.choose(template, declared)
    texts = [text for each in chosen if each is not None for text in (*each.words.literals, *each.words.samples)]
    loaded = tokenizer.load(directory, declared.added, texts)
    config = tokenizer_config.read_json(directory / "config.json")
    return ModelFiles(
        tokenizer=loaded,
        template=chosen.plain,
        context_length=_limit(config, "max_position_embeddings"),
        vocab_size=_limit(config, "vocab_size") or loaded.vocabulary.size,
        tool_template=chosen.for_tools,
    )


def _limit(config: Any, name: str) -> int | None:
    """A number of config.json's, or of its part about text in models that know more than text."""
    if not isinstance(config, dict):
        return None
    value = config.get(name) or _limit(config.get("text_config"), name)
    return value if isinstance(value, int) else None
