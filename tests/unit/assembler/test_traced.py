"""A traced text is a text like any other, and every character of it keeps its origin."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assembler.sandbox import TemplateEnvironment
from assembler.traced import Traced, joined, own_of, plain, traced, written

ALPHABET = "aAßx \n\t\r<|%s{}"
# Capital letters stand for the template's characters: a text shows in itself what is the template's, as long as no
# operation changes letters.
SHOWING = "abAB \n"


def show(text: str) -> Traced:
    return traced(text, bytes(letter.isupper() for letter in text))


def texts_of(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "slice": lambda text, other: text[len(other) : -1],
    "step": lambda text, other: text[:: -1 - len(other) % 2],
    "letter": lambda text, other: [text[place] for place in range(-len(text), len(text))],
    "add": lambda text, other: text + other,
    "repeat": lambda text, other: [text * len(other), len(other) * text],
    "strip": lambda text, other: [text.strip(), text.lstrip(), text.rstrip()],
    "strip of letters": lambda text, other: [text.strip(other), text.lstrip(other), text.rstrip(other)],
    "affixes": lambda text, other: [text.removeprefix(other), text.removesuffix(other)],
    "partition": lambda text, other: [*text.partition(other), *text.rpartition(other)] if other else [],
    "split": lambda text, other: [*text.split(), *text.split(None, 1), *text.rsplit(None, 1)],
    "split at": lambda text, other: (
        [*text.split(other), *text.split(other, 1), *text.rsplit(other), *text.rsplit(other, 1)] if other else []
    ),
    "lines": lambda text, other: [*text.splitlines(), *text.splitlines(keepends=True)],
    "replace": lambda text, other: (
        [text.replace(other, text), text.replace(other, other, 1), text.replace(other, other[1:])] if other else []
    ),
    "replace by it": lambda text, other: [other.replace(other[1:] or "x", text), other.replace("", text)],
    "join": lambda text, other: text.join([other, text, other]),
    "fill": lambda text, other: [(text + "%s" + text) % other, (text + "%s%s") % (other, 5)],
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=st.text(SHOWING, max_size=12), other=st.text(SHOWING, max_size=3))
def test_each_character_keeps_its_origin(name: str, text: str, other: str) -> None:
    operation = OPERATIONS[name]
    expected = texts_of(operation(text, other))
    shown, shown_other = show(text), show(other)
    for argument in (shown_other, written(other), other):
        for found, whole in zip(texts_of(operation(shown, argument)), expected, strict=True):
            assert found == whole
            if argument is shown_other:  # no caller's letter is ever the template's
                assert not any(own for letter, own in zip(whole, own_of(found), strict=True) if letter.islower())
            if (
                argument is shown_other
                and other.isalpha()
                and other.isupper()
                and name not in ("fill", "replace by it")
            ):
                assert own_of(found) == bytes(each.isupper() for each in whole)


@given(text=st.text(ALPHABET, max_size=12), own=st.binary(max_size=12))
def test_it_is_a_text_like_any_other(text: str, own: bytes) -> None:
    made = traced(text, bytes(each % 2 for each in own.ljust(len(text))[: len(text)]))
    assert (made, hash(made), repr(made), f"{made}", str(made)) == (text, hash(text), repr(text), text, text)
    assert type(plain(made)) is str
    for method in dir(str):
        if method.startswith("__") or method in ("format", "format_map", "join", "maketrans", "translate"):
            continue
        for args in ((), ("a",), ("a", "bb"), ("<", 1), (9,)):
            assert outcome(made, method, args) == outcome(text, method, args)
    assert made.join(["a", made]) == text.join(["a", text])


def outcome(text: str, method: str, args: tuple[Any, ...]) -> Any:
    try:
        return getattr(text, method)(*args)
    except (TypeError, ValueError, LookupError) as error:
        return type(error)


@given(text=st.text(ALPHABET, max_size=12))
def test_letters_in_another_case_are_the_same_ones_or_nobody_s(text: str) -> None:
    for method in ("upper", "lower", "capitalize", "title"):
        changed = getattr(written(text), method)()
        assert changed == getattr(text, method)()
        assert own_of(changed) in (b"\1" * len(text), bytes(len(changed)))


@given(text=st.text(ALPHABET, max_size=12))
def test_what_is_not_followed_is_nobody_s(text: str) -> None:
    made = written(text)
    for changed in (made.swapcase(), made.center(99), made.expandtabs(), "".join(reversed(made)), "".join([made])):
        assert not any(own_of(changed))
    assert not any(own_of(Traced(text)))


def mask(source: str, **values: Any) -> str:
    """What a template writes of its own, and a dot for each character that it does not."""
    text = TemplateEnvironment().from_string(source).render(values)
    return "".join(letter if own else "." for letter, own in zip(text, own_of(text), strict=True))


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ("a{{ x }}b", "a..b"),
        ("{{ 'a' + x + 'b' }}{{ 'c' ~ x ~ 1 ~ 'd' }}", "a..bc...d"),
        ("{% set y %}a{{ x }}{% endset %}{{ y | trim }}{{ y }}", "a..a.."),
        ("{% macro m(z) %}a{{ z }}{{ caller() }}{% endmacro %}{% call m(x) %}b{% endcall %}", "a..b"),
        ("{% filter replace('a', 'b') %}a{{ x }}{% endfilter %}", "b.."),
        ("{{ ['a', x, 'b'] | join(', ') }}{{ '-'.join(['a', x]) }}{{ ['a', x] | join }}", "a, .., ba-..a.."),
        ("{{ '<{}>'.format(x) }}{{ '<%s>' % x }}{{ '<%s>' | format(x) }}", "<..><..><..>"),
        ("{{ '<{0}>'.format(x) }}{{ '<%5s>' % x }}{{ '<{}>'.format(1) }}{{ '{{}}'.format() }}", "...........<.>.."),
        (
            "{{ x or 'a' }}{{ missing | default('a') }}{{ {'a': 'b'}['a'] }}{{ {'k': 'v'}.items() | list | string }}",
            "..ab............",
        ),
        ("{% set ns = namespace(t='') %}{% for c in ['a', x] %}{% set ns.t = ns.t + c %}{% endfor %}{{ ns.t }}", "a.."),
        ("{{ 'ab'[1:] }}{{ 'a b'.split()[1] }}{{ ' a ' | trim }}{{ 'A' | lower }}{{ '-' * 3 }}", "bbaa---"),
        (
            "{{ [x, 'a'] | map('trim') | list | last }}{{ 'a' | string }}{{ ('a', 'b')[1] }}{{ 'a' if x else 'b' }}",
            "aaba",
        ),
        ("{{ x.replace('x', '') }}{{ x | replace('x', 'a') }}{{ 'a' | replace('a', x) }}", "...."),
        ("{{ [x] | tojson }}{{ 'a' | tojson }}{{ 'a' | safe }}{{ 'a' | e }}{{ 'a' | reverse }}", '......"a"aaa'),
        ("{{ 'a<' + (x | safe) + 'b' }}{{ 'a' + (x | safe) }}", ".......ba.."),
    ],
)
def test_a_template_s_own_characters_are_known_through_all_that_it_does(source: str, own: str) -> None:
    assert mask(source, x="xx") == own


def test_parts_are_joined_with_their_origins() -> None:
    assert own_of(joined([written("ab"), "c", written("d")])) == b"\1\1\0\1"
