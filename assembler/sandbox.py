"""Where chat templates run: jinja2's immutable sandbox as transformers sets it up, traced, and within limits."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from assembler import apart, render_limits, traced, turns
from assembler.jinja_code import TracingGenerator
from assembler.jinja_extras import GenerationTag, TemplateDict, TemplateNamespace, raise_exception
from assembler.render_limits import check_padding, check_size, check_text, check_time, checked
from assembler.traced import Traced, TracedMarkup, own_of

# What a loop tells of its place, which nothing guards.
_LOOP_PLACES: Final = frozenset({"first", "index", "index0", "last", "nextitem", "previtem"})
# Filters where the padding's size is an argument.
_PADDING_FILTERS: Final = ("batch", "center", "format", "indent", "slice", "wordwrap")
# Filters that go through a value one by one and do something with each.
_LOOPING_FILTERS: Final = ("map", "reject", "rejectattr", "select", "selectattr", "sum")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What `transformers.utils.chat_template_utils` compiles templates in, and a clock that every loop looks at."""

    intercepted_binops = frozenset({"*", "**", "%"})
    code_generator_class = TracingGenerator

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        # Templates' own texts, by their places in compiled code.
        self.written: list[Traced] = []
        self.apart: apart.Apart | None = None
        self.filters["tojson"] = _to_json
        self.filters["join"] = _join(self.filters["join"])
        self.filters["replace"] = _replace(self.filters["replace"])
        for name in ("pprint", "string"):
            self.filters[name] = _measured(self.filters[name])
        self.filters["int"] = _short(self.filters["int"])
        for name in _PADDING_FILTERS:
            self.filters[name] = _padding(self.filters[name])
        for name in _LOOPING_FILTERS:
            self.filters[name] = _clocked(self.filters[name])
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
        check_time()

    @property
    def turn(self) -> None:
        """Stands where a message begins, if the template writes each by itself."""
        turns.transcript().turn()

    @staticmethod
    def rest(messages: Any) -> turns.Rest:
        """Stands around what such a template's loop goes through."""
        return turns.transcript().rest(messages)

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        self.apart = apart.read(source)
        for loop in source.find_all(jinja2.nodes.For):
            tick = jinja2.nodes.ExprStmt(jinja2.nodes.EnvironmentAttribute("tick"))
            loop.body.insert(0, tick.set_lineno(loop.lineno))
        if self.apart is not None:
            loop = self.apart.loop
            rest, turn = (jinja2.nodes.EnvironmentAttribute(name) for name in ("rest", "turn"))
            loop.iter = jinja2.nodes.Call(rest, [loop.iter], [], None, None).set_lineno(loop.lineno)
            loop.body.insert(0, jinja2.nodes.ExprStmt(turn).set_lineno(loop.lineno))
        return super()._generate(source, name, filename, defer_init)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            render_limits.check_method(owner, __obj.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formats = super().wrap_str_format(value)
        if formats is None:
            return None
        text: str = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            render_limits.check_pattern(text, "{", [*args, *kwargs.values()])
            return traced.filled(text, "{}", args, checked(formats(*args, **kwargs)))

        return bounded

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What the sandbox comes to for it as well, after many questions, with each message.
        if obj.__class__ is jinja2.runtime.LoopContext and attribute in _LOOP_PLACES:
            return _place(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        render_limits.check_operands(operator, left, right)
        return checked(super().call_binop(context, operator, left, right))

    def concat(self, pieces: Iterable[str]) -> str:
        """What jinja2 makes a text of pieces with, at the end and for every macro and captured block."""
        return _concat(pieces)

    @staticmethod
    def added(terms: tuple[Any, ...]) -> Any:
        """`a + b + c`; the commonest thing that templates do, so short texts are not looked at twice."""
        value = traced.added(terms)
        return value if value.__class__ is Traced and len(value) < render_limits.SHORT else checked(value)

    def joined(self, values: Iterable[Any]) -> str:
        """`a ~ b ~ c`."""
        return _concat(map(self.shown, values))

    @staticmethod
    def compared(value: Any) -> Any:
        """One of two values to compare, or a key: lists in it may share what is in them."""
        if isinstance(value, list | tuple | dict):
            check_text(value)
        return value

    @staticmethod
    def shown(value: Any) -> str:
        """`{{ value }}`."""
        if value.__class__ is Traced or value.__class__ is str:
            return value
        check_text(value)
        return traced.traced(str(value), own_of(value)) if isinstance(value, TracedMarkup) else str(value)


def _place(loop: jinja2.runtime.LoopContext, attribute: str) -> Any:
    """What a loop tells of itself. One that goes on with a conversation counts from the first message of all."""
    values = loop._iterable
    if values.__class__ is turns.Rest:
        return values.place(loop, attribute)
    return getattr(loop, attribute)


def collect(pieces: Iterable[str], kept: list[str]) -> None:
    """Takes a render's pieces one by one, as long as they are not too many."""
    most, characters = render_limits.most_characters(), 0
    for piece in pieces:
        characters += len(piece)
        if characters > most:
            check_size(characters)
        kept.append(piece)


def _concat(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    collect(pieces, kept)
    return traced.joined(kept)


def _padding(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_time()
        check_padding((*args, *kwargs.values()))
        if function.__name__ == "do_format":
            render_limits.check_pattern(str(args[0]), "%", [*args[1:], *kwargs.values()])
        return checked(function(*args, **kwargs))

    return bounded


def _join(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        check_time()
        values = list(value)
        check_size(render_limits.measured(values, {}) + len(values) * len(d))
        return function(eval_ctx, values, d if isinstance(d, Traced) else Traced(d), attribute)

    return bounded


def _replace(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(eval_ctx: Any, s: Any, old: Any, new: Any, count: Any = None) -> Any:
        check_time()
        render_limits.check_replacement(str(s), old, new)
        return function(eval_ctx, s, old, new, count)

    return bounded


def _measured(function: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(function)
    def bounded(value: Any) -> str:
        check_text(value)
        return function(value)

    return bounded


def _short(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> int:
        render_limits.check_slow(value)
        return function(value, *args, **kwargs)

    return bounded


def _clocked(function: Callable[..., Any]) -> Callable[..., Any]:
    def ticking(values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            check_time()
            yield value

    @functools.wraps(function)
    def bounded(context: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return function(context, values and ticking(values), *args, **kwargs)

    return bounded


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes and in the caller's key order, unlike jinja2's own filter."""
    check_padding((indent,))
    check_text(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    check_size(len(text))
    return text


def _strftime_now(pattern: str) -> str:
    render_limits.check_operands("%", pattern, None)  # the C library knows widths too
    return render_limits.now().strftime(pattern)
