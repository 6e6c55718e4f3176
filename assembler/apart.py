"""Whether a template writes each message by itself, so that what it wrote of a conversation's earlier messages still
holds when the conversation has grown.

Read off its syntax tree, by what is known to be harmless: one loop over all messages that keeps nothing for later, and
asks for no more than a message's own place, what came before it, and what comes next. Around that loop a template may
do what it likes, because all but the loop's earlier turns is done anew.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, TypeAlias, TypeVar

from jinja2 import nodes

_MESSAGES: Final = "messages"
_LOOP: Final = "loop"
# Of a loop, what more messages at the end do not change, but for the last one and the next.
_PLACES: Final = frozenset({"first", "index", "index0", "previtem", "last", "nextitem"})
_NEXT: Final = "nextitem"
# How far they are from the message that is written.
_COUNTS: Final = {"index0": 0, "index": 1}
# A conversation that has grown had that many messages before.
FIRST_MESSAGES: Final = 2
# Functions that keep something from call to call.
_KEEPING: Final = frozenset({"cycler", "joiner", "namespace"})
_CLOCK: Final = "strftime_now"
# Filters that give another value each time, or one that can be gone through once alone.
_UNSTEADY_FILTERS: Final = frozenset(
    {"batch", "map", "random", "reject", "rejectattr", "select", "selectattr", "slice"}
)
_KNOWN: Final = frozenset((
    nodes.Add, nodes.And, nodes.Assign, nodes.AssignBlock, nodes.Break, nodes.Call, nodes.CallBlock, nodes.Compare,
    nodes.Concat, nodes.CondExpr, nodes.Const, nodes.Continue, nodes.Dict, nodes.Div, nodes.ExtensionAttribute,
    nodes.Filter, nodes.FilterBlock, nodes.FloorDiv, nodes.For, nodes.Getattr, nodes.Getitem, nodes.If, nodes.Keyword,
    nodes.List, nodes.Macro, nodes.Mod, nodes.Mul, nodes.Name, nodes.Neg, nodes.Not, nodes.Operand, nodes.Or,
    nodes.Output, nodes.Pair, nodes.Pos, nodes.Pow, nodes.Slice, nodes.Sub, nodes.TemplateData, nodes.Test,
    nodes.Tuple, nodes.With,
))  # fmt: skip

# In which `loop` may be another one, or none.
_INNER: Final = (nodes.For, nodes.Macro)

N = TypeVar("N", bound=nodes.Node)
_Names: TypeAlias = frozenset[str]


class Apart(NamedTuple):
    """The loop in which each message is written. sees_next: whether a message's text can depend on the next one."""

    loop: nodes.For
    sees_next: bool


def read(template: nodes.Template) -> Apart | None:
    """The loop of a parsed template; None where it does not write each message by itself, or that cannot be told."""
    loops = [each for each in template.body if isinstance(each, nodes.For) and _is_name(each.iter, _MESSAGES)]
    if len(loops) != 1 or not _is_understood(template, loops[0]):
        return None
    loop = loops[0]
    late = _late_names(each for each in template.body if each is not loop)
    # A macro is written where it is called.
    written: list[nodes.Node] = [*loop.body, *template.find_all(nodes.Macro)]
    inner = [each for node in written for kind in _INNER for each in _all(node, kind)]
    if any(_is_late(each, late) or not _keeps_its_place(each) for each in written):
        return None
    if any(
        not _is_fixed(item) and _is_name(item.node, _MESSAGES) for each in inner for item in _all(each, nodes.Getitem)
    ):
        return None  # by a place in another loop
    return Apart(loop, any(_sees_next(each) for each in written))


def _is_understood(template: nodes.Template, loop: nodes.For) -> bool:
    everything = list(template.find_all(nodes.Node))
    names = [each for each in everything if isinstance(each, nodes.Name)]
    return (
        isinstance(loop.target, nodes.Name)
        and not (loop.test or loop.recursive or loop.else_)
        and all(type(each) in _KNOWN for each in everything)
        and not any(each.name in _KEEPING for each in names)
        and not any(each.ctx != "load" and each.name in (_MESSAGES, _LOOP) for each in names)
    )


def _late_names(statements: Iterable[nodes.Node]) -> _Names:
    """Names that are set outside of the loop to what can change when messages come, or between two renders."""
    late: _Names = frozenset()
    each_with_names = [(each, frozenset(_set_in(each))) for each in statements]
    while True:
        found = late.union(*(names for each, names in each_with_names if _is_late(each, late)))
        if found == late:
            return late
        late = found


def _set_in(statement: nodes.Node) -> Iterator[str]:
    for name in _all(statement, nodes.Name):
        if name.ctx != "load":
            yield name.name
    for macro in _all(statement, nodes.Macro):
        yield macro.name


def _is_late(node: nodes.Node, late: _Names) -> bool:
    """Whether more messages at the end, or another time, can change what becomes of a part of the template."""
    steady = {id(each.node) for each in _all(node, nodes.Getitem) if _is_steady(each)}
    return any(
        each.name in late or each.name == _CLOCK or (each.name == _MESSAGES and id(each) not in steady)
        for each in _all(node, nodes.Name)
    ) or any(each.name in _UNSTEADY_FILTERS for each in _all(node, nodes.Filter))


def _is_steady(item: nodes.Getitem) -> bool:
    """`messages[0]`, or in the loop a message by its distance from the one that is written, up to the next one."""
    return _is_fixed(item) or _distance(item) is not None


def _is_fixed(item: nodes.Getitem) -> bool:
    """`messages[0]`."""
    match item.arg:
        case nodes.Const(value=int(place)):
            return 0 <= place < FIRST_MESSAGES
    return False


def _distance(item: nodes.Getitem) -> int | None:
    """-1 for `messages[loop.index0 - 1]`, 1 for `messages[loop.index]`; None for what is beyond or cannot be told."""
    here, added = item.arg, 0
    match here:
        case nodes.Add(left=left, right=nodes.Const(value=int(places))):
            here, added = left, places
        case nodes.Sub(left=left, right=nodes.Const(value=int(places))):
            here, added = left, -places
    if not (isinstance(here, nodes.Getattr) and _is_name(here.node, _LOOP) and here.attr in _COUNTS):
        return None
    distance = added + _COUNTS[here.attr]
    return distance if distance <= 1 else None


def _keeps_its_place(node: nodes.Node) -> bool:
    """Whether all that is asked of a loop is what more messages do not change. Inner loops are held to it, too."""
    known = {id(each.node) for each in _all(node, nodes.Getattr) if each.attr in _PLACES}
    return all(id(each) in known for each in _all(node, nodes.Name) if each.name == _LOOP)


def _sees_next(node: nodes.Node) -> bool:
    return any(each.attr == _NEXT for each in _all(node, nodes.Getattr)) or any(
        _distance(each) == 1 for each in _all(node, nodes.Getitem)
    )


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


def _all(node: nodes.Node, kind: type[N]) -> Iterator[N]:
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)
