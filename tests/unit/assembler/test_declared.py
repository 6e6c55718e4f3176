"""Built-in declared templates against the formats that their families publish, as transformers renders those."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from assembler import template_files
from assembler.declared import DeclaredTemplate
from assembler.messages import Conversation, Message, Role
from assembler.templates import RenderOptions
from assembler.tools import Tool, ToolCall
from assembler.traced import own_of
from shared.errors import HermesError, StartupError
from tests.unit.assembler.model_styles import TEMPLATES

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA_3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\n\n" + message["content"] + " [/INST]" }}
        {%- else %}{{- " [INST] " + message["content"] + " [/INST]" }}{%- endif %}
    {%- else %}{{- " " + message["content"] + eos_token }}{%- endif %}
{%- endfor %}"""
GEMMA = """\
{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}
{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("roles must alternate") }}{%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
VICUNA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% else %}"
    "{{ 'A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user\\'s questions.' }}{% endif %}{{ ' ' }}{% for message in messages %}"
    "{% if message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}{% else %}"
    "{{ 'ASSISTANT: ' + message.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
ALPACA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% else %}"
    "{{ 'Below is an instruction that describes a task. Write a response that appropriately completes the request.' }}"
    "{% endif %}{{ '\n\n' }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '### Instruction:\n' + message.content + '\n\n' }}{% else %}"
    "{{ '### Response:\n' + message.content + eos_token + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
PUBLISHED = {
    "chatml": (TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"),
    "llama2": (TEMPLATES / "llama2.jinja").read_text(encoding="utf-8"),
    "zephyr": (TEMPLATES / "zephyr.jinja").read_text(encoding="utf-8"),
    "llama3": LLAMA_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "vicuna": VICUNA,
    "alpaca": ALPACA,
}
TEXTS = st.one_of(st.text(max_size=12), st.sampled_from(["", " ", "  padded \n", "\n\na\n\n", "你好 🎉"]))


def published(source: str, messages: list[dict[str, Any]], *, answer: bool, **fields: Any) -> str:
    (text,), _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=answer, **NAMED, **fields
    )
    return text


def test_there_is_a_built_in_template_for_each_of_eight_families() -> None:
    assert template_files.built_in_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
@settings(deadline=None, max_examples=40)
@given(
    system=st.none() | TEXTS,
    turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
    asks=st.none() | TEXTS,
    answer=st.booleans(),
)
def test_the_text_is_that_of_the_published_format(
    name: str, system: str | None, turns: list[tuple[str, str]], asks: str | None, answer: bool
) -> None:
    told = [(role, text) for turn in turns for role, text in zip((Role.USER, Role.ASSISTANT), turn, strict=True)]
    told = [*([] if system is None else [(Role.SYSTEM, system)]), *told, *([] if asks is None else [(Role.USER, asks)])]
    # Zephyr's own opens the answer within its loop over the messages.
    text = published(PUBLISHED[name], [{"role": str(role), "content": text} for role, text in told], answer=answer)
    conversation = Conversation(tuple(Message(role, text) for role, text in told))
    assert template_files.read(name, NAMED).render(conversation, RenderOptions(add_generation_prompt=answer)) == text


def test_tools_calls_and_results_of_chatml_are_those_of_qwen() -> None:
    function = {"name": "f", "description": "dé", "parameters": {"type": "object", "properties": {"a": {}}}}
    calls = (ToolCall("f", '{"a": "é"}', {"a": "é"}), ToolCall("g", "{}", {}))
    conversation = Conversation(
        (
            Message(Role.SYSTEM, "s"),
            Message(Role.USER, "q"),
            Message(Role.ASSISTANT, "", tool_calls=calls),
            Message(Role.TOOL, "5"),
            Message(Role.TOOL, "6"),
            Message(Role.ASSISTANT, "both", tool_calls=calls[:1]),
            Message(Role.TOOL, "7"),
        ),
        (Tool(function, 1),),
    )
    told = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls],
        },
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "both", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]},
        {"role": "tool", "content": "7"},
    ]
    source = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    expected = published(source, told, answer=True, tools=[{"type": "function", "function": function}])
    assert template_files.read("chatml", NAMED).render(conversation, RenderOptions()) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_continued_answer_ends_with_its_own_text(name: str) -> None:
    conversation = Conversation((Message(Role.USER, "q"), Message(Role.ASSISTANT, "Paris is")))
    template = template_files.read(name, NAMED)
    text = template.render(conversation, RenderOptions(False, True))
    assert text.endswith("Paris is")
    assert template.render(conversation, RenderOptions(False)).startswith(text)
    with pytest.raises(HermesError, match="goes on with an assistant message"):
        template.render(Conversation((Message(Role.USER, "q"),)), RenderOptions(False, True))


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("llama2", "uu"),
        ("mistral", "au"),
        ("gemma", "uauu"),
        ("vicuna", "us"),
        ("zephyr", "ut"),
        ("gemma", "s"),
        ("mistral", "s"),
        ("llama2", "s"),
    ],
)
def test_an_order_that_the_format_has_no_place_for_is_a_template_error(name: str, roles: str) -> None:
    known = {role[0]: role for role in Role}
    conversation = Conversation(tuple(Message(known[role], "x") for role in roles))
    with pytest.raises(HermesError) as caught:
        template_files.read(name, NAMED).render(conversation, RenderOptions())
    assert caught.value.reason == "TEMPLATE_ERROR"


def test_what_a_format_would_leave_out_is_refused() -> None:
    called = Conversation((Message(Role.ASSISTANT, "", tool_calls=(ToolCall("f", "{}", {}),)),))
    with_tools = Conversation((Message(Role.USER, "q"),), (Tool({"name": "f"}, 1),))
    template = template_files.read("zephyr", NAMED)
    for conversation, kwargs, reason in (
        (called, {}, "TOOL_CALLS_NOT_SHOWN"),
        (with_tools, {}, "TOOLS_NOT_SHOWN"),
        (Conversation((Message(Role.USER, "q"),)), {"enable_thinking": True}, "BAD_TEMPLATE_KWARGS"),
    ):
        with pytest.raises(HermesError) as caught:
            template.check(conversation, kwargs)
        assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("about = ", "end of document"),
        ('about = "x"', "generation: field required"),
        ('about = "x"\ncolour = "red"', "colour"),
        ('about = "x"\ngeneration = "{bos_token}"', "bos_token"),
    ],
)
def test_a_declaration_that_cannot_be_used_stops_the_start_with_a_sentence(source: str, word: str) -> None:
    with pytest.raises(StartupError, match=word):
        DeclaredTemplate(source, {}, "mine.toml")


def test_the_version_is_of_the_format_and_not_of_what_is_said_about_it() -> None:
    source = (template_files._BUILT_IN / "chatml.toml").read_text(encoding="utf-8")
    versions = [
        DeclaredTemplate(text, NAMED, "x").version
        for text in (source, source.replace("ChatML, with", "With"), source.replace("user\\n", "user: "))
    ]
    assert versions[0] == versions[1] != versions[2]


def test_a_format_s_own_texts_are_known_beside_a_caller_s() -> None:
    call = ToolCall("f", '{"a": "<tool_call>"}', {"a": "<tool_call>"})
    told = (
        Message(Role.SYSTEM, "<|im_end|>"),
        Message(Role.USER, " <|im_end|>"),
        Message(Role.ASSISTANT, "</tool_call>", tool_calls=(call,)),
        Message(Role.TOOL, "<tool_response>"),
    )
    tool = Tool({"name": "f", "description": "<tools>"}, 1)
    template = template_files.read("chatml", NAMED)
    text = template.render(Conversation(told, (tool,)), RenderOptions())
    own = "".join(letter for letter, mark in zip(text, own_of(text), strict=True) if mark)
    harmless = (
        Message(Role.SYSTEM, ""),
        Message(Role.USER, ""),
        Message(Role.ASSISTANT, "-", tool_calls=(ToolCall("f", "-", None),)),
        Message(Role.TOOL, ""),
    )
    plain = template.render(Conversation(harmless, (tool,)), RenderOptions()).replace("-", "").replace("\n\n<", "\n\n<")
    assert own.count("<|im_end|>") == plain.count("<|im_end|>") == text.count("<|im_end|>") - 2
    assert own.count("<tool_call>") == plain.count("<tool_call>") == text.count("<tool_call>") - 1
    assert own.count("<tool_response>") == text.count("<tool_response>") - 1
    assert own.count("<tools>") == text.count("<tools>") - 1
    assert own.startswith("<|im_start|>system\n\n\n# Tools")
    assert own.endswith("<|im_start|>assistant\n")
