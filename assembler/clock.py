"""What a template takes from outside the conversation: today's date, or chance."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import jinja2.nodes

_FUNCTION: Final = "strftime_now"
_CHANCE: Final = "random"


@dataclass(frozen=True, slots=True)
class Clock:
    """formats: of the dates that it prints, as far as its source tells. is_plain: False where the source does not tell
    all, so that no two of its texts can be said to be alike.
    """

    formats: tuple[str, ...] = ()
    is_plain: bool = True

    def printed(self, now: datetime) -> str | None:
        """The dates that the template prints at a time; None where that cannot be told."""
        if not self.is_plain:
            return None
        return "\0".join(map(now.strftime, self.formats))


def read(tree: jinja2.nodes.Template) -> Clock:
    """Reads a template's syntax tree."""
    formats = sorted(set(_formats(tree)))
    mentions = sum(1 for name in tree.find_all(jinja2.nodes.Name) if name.name == _FUNCTION)
    by_chance = any(each.name == _CHANCE for each in tree.find_all(jinja2.nodes.Filter))
    return Clock(tuple(formats), is_plain=mentions == sum(1 for _ in _formats(tree)) and not by_chance)


def _formats(tree: jinja2.nodes.Template) -> Iterator[str]:
    for call in tree.find_all(jinja2.nodes.Call):
        match call:
            case jinja2.nodes.Call(
                node=jinja2.nodes.Name(name=name), args=[jinja2.nodes.Const(value=str(text))], kwargs=[]
            ) if name == _FUNCTION:
                yield text
