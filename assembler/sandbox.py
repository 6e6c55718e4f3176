"""Where chat templates run: jinja2's immutable sandbox as transformers sets it up, with limits on time and size.

A thread cannot be stopped from outside, so everything that can go on for long asks the clock itself: each turn of a
loop, each call. Everything that makes a big value out of small ones is asked for its size first.
"""

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from assembler.jinja_extras import GenerationTag, TemplateDict, TemplateNamespace, raise_exception

# Widths, counts and indents in templates are layout; a bigger one makes megabytes of padding.
_MOST_PADDING: Final = 10_000
# Elements of a list that a template makes by multiplying or adding lists.
_MOST_ELEMENTS: Final = 100_000
# No render's limit is below this.
_SHORT: Final = 500_000
_MOST_BITS: Final = 4_096
_FORMAT_WIDTH: Final = re.compile(r"\d{5}|\*")
_WIDTH_ARGUMENT: Final = re.compile(r"\{[^{}]*:[^{}]*\{")
# Where the padding's size is an argument.
_PADDING_FILTERS: Final = ("batch", "center", "format", "indent", "slice", "wordwrap")
_PADDING_METHODS: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})


class LimitExceededError(jinja2.TemplateError):
    """A render took too long or grew too large. limit: "seconds" or "characters"."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Run:
    """One render: when it has to be over (monotonic seconds), how long any text may get, and what time it is."""

    deadline: float
    characters: int
    now: datetime


_UNLIMITED: Final = Run(float("inf"), 2**62, datetime(1, 1, 1))  # noqa: DTZ001 - of no place
_run: Final[ContextVar[Run]] = ContextVar("run", default=_UNLIMITED)


@contextmanager
def limited(run: Run) -> Iterator[None]:
    """What is rendered inside keeps to the run's limits, or raises LimitExceededError."""
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


class _Generator(jinja2.compiler.CodeGenerator):
    """jinja2's code generator, but `~` and `+` go through the environment."""

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.added(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What `transformers.utils.chat_template_utils` compiles templates in, and a clock that every loop looks at."""

    intercepted_binops = frozenset({"*", "**", "%"})
    code_generator_class = _Generator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters["join"] = _join(self.filters["join"])
        self.filters["replace"] = _replace(self.filters["replace"])
        for name in _PADDING_FILTERS:
            self.filters[name] = _padding(self.filters[name])
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": _strftime_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }
        del self.globals["lipsum"]  # paragraphs of nonsense, as many as asked for

    @property
    def tick(self) -> None:
        """Stands as a statement in every loop; reading it raises when the time is over."""
        _check_time()

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        for loop in source.find_all(jinja2.nodes.For):
            tick = jinja2.nodes.ExprStmt(jinja2.nodes.EnvironmentAttribute("tick"))
            loop.body.insert(0, tick.set_lineno(loop.lineno))
        return super()._generate(source, name, filename, defer_init)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        _check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, __obj.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formats = super().wrap_str_format(value)
        if formats is None:
            return None
        text: str = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            if _FORMAT_WIDTH.search(text):
                raise LimitExceededError("characters", "it formats with too wide a field")
            if _WIDTH_ARGUMENT.search(text):
                _check_padding((*args, *kwargs.values()))
            formatted: str = _checked(formats(*args, **kwargs))
            return formatted

        return bounded

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # What the sandbox comes to for it as well, after many questions, with each message.
        if obj.__class__ is jinja2.runtime.LoopContext:
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def concat(self, pieces: Iterable[str]) -> str:
        """What jinja2 makes a text of pieces with, at the end and for every macro and captured block."""
        return _concat(pieces)

    @staticmethod
    def added(left: Any, right: Any) -> Any:
        """`a + b`; the commonest thing that templates do, so short texts are not looked at twice."""
        value = left + right
        return value if value.__class__ is str and len(value) < _SHORT else _checked(value)

    @staticmethod
    def joined(values: Iterable[Any]) -> str:
        """`a ~ b ~ c`."""
        return _concat(map(str, values))


def _check_time() -> None:
    if time.monotonic() > _run.get().deadline:
        raise LimitExceededError("seconds", "it takes too long")


def _check_size(characters: int) -> None:
    if characters > _run.get().characters:
        raise LimitExceededError("characters", "it grows too large")


def _concat(pieces: Iterable[str]) -> str:
    most, characters, kept = _run.get().characters, 0, []
    for piece in pieces:
        characters += len(piece)
        if characters > most:
            _check_size(characters)
        kept.append(piece)
    return "".join(kept)


def _checked(value: Any) -> Any:
    if type(value) is str:
        _check_size(len(value))
    elif isinstance(value, list | tuple) and len(value) > _MOST_ELEMENTS:
        raise LimitExceededError("characters", "a list in it grows too large")
    return value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        if isinstance(left, str) and _FORMAT_WIDTH.search(left):
            raise LimitExceededError("characters", "it formats with too wide a field")
        return
    for value, count in ((left, right), (right, left)):
        if not isinstance(count, int):
            continue
        if isinstance(value, str):
            _check_size(len(value) * count)
        elif isinstance(value, list | tuple) and len(value) * count > _MOST_ELEMENTS:
            raise LimitExceededError("characters", "a list in it grows too large")
        elif isinstance(value, int):
            bits = value.bit_length() * max(count, 1) if operator == "**" else value.bit_length() + count.bit_length()
            if bits > _MOST_BITS:
                raise LimitExceededError("characters", "a number in it grows too large")
            return


def _check_padding(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and value > _MOST_PADDING for value in values):
        raise LimitExceededError("characters", "it pads or indents too far")


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """A method of a string that can make a much longer one."""
    if name in _PADDING_METHODS:
        _check_padding((*args, *kwargs.values()))
        if name == "expandtabs":
            _check_size(len(text) + text.count("\t") * max((*args, *kwargs.values(), 8)))
    elif name == "replace" and len(args) > 1:
        _check_replacement(text, *args[:2])
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_size(sum(len(part) + len(text) for part in args[0] if isinstance(part, str)))


def _check_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        _check_size(len(text) + text.count(old) * (len(new) - len(old)))


def _padding(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_time()
        _check_padding((*args, *kwargs.values()))
        if function.__name__ == "do_format" and _FORMAT_WIDTH.search(str(args[0])):
            raise LimitExceededError("characters", "it formats with too wide a field")
        return _checked(function(*args, **kwargs))

    return bounded


def _join(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        _check_time()
        values = list(value)
        if attribute is None:
            _check_size(sum(len(part) + len(d) for part in values if isinstance(part, str)))
        return function(eval_ctx, values, d, attribute)

    return bounded


def _replace(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(eval_ctx: Any, s: Any, old: Any, new: Any, count: Any = None) -> Any:
        _check_time()
        _check_replacement(str(s), old, new)
        return function(eval_ctx, s, old, new, count)

    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes and in the caller's key order, unlike jinja2's own filter."""
    _check_padding((indent,))
    _check_size(_measured(value, {}))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _check_size(len(text))
    return text


def _measured(value: Any, sizes: dict[int, int]) -> int:
    """About how many characters a value has as JSON. sizes: of lists and mappings by id; one may be in many places."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        parts: Iterable[Any] = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = 2 + sum(_measured(part, sizes) for part in parts)
    return sizes[id(value)]


def _strftime_now(pattern: str) -> str:
    _check_operands("%", pattern, None)  # the C library knows widths too
    return _run.get().now.strftime(pattern)
