"""What a Jinja template writes itself and what it looks for, read off its syntax tree and what it makes of probes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from jinja2 import nodes

from assembler import probes
from assembler.probes import Renders

# Methods whose first argument is looked for in a text; so does the filter "replace".
_SEARCHING: Final = frozenset((
    "count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rpartition", "rsplit", "split", "startswith",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Words:
    """literals: every text that the template has of its own.
    searched: texts that it looks for in others.
    samples: what it makes of simple conversations; it may build marks that stand nowhere in its source as a whole.
    turns: what it writes around the texts of all but the assistant, and after that one's.
    openings: what it writes between a user's turn and an answer; none where it takes no such conversation.
    """

    literals: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()
    openings: tuple[str, ...] = ()


def read(template: nodes.Template, compiled: Iterable[str], renders: Renders) -> Words:
    """The words of a parsed template. compiled: the texts in its code."""
    openings = (probes.opening(text, "".join(renders.asked[:1])) for text in renders.answered)
    return Words(
        literals=tuple(sorted({*compiled, *_literals(template)})),
        searched=tuple(sorted(set(_texts(_looked_for(template), _assigned(template))) - {""})),
        samples=renders.samples,
        turns=(
            *renders.asked,
            *map(probes.after_call, renders.told),
            *map(probes.after_answer, renders.answered),
        ),
        openings=tuple(opening for opening in openings if opening is not None),
    )


def _literals(template: nodes.Template) -> Iterator[str]:
    for data in template.find_all(nodes.TemplateData):
        yield data.data
    yield from _constants(template)


def _constants(node: nodes.Node) -> Iterator[str]:
    found = (node, *node.find_all(nodes.Const)) if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
    return (constant.value for constant in found if isinstance(constant.value, str))


def _assigned(template: nodes.Template) -> dict[str, list[str]]:
    """Texts that names are set to."""
    values: dict[str, list[str]] = {}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            values.setdefault(assign.target.name, []).extend(_constants(assign.node))
    return values


def _looked_for(template: nodes.Template) -> Iterator[nodes.Node]:
    """`'</think>' in content`, `content.split('</think>')`, `content | replace('<think>', '')`."""
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHING:
            yield from call.args[:1]
    for filter_ in template.find_all(nodes.Filter):
        if filter_.name == "replace":
            yield from filter_.args[:1]
    for comparison in template.find_all(nodes.Compare):
        if comparison.ops[0].op in ("in", "notin"):
            yield comparison.expr


def _texts(found: Iterable[nodes.Node], assigned: dict[str, list[str]]) -> Iterator[str]:
    for node in found:
        yield from _constants(node)
        if isinstance(node, nodes.Name):
            yield from assigned.get(node.name, ())
