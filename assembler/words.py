"""What a Jinja template writes itself and what it looks for in a caller's text, read off its syntax tree."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from jinja2 import nodes

# Methods that cut a text where another one stands in it; so does the filter "replace".
_CUTTING: Final = frozenset(("partition", "removeprefix", "removesuffix", "replace", "rpartition", "rsplit", "split"))
# Methods that only look for it.
_SEARCHING: Final = frozenset(("count", "endswith", "find", "index", "rfind", "rindex", "startswith"))
# Methods that take characters off the ends of a text.
_STRIPPING: Final = frozenset(("strip", "lstrip", "rstrip"))
# Methods that leave every text as it is, or put whole texts together.
_HARMLESS_METHODS: Final = frozenset((
    "append", "extend", "format", "fromkeys", "get", "isalnum", "isalpha", "isdigit", "items", "join", "keys", "pop",
    "update", "values",
))  # fmt: skip
# Filters that do likewise. "trim" takes off the white space that every end is read without.
_HARMLESS_FILTERS: Final = frozenset((
    "abs", "count", "d", "default", "dictsort", "float", "int", "items", "length", "pprint", "round", "safe",
    "string", "tojson", "trim",
))  # fmt: skip
# Filters that go through a value one by one: harmless for a list, but of a text they make letters.
_LIST_FILTERS: Final = frozenset((
    "first", "join", "last", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr",
    "sort", "sum", "unique",
))  # fmt: skip
# `'%.3s' % text` and `'{:.3}'.format(text)` take only so much of the text.
_PRECISION: Final = re.compile(r"%[^%a-zA-Z]*\.|\{[^{}]*:")
# Methods of texts that change what they are called for.
_TEXT_METHODS: Final = frozenset(dir(str)) - _SEARCHING - _HARMLESS_METHODS
# Tests and functions never cut; a value of these names is a list or a mapping, never a caller's text.
_LISTS: Final = ("messages", "tool_calls", "tools", "properties", "documents", "required", "enum", "parts")


@dataclass(frozen=True, slots=True)
class Words:
    """literals: every text that the template has of its own.
    searched: texts that it looks for in the caller's.
    cut_at: those among them where it may cut.
    cuts_anywhere: it takes texts apart, or changes letters, in ways that its source does not tell the place of.
    changes_case: and it may make a letter of its other case.
    samples: what it writes for simple conversations; it may build marks that stand nowhere in its source as a whole.
    turns: what it writes for one of users' and assistants' texts alone; the marks in it open and close turns.
    """

    literals: tuple[str, ...] = ()
    searched: tuple[str, ...] = ()
    cut_at: tuple[str, ...] = ()
    cuts_anywhere: bool = False
    changes_case: bool = False
    samples: tuple[str, ...] = ()
    turns: str = ""


def read(template: nodes.Template) -> Words:
    """The words of a parsed template."""
    constants = _constants(template)
    cuts = list(_cuts(template, constants))
    cut_at = {text for found in cuts for text in found or () if text}
    searched = cut_at | {text for found in _searches(template, constants) for text in found or ()}
    return Words(
        literals=tuple(sorted(set(_literals(template)))),
        searched=tuple(sorted(text for text in searched if text and not text.isspace())),
        cut_at=tuple(sorted(cut_at)),
        cuts_anywhere=None in cuts or _takes_apart(template),
        changes_case=_changes_case(template),
    )


def _literals(template: nodes.Template) -> Iterator[str]:
    for data in template.find_all(nodes.TemplateData):
        yield data.data
    for constant in template.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


def _constants(template: nodes.Template) -> dict[str, list[str]]:
    """Texts that names are set to; a name that is set to anything else besides is told by an empty text."""
    values: dict[str, list[str]] = {}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            is_text = isinstance(assign.node, nodes.Const) and isinstance(assign.node.value, str)
            values.setdefault(assign.target.name, []).append(assign.node.value if is_text else "")  # type: ignore[attr-defined]
    return values


def _texts(arguments: Iterable[nodes.Node], constants: dict[str, list[str]]) -> list[str] | None:
    """The texts that arguments are; None where one of them is not known."""
    found: list[str] = []
    for argument in arguments:
        match argument:
            case nodes.Const(value=value):
                found += [value] if isinstance(value, str) else []
            case nodes.Tuple(items=items):
                inner = _texts(items, constants)
                if inner is None:
                    return None
                found += inner
            case nodes.Name(name=name) if all(constants.get(name, [""])):
                found += constants[name]
            case _:
                return None
    return found


def _methods(template: nodes.Template) -> Iterator[tuple[str, list[nodes.Expr]]]:
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            yield call.node.attr, call.args


def _cuts(template: nodes.Template, constants: dict[str, list[str]]) -> Iterator[list[str] | None]:
    """The texts of each cut; None for one whose place is not known."""
    for method, arguments in _methods(template):
        if method in _CUTTING:
            yield _texts(arguments[:1], constants) if arguments else None  # without one, at white space
        elif method in _STRIPPING:
            stripped = _texts(arguments[:1], constants)
            yield [] if stripped is not None and all(text.isspace() for text in stripped) else None
        elif method not in _HARMLESS_METHODS and method not in _SEARCHING:
            yield None
    for filter_ in template.find_all(nodes.Filter):
        if filter_.name == "replace":
            yield _texts(filter_.args[:1], constants)
        elif filter_.name == "trim" and filter_.args:
            yield None


def _searches(template: nodes.Template, constants: dict[str, list[str]]) -> Iterator[list[str] | None]:
    """The texts of each look that cuts nothing, as far as they are known: `'</think>' in content`, `content == '…'`."""
    for method, arguments in _methods(template):
        if method in _SEARCHING:
            yield _texts(arguments[:1], constants)
    for comparison in template.find_all(nodes.Compare):
        yield _texts([comparison.expr], constants)
        yield _texts([operand.expr for operand in comparison.ops], constants)


def _takes_apart(template: nodes.Template) -> bool:
    return (
        any(not _is_harmless(filter_) for filter_ in template.find_all(nodes.Filter))
        or any(not _is_whole(item) for item in template.find_all(nodes.Getitem))
        or any(not _is_list(loop.iter) for loop in template.find_all(nodes.For))
        or _calls_values(template)
        or _holds_methods(template)
        or _formats_parts(template)
    )


def _changes_case(template: nodes.Template) -> bool:
    methods = {method for method, _ in _methods(template)}
    filters = {filter_.name for filter_ in template.find_all(nodes.Filter)}
    known_methods = _HARMLESS_METHODS | _CUTTING | _SEARCHING | _STRIPPING | {"splitlines"}
    known_filters = (
        _HARMLESS_FILTERS | _LIST_FILTERS | {"replace", "indent", "truncate", "wordwrap", "center", "format"}
    )
    return (
        not (methods <= known_methods and filters <= known_filters)
        or _calls_values(template)
        or _holds_methods(template)
    )


def _calls_values(template: nodes.Template) -> bool:
    """Whether something is called that is neither named nor an attribute, as `(text | attr('lower'))()` is."""
    return any(not isinstance(call.node, nodes.Name | nodes.Getattr) for call in template.find_all(nodes.Call))


def _is_harmless(filter_: nodes.Filter) -> bool:
    if filter_.name in _LIST_FILTERS:
        return _is_list(filter_.node)
    return filter_.name in _HARMLESS_FILTERS or filter_.name == "replace"


def _is_whole(item: nodes.Getitem) -> bool:
    """Whether `value[…]` gives all of a text, and not a part of one."""
    is_key = isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str)
    return (is_key and item.arg.value not in _TEXT_METHODS) or _is_list(item.node)  # type: ignore[attr-defined]


def _holds_methods(template: nodes.Template) -> bool:
    """Whether a text's method is taken without being called at once, as in `{% set cut = text.split %}`."""
    called = {id(call.node) for call in template.find_all(nodes.Call)}
    return any(
        found.attr in _TEXT_METHODS and id(found) not in called and not _is_loop(found.node)
        for found in template.find_all(nodes.Getattr)
    )


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


