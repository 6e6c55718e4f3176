import json
import time
from typing import Any

import pytest

from assembler.jinja_template import JinjaTemplate
from assembler.messages import Conversation, Message, Role
from assembler.templates import RenderOptions
from assembler.tools import Tool
from shared.errors import HermesError, StartupError

TALK = Conversation((Message(Role.USER, "q" * 100),), (Tool({"name": "f"}, 13),))
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


def refusal(source: str, seconds: float = 0.1) -> HermesError:
    """What a render is refused with; and it has to be soon."""
    started = time.monotonic()
    with pytest.raises(HermesError) as caught:
        JinjaTemplate(source, {}, seconds).render(TALK, RenderOptions())
    assert time.monotonic() - started < 30
    return caught.value


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS.replace("BODY", ""),
        ENDLESS.replace("BODY", "{{ loop.index0 }}"),
        ENDLESS.replace("BODY", "{% if false %}x{% endif %}"),
        ENDLESS.replace("BODY", "{% set x = a + b %}"),
        ENDLESS.replace("BODY", "{% continue %}"),
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% else %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
        "{% for a in [[0, 1]] recursive %}{{ loop([a, a]) }}{{ loop([a, a]) }}{% endfor %}",
        (
            "{% set x = namespace(v='') %}{% for a in range(99999) %}{% for b in range(99999) %}{% set x.v = 'a' %}"
            "{% endfor %}{% endfor %}"
        ),
        "{{ range(99999) | list | select('in', range(99999) | list | reverse | list) | list }}",
        "{{ (['x' * 900000] * 99999) | map('upper') | map('length') | sum }}",
        "{{ ([range(1000) | list] * 99999) | sum(start=[]) }}",
        "{{ ([range(9999) | list] * 99999) | rejectattr('x', 'in', []) | map('sort') | list | length }}",
    ],
)
def test_a_render_without_an_end_is_cut_off(source: str) -> None:
    error = refusal(source)
    assert error.code.name == "INVALID_ARGUMENT"
    assert error.reason in ("RENDER_LIMIT", "TEMPLATE_ERROR")  # recursion may come to Python's own end first
    if error.reason == "RENDER_LIMIT":
        assert error.metadata["limit"] == "seconds"
        assert "it takes too long" in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [0] * 10**10 }}",
        "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}",
        "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}",
        "{% set x = namespace(v=[1]) %}{% for a in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}",
        "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set x.v = [x.v, x.v] | join %}{% endfor %}",
        "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set x.v = ''.join([x.v, x.v]) %}{% endfor %}",
        "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set x.v = x.v.replace('x', 'xx') %}{% endfor %}",
        "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set x.v = x.v | replace('x', 'xx') %}{% endfor %}",
        (
            "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set y %}{{ x.v }}{{ x.v }}{% endset %}"
            "{% set x.v = y %}{% endfor %}"
        ),
        (
            "{% macro m(v) %}{{ v }}{{ v }}{% endmacro %}{% set x = namespace(v='x') %}{% for a in range(60) %}"
            "{% set x.v = m(x.v) %}{% endfor %}"
        ),
        "{% set x = namespace(v=[1]) %}{% for a in range(60) %}{% set x.v = [x.v, x.v] %}{% endfor %}{{ x.v | tojson }}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ 'x'.center(10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ 'x'.zfill(10**9) }}",
        "{{ 'x\\n' | indent(10**9, true) }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ '\\t'.expandtabs(10**9) }}",
        "{{ tools | tojson(indent=10**9) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set x = namespace(v=9) %}{% for a in range(60) %}{% set x.v = x.v * x.v %}{% endfor %}",
        "{{ strftime_now('%1000000000Y') }}",
        "{% set x = namespace(v='x' | safe) %}{% for a in range(60) %}{% set x.v = x.v + x.v %}{% endfor %}",
        "{% set x = namespace(v='x' | safe) %}{% for a in range(60) %}{% set x.v = ('%s%s' | safe) % (x.v, x.v) %}{% endfor %}",
        "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set x.v = ''.join([x.v, x.v] | map('string')) %}{% endfor %}",
        "{% set x = namespace(v='x') %}{% for a in range(60) %}{% set x.v = [{'a': x.v}, {'a': x.v}] | join(attribute='a') %}{% endfor %}",
        *(
            "{% set x = namespace(v=[1], w=[1], t=(1,)) %}{% for a in range(60) %}{% set x.v = [x.v, x.v] %}"
            "{% set x.w = [x.w, x.w] %}{% set x.t = (x.t, x.t) %}{% endfor %}" + shown
            for shown in (
                "{{ x.v }}",
                "{{ x.v | string }}",
                "{{ x.v ~ '' }}",
                "{{ '%s' % [x.v] }}",
                "{{ '{}'.format(x.v) }}",
                "{{ x.v | pprint }}",
                "{{ x.v == x.w }}",
                "{{ x.v in [x.w] }}",
                "{{ {x.t: 1} }}",
                "{{ [x.v] | join }}",
            )
        ),
        "{{ ('%(a)s' * 100000) % {'a': 'x' * 900000} }}",
        "{{ ('{0}' * 100000).format('x' * 900000) }}",
        "{{ ('x' * 900000).translate({120: 'y' * 900000}) }}",
        "{{ ('é' * 900000).encode('punycode') }}",
        "{{ ('f' * 900000) | int(base=16) }}",
    ],
)
def test_a_render_that_grows_without_an_end_is_cut_off(source: str) -> None:
    assert refusal(source, 20).reason in ("RENDER_LIMIT", "TEMPLATE_ERROR")


