"""Which template serves a model: the model's own, a built-in one by its name, or a file."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Final, NamedTuple

from assembler.declared import DeclaredTemplate
from assembler.jinja_template import JinjaTemplate
from assembler.templates import ChatTemplate
from assembler.tokenizer_config import TokenizerConfig
from shared.errors import StartupError

_BUILT_IN: Final = resources.files("assembler") / "builtin"


class Chosen(NamedTuple):
    """plain: None where there is no template. for_tools: for chats with tools, where the model has one of its own."""

    plain: ChatTemplate | None
    for_tools: ChatTemplate | None = None


def built_in_names() -> list[str]:
    """Names of the declared templates that come with the assembler."""
    return sorted(file.name.removesuffix(".toml") for file in _BUILT_IN.iterdir() if file.name.endswith(".toml"))


def choose(setting: str | None, declared: TokenizerConfig) -> Chosen:
    """The template that the setting names, else the model's own. Raises StartupError."""
    if setting is not None:
        return Chosen(read(setting, declared.named))
    sources = (declared.chat_template, declared.tool_template)
    return Chosen(*(None if source is None else JinjaTemplate(source, declared.named) for source in sources))


def read(name: str, named_tokens: Mapping[str, str]) -> ChatTemplate:
    """A built-in template, or the one in a .toml file or in a file of Jinja source. Raises StartupError."""
    if name in built_in_names():
        return DeclaredTemplate((_BUILT_IN / f"{name}.toml").read_text(encoding="utf-8"), named_tokens, name)
    path = Path(name)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(
            f"The template {name} cannot be read ({reason}): name a file, or one of {', '.join(built_in_names())}."
        ) from error
    if path.suffix == ".toml":
        return DeclaredTemplate(source, named_tokens, name)
    return JinjaTemplate(source, named_tokens)
