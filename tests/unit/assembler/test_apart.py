"""Which templates are known to write each message by itself."""

import pytest

from assembler import apart
from assembler.sandbox import TemplateEnvironment


def read(body: str, before: str = "", after: str = "") -> apart.Apart | None:
    source = f"{before}{{% for message in messages %}}{body}{{% endfor %}}{after}"
    return apart.read(TemplateEnvironment().parse(source))


@pytest.mark.parametrize(
    "body",
    [
        "{{ message.role }}: {{ message['content'] | trim }}",
        "{% if loop.first and messages[0]['role'] != 'system' %}S{% endif %}{{ message.content }}",
        "{{ loop.index0 }}{% if loop.last %}!{% endif %}",
        "{% if loop.last and add_generation_prompt %}A{% endif %}",
        "{{ messages[loop.index0 - 1].role }}{{ messages[loop.index0].role }}{{ loop.previtem.role }}",
        "{% set text = message.content.split('a')[-1] %}{% if text %}{{ text }}{% endif %}",
        "{% for call in message.tool_calls %}{{ loop.index }}{{ call | tojson }}{% if loop.last %};{% endif %}{% endfor %}",
        "{% generation %}{{ message.content }}{% endgeneration %}",
        "{% if not message.content %}{% continue %}{% endif %}{{ message.content }}",
        "{{ bos_token }}{{ tools | tojson }}",
    ],
)
def test_loops_that_look_at_no_more_than_their_message_are_known(body: str) -> None:
    found = read(body)
    assert found is not None
    assert not found.sees_next


@pytest.mark.parametrize(
    "body", ["{{ loop.nextitem.role }}", "{{ messages[loop.index0 + 1].role }}", "{{ messages[loop.index].role }}"]
)
def test_loops_that_look_at_the_next_message_are_told_apart(body: str) -> None:
    found = read(body)
    assert found is not None
    assert found.sees_next


@pytest.mark.parametrize(
    "body",
    [
        "{{ messages | length }}",
        "{{ messages[-1].role }}",
        "{{ messages[2].role }}",
        "{{ messages[loop.index0 + 2].role }}",
        "{{ messages[loop.index + 1].role }}",
        "{{ messages[loop.length - 1].role }}",
        "{{ messages[place].role }}",
        "{{ messages[1:] }}",
        "{{ messages.count(message) }}",
        "{{ loop.length }}",
        "{{ loop.revindex }}",
        "{{ loop.cycle('a', 'b') }}",
        "{% if loop.changed(message.role) %}a{% endif %}",
        "{{ loop | string }}",
        "{{ loop['last'] }}",
        "{% set loop = message %}{{ loop.first }}",
        "{% set messages = message %}{{ messages[0] }}",
        "{{ strftime_now('%H') }}",
        "{{ message.content | random }}",
        "{% for call in message.tool_calls %}{{ messages[loop.index0 - 1].role }}{% endfor %}",
        "{% for each in messages %}{{ each.role }}{% endfor %}",
        "{% for call in message.tool_calls %}{{ loop.length }}{% endfor %}",
    ],
)
def test_loops_that_could_see_what_comes_later_are_not(body: str) -> None:
    assert read(body) is None


@pytest.mark.parametrize(
    "before",
    [
        "{% set last = messages[-1].role %}",
        "{% set last = messages | length %}{% set last = last + 1 %}",
        "{% set many = messages | length %}{% set last = many > 3 %}",
        "{% if messages[-1].role == 'user' %}{% set last = 1 %}{% endif %}",
        "{% if messages %}{% else %}{% set last = 1 %}{% endif %}",
        "{% set last %}{{ messages | length }}{% endset %}",
        "{% macro last() %}{{ messages | length }}{% endmacro %}",
        "{% macro other() %}{{ messages | length }}{% endmacro %}{% set last = other() %}",
        "{% set last = strftime_now('%H') %}",
        "{% set last = [1, 2] | map('string') %}",
        "{% set last = cycler('a', 'b') %}",
        "{% set last = joiner() %}",
        "{% set last = namespace(seen=0) %}",
    ],
)
def test_a_loop_that_reads_a_name_which_later_messages_can_change_is_not(before: str) -> None:
    assert read("{{ message.content }}{{ last }}", before) is None


def test_names_that_only_the_first_messages_set_do_no_harm() -> None:
    before = "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% endif %}"
    assert read("{{ first }}{{ message.content }}", before) is not None


def test_around_the_loop_a_template_may_do_what_it_likes() -> None:
    before = "{{ messages | length }}{{ messages[-1].role }}{{ strftime_now('%H') }}"
    after = "{% if messages[-1].role == 'user' %}{{ messages | map(attribute='role') | join }}{% endif %}"
    assert read("{{ message.content }}", before, after) is not None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.role }}{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages[1:] %}{{ m.role }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.role }}{% endfor %}",
        "{% for m in messages recursive %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}{% else %}none{% endfor %}",
        "{% for role, content in messages %}{{ role }}{% endfor %}",
        "{% set messages = messages[1:] %}{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% set ns = namespace(a=0) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{{ ns.a }}{% endfor %}",
        "{% block a %}{% for m in messages %}{{ m.role }}{% endfor %}{% endblock %}",
        "{% include 'other' %}{% for m in messages %}{{ m.role }}{% endfor %}",
    ],
)
def test_other_templates_are_not(source: str) -> None:
    assert apart.read(TemplateEnvironment().parse(source)) is None