def test_what_grows_with_the_conversation_is_no_trouble() -> None:
    long = Conversation((Message(Role.USER, "q" * 1_000_000),))
    text = JinjaTemplate("{% for m in messages %}{{ (m.content + 'a') * 4 }}{% endfor %}", {}).render(
        long, RenderOptions()
    )
    assert len(text) == 4_000_004


def test_a_caller_s_text_as_a_pattern_is_looked_through_once() -> None:
    told = Conversation((Message(Role.USER, "{" + ":" * 300_000),))
    with pytest.raises(HermesError, match="ValueError"):
        JinjaTemplate("{{ messages[0].content.format(1) }}", {}).render(told, RenderOptions())


def test_each_message_brings_its_marks() -> None:
    many = Conversation((Message(Role.USER, "q"),) * 60_000)
    marks = "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + '\\n\\n' + m.content + '<|eot_id|>' }}{% endfor %}"
    assert JinjaTemplate(marks, {}).render(many, RenderOptions()).count("<|eot_id|>") == 60_000


def test_variables_and_names_are_of_the_conversation_too() -> None:
    long = "d" * 2_000_000
    template = JinjaTemplate("{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].name }}", {})
    named = Conversation((Message(Role.USER, "q", name=long),))
    text = template.render(named, RenderOptions(kwargs={"documents": [{"text": long}, {"text": long}]}))
    assert text == long * 3


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s %s %s %s %s %s %s %s' % (m, m, m, m, m, m, m, m) }}", " ".join(["q" * 100] * 8)),
        ("{{ [m, m] == [m, m] }}{{ {m: 1}[m] }}{{ m in [m] }}{{ 1 < 2 < 3 }}{{ m != m[1:] }}", "True1TrueTrueTrue"),
        (
            "{{ [] | map('upper') | list }}{{ none | map('upper') | list }}{{ [1, 2] | sum }}{{ missing | sum }}",
            "[][]30",
        ),
        ("{{ '12' | int + ('z' | int(5)) }}{{ ['b', 'a'] | map('upper') | sort | join('-') }}", "17A-B"),
        ("{{ (m | safe | string) + '<' }}{{ 'é'.encode('utf-8') | length }}", "q" * 100 + "&lt;2"),
    ],
)
def test_what_is_measured_first_is_as_it_was(source: str, text: str) -> None:
    assert JinjaTemplate("{% set m = messages[0].content %}" + source, {}).render(TALK, RenderOptions()) == text


def test_a_limit_on_one_render_is_none_on_the_next() -> None:
    template = JinjaTemplate("{% for a in range(messages | length * 50000) %}{{ a }}{% endfor %}", {}, 0.0001)
    with pytest.raises(HermesError):
        template.render(TALK, RenderOptions())
    assert JinjaTemplate("{% for a in range(50000) %}{% endfor %}ok", {}).render(TALK, RenderOptions()) == "ok"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' + 'b' ~ 1 ~ none }}", "ab1None"),
        (
            "{{ [1] + [2] }}{{ 2 + 3 }}{{ 2 * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '-' * 3 }}{{ '%s!' % 'a' }}",
            "[1, 2]5610243---a!",
        ),
        ("{{ 'a,b'.split(',') | join('-') }}{{ 'x' | indent(2, true) }}{{ 'a'.center(3) }}", "a-b  x a "),
        ("{% for c in 'ab' %}{{ loop.index }}{{ c }}{% endfor %}", "1a2b"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}", "2"),
        ("{{ '{}-{:>3}'.format('a', 1) }}", "a-  1"),
    ],
)
def test_ordinary_expressions_are_as_they_were(source: str, text: str) -> None:
    assert JinjaTemplate(source, {}).render(TALK, RenderOptions()) == text


def test_json_is_python_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    value: dict[str, Any] = {"b": ["é", None, 1.5, {"x": "<&>'"}], "a": True}
    told = Conversation((Message(Role.USER, "q"),), (Tool(value, 60),))
    text = JinjaTemplate("{{ tools[0].function | tojson }}", {}).render(told, RenderOptions())
    assert text == json.dumps(value, ensure_ascii=False)


def test_a_template_whose_constants_cannot_be_worked_out_stops_the_start_with_a_sentence() -> None:
    with pytest.raises(StartupError, match=r"cannot be compiled|error in line"):
        JinjaTemplate("{{ 'x' | no_such_filter }}", {})


def test_tabs_are_widened_as_jinja_does_it_in_loops_too() -> None:
    told = Conversation((Message(Role.USER, "a\tb"),))
    assert (
        JinjaTemplate("{% for m in messages %}{{ m.content.expandtabs(4) }}{% endfor %}", {}).render(
            told, RenderOptions()
        )
        == "a   b"
    )
