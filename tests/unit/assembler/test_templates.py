import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from assembler import tokenizer_config
from assembler.jinja_template import JinjaTemplate
from assembler.messages import Conversation, Message, Role
from assembler.templates import RenderOptions, render_options
from shared.errors import HermesError, StartupError

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}{% set content = message['content'] %}{% endif %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' ' + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'assistant') %}{% set role = 'model' %}
    {% else %}{% set role = message['role'] %}{% endif %}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""
THINKING = """\
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 == ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
EVERY_TOOL_OF_THE_TRADE = """\
{% macro show(message) %}{{ message | tojson }}|{{ message | tojson(indent=2) }}{% endmacro %}
{% for message in messages %}
    {% if loop.index0 > 5 %}{% break %}{% endif %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {{ show(dict(role=message.role, text=message.content, name=message.name | default('nobody'))) }}
    {% generation %}{{ message.get('reasoning', '-') }}{{ message.thinking }}{% endgeneration %}
{% endfor %}
{{ bos_token }}{{ undefined_thing }}{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}
{{ messages | map(attribute='role') | list | tojson(sort_keys=true, separators=(',', ':')) }}
"""
STYLES = {
    "chatml": CHATML,
    "llama2": LLAMA_2,
    "llama3": LLAMA_3,
    "gemma": GEMMA,
    "thinking": THINKING,
    "everything": EVERY_TOOL_OF_THE_TRADE,
}


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(Role(role), content) for role, content in turns))


def as_transformers(source: str, told: Conversation, options: RenderOptions, named: dict[str, str] = NAMED) -> str:
    messages = [
        {
            "role": str(message.role),
            "content": message.content,
            **({} if message.name is None else {"name": message.name}),
            **({} if message.reasoning is None else {"reasoning": message.reasoning}),
        }
        for message in told.messages
    ]
    (text,), _ = render_jinja_template(
        conversations=[messages],
        chat_template=source,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        **{**named, **options.kwargs},
    )
    return text


TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["", "  padded \n", "<think>a</think>\n\nb", "<&>'\"é你"]))
TURNS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3)


@pytest.mark.parametrize("style", STYLES)
@settings(deadline=None, max_examples=40)
@given(turns=TURNS, system=st.none() | TEXTS, answer=st.booleans())
def test_the_text_is_transformers_text(style: str, turns: Any, system: str | None, answer: bool) -> None:
    told = [("user" if place % 2 == 0 else "assistant", text) for turn in turns for place, text in enumerate(turn)]
    if system is not None and style != "gemma":
        told.insert(0, ("system", system))
    template = JinjaTemplate(STYLES[style], NAMED)
    options = RenderOptions(add_generation_prompt=answer)
    assert template.render(conversation(*told), options) == as_transformers(STYLES[style], conversation(*told), options)


@pytest.mark.parametrize("style", ["thinking", "everything"])
def test_names_and_reasoning_reach_the_template_as_from_transformers(style: str) -> None:
    told = Conversation(
        (
            Message(Role.USER, "q", name="ann"),
            Message(Role.ASSISTANT, "a", reasoning="because"),
            Message(Role.TOOL, "5"),
        )
    )
    options = RenderOptions()
    assert JinjaTemplate(STYLES[style], NAMED).render(told, options) == as_transformers(STYLES[style], told, options)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "last", ["plain", " padded \n", "twice", "", "with CONTINUE_FINAL_MESSAGE_TAG inside", "<|im_end|>"]
)
def test_a_continued_message_ends_where_its_text_ends(style: str, last: str) -> None:
    told = conversation(("user", f"say twice {last}"), ("assistant", last))
    template, options = JinjaTemplate(STYLES[style], NAMED), RenderOptions(False, True)
    text = template.render(told, options)
    if "TAG" not in last:  # where transformers' own mark is in the text, it cuts there
        assert text == as_transformers(STYLES[style], told, options)
    if style == "chatml":
        assert text.endswith("<|im_start|>assistant\n" + last)
    elif style == "llama3":
        assert text.endswith(("<|end_header_id|>\n\n" + last.strip()).rstrip())


def test_only_an_assistant_message_can_be_continued() -> None:
    with pytest.raises(HermesError) as caught:
        JinjaTemplate(CHATML, {}).render(conversation(("user", "q")), RenderOptions(False, True))
    assert caught.value.reason == "NOTHING_TO_CONTINUE"


def test_a_last_message_that_the_template_rewrites_cannot_be_continued() -> None:
    told = conversation(("user", "q"), ("assistant", "<think>why</think>\n\nso"))
    with pytest.raises(HermesError) as caught:
        JinjaTemplate(THINKING, {}).render(told, RenderOptions(False, True))
    assert caught.value.reason == "TEMPLATE_ERROR"


def test_what_a_template_raises_is_told_to_the_caller() -> None:
    with pytest.raises(HermesError) as caught:
        JinjaTemplate(GEMMA, NAMED).render(conversation(("system", "s")), RenderOptions())
    assert caught.value.reason == "TEMPLATE_ERROR"
    assert "System role not supported" in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.x }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.mro() }}",
        "{{ messages.append(1) }}",
        "{{ 1/0 }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_template_error(source: str) -> None:
    with pytest.raises(HermesError) as caught:
        JinjaTemplate(source, {}).render(conversation(("user", "q")), RenderOptions())
    assert caught.value.reason == "TEMPLATE_ERROR"


def test_a_template_variable_reaches_the_template() -> None:
    options = RenderOptions(kwargs={"enable_thinking": False})
    template = JinjaTemplate(THINKING, {})
    template.check(conversation(("user", "q")), options.kwargs)
    assert template.render(conversation(("user", "q")), options).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "name",
    ["never_read", "messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "ns", "self"],
)
def test_a_variable_that_the_caller_cannot_set_is_refused_by_name(name: str) -> None:
    template = JinjaTemplate(THINKING, {})
    with pytest.raises(HermesError) as caught:
        template.check(conversation(("user", "q")), {name: 1})
    assert caught.value.reason == "BAD_TEMPLATE_KWARGS"
    assert name in caught.value.message


def test_a_variable_with_a_default_in_the_template_can_be_set() -> None:
    template = JinjaTemplate(LLAMA_3, NAMED)
    template.check(conversation(("user", "q")), {"date_string": "26 Jul 2024"})
    options = RenderOptions(kwargs={"date_string": "26 Jul 2024"})
    assert "Today Date: 26 Jul 2024\n" in template.render(conversation(("user", "q")), options)


def test_a_template_that_prints_the_date_prints_todays() -> None:
    before = datetime.now().astimezone().strftime("%d %b %Y")
    text = JinjaTemplate(LLAMA_3, NAMED).render(conversation(("user", "q")), RenderOptions())
    assert any(day in text for day in (before, datetime.now().astimezone().strftime("%d %b %Y")))


@pytest.mark.parametrize("text", ["[1]", "null", "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000])
def test_template_kwargs_have_to_be_a_json_object(text: str) -> None:
    with pytest.raises(HermesError) as caught:
        render_options(add_generation_prompt=None, continue_final_message=False, kwargs_json=text)
    assert caught.value.reason == "BAD_TEMPLATE_KWARGS"


def test_a_generation_prompt_and_a_continued_message_exclude_each_other() -> None:
    with pytest.raises(HermesError) as caught:
        render_options(add_generation_prompt=True, continue_final_message=True, kwargs_json="")
    assert caught.value.reason == "GENERATION_PROMPT_CONFLICT"


@pytest.mark.parametrize(
    ("asked", "continued", "added"),
    [(None, False, True), (None, True, False), (False, False, False), (True, False, True)],
)
def test_a_generation_prompt_is_added_unless_told_otherwise(asked: bool | None, continued: bool, added: bool) -> None:
    options = render_options(add_generation_prompt=asked, continue_final_message=continued, kwargs_json="")
    assert options.add_generation_prompt is added


def test_the_version_changes_with_the_source_and_with_the_named_tokens_alone() -> None:
    versions = {JinjaTemplate(CHATML, NAMED).version, JinjaTemplate(CHATML, dict(NAMED)).version}
    assert len(versions) == 1
    assert len(versions | {JinjaTemplate(CHATML + " ", NAMED).version, JinjaTemplate(CHATML, {}).version}) == 3


def test_a_template_that_cannot_be_parsed_stops_the_start_with_its_line() -> None:
    with pytest.raises(StartupError, match="line 2"):
        JinjaTemplate("\n{% for %}", {})


def test_class_defaults_name_the_tokens_that_a_config_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    assert tokenizer_config.load(tmp_path).named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "plain"},
        {"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]},
    ],
)
def test_a_template_in_the_config_serves_where_no_file_has_one(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_config.load(tmp_path).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer_config.load(tmp_path).chat_template == "file"


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert tokenizer_config.load(tmp_path).chat_template is None