def _formats_parts(template: nodes.Template) -> bool:
    formats = template.find(nodes.Mod) is not None or any(
        method in ("format", "format_map") for method, _ in _methods(template)
    )
    return formats and any(_PRECISION.search(text) for text in _literals(template))


def _is_list(node: nodes.Node | None) -> bool:
    """Whether a value is surely no text: a list by its name, or what a method or filter made a list of."""
    match node:
        case nodes.Name(name=name):
            return name.endswith(_LISTS)
        case nodes.Getattr(attr=name):
            return name.endswith(_LISTS)
        case nodes.Getitem(arg=nodes.Const(value=str(name))):
            return name.endswith(_LISTS)
        case nodes.Getitem(arg=nodes.Slice(), node=inner):
            return _is_list(inner)
        case nodes.Call(node=nodes.Getattr(attr=method)):
            return method in ("items", "keys", "values", "split", "rsplit", "splitlines", "partition", "rpartition")
        case nodes.Call(node=nodes.Name(name="range")) | nodes.List() | nodes.Tuple():
            return True
        case nodes.Filter(name=name, node=inner):
            return name in ("dictsort", "items", "map", "select", "selectattr", "reject", "rejectattr", "batch") or (
                name in ("list", "reverse", "sort", "unique", "default", "d") and _is_list(inner)
            )
        case nodes.CondExpr(expr1=one, expr2=other):
            return _is_list(one) and (other is None or _is_list(other))
        case nodes.Or(left=one, right=other):
            return _is_list(one) and _is_list(other)
        case _:
            return False
