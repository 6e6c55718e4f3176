"""What is recognised in answers, by the template, the tokenizer and the request."""

from pathlib import Path
from typing import Any

import pytest

from assembler import model_files
from assembler.answer_format import PLAIN, AnswerFormat, AnswerFormats
from assembler.call_formats import format_of
from assembler.jinja_template import JinjaTemplate
from assembler.model_files import ModelFiles
from assembler.template_files import built_in_names, read
from hermes.v1 import assembler_pb2, types_pb2
from tests.unit.assembler.model_styles import STYLES, Style

NAMED = {style.name: style for style in STYLES}
FORMATS = {"hermes": "hermes", "qwen3": "hermes", "llama3_1": "llama3", "mistral": "mistral"}
TOOL = types_pb2.Tool(function_json='{"name": "find", "parameters": {"type": "object", "properties": {}}}')


@pytest.fixture(scope="module", params=sorted(NAMED))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Style, ModelFiles]:
    style = NAMED[request.param]
    return style, model_files.load(style.write(tmp_path_factory.mktemp(style.name)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return model_files.load(NAMED["qwen3"].write(tmp_path_factory.mktemp("qwen3")))


def test_the_format_of_calls_is_the_one_that_reads_what_the_template_writes(served: tuple[Style, ModelFiles]) -> None:
    style, files = served
    assert files.template is not None
    found = format_of(files.template)
    assert (found and found.name) == FORMATS.get(style.name)


def test_declared_templates_tell_their_format_too() -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    found = {name: format_of(read(name, tokens)) for name in built_in_names()}
    assert {name: each.name for name, each in found.items() if each} == {"chatml": "hermes"}


def showing(call: str, before: str = "") -> str:
    """A template that writes a call so."""
    return (
        before + "{% for m in messages %}{% for c in m.tool_calls or [] %}" + call + "{% endfor %}{{ m.content }}"
        "{{ eos_token }}{% endfor %}"
    )


NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
TEMPLATES = {
    "names and ids": (showing(f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{ARGUMENTS}"), "mistral"),
    "names": (showing(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}"), "mistral"),
    "told in words alone": (showing("", "{% if tools %}Write <tool_call>{...}</tool_call>.{% endif %}"), "hermes"),
    "another form beside such words": (showing(f"call {NAME} {ARGUMENTS}", "Never write <tool_call>."), None),
    "JSON behind words": (showing("Action: {{ c.function | tojson }}"), None),
    "refuses everything": ("{{ raise_exception('no') }}", None),
    "never ends": ("{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}", None),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_that_write_calls_in_other_ways(case: str) -> None:
    source, name = TEMPLATES[case]
    found = format_of(JinjaTemplate(source, {"eos_token": "</s>"}, seconds=0.2))
    assert (found and found.name) == name


def prompt(*tools: types_pb2.Tool, **fields: Any) -> assembler_pb2.Prompt:
    messages = [types_pb2.Message(role="user", content="q")]
    return assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=messages, tools=tools, **fields))


def continued(content: str, *tools: types_pb2.Tool, **fields: Any) -> assembler_pb2.Prompt:
    asked = prompt(*tools, continue_final_message=True)
    asked.chat.messages.append(types_pb2.Message(role="assistant", content=content, **fields))
    return asked


def of(files: ModelFiles, asked: assembler_pb2.Prompt, end: str = "<|im_start|>assistant\n") -> AnswerFormat:
    return AnswerFormats(files).of(asked, files.tokenizer.encode(end))


def test_calls_are_recognised_where_tools_are_offered_and_reasoning_in_every_chat(qwen: ModelFiles) -> None:
    without, offered = of(qwen, prompt()), of(qwen, prompt(TOOL))
    assert without.reasoning == offered.reasoning == ("<think>", "</think>")
    assert without.calls is None
    assert offered.calls is not None
    assert offered.calls.name == "hermes"


def test_answers_to_text_and_ids_are_text(qwen: ModelFiles) -> None:
    assert of(qwen, assembler_pb2.Prompt(text="<think>")) is PLAIN
    assert of(qwen, assembler_pb2.Prompt(token_ids=assembler_pb2.TokenIds(ids=[1]))) is PLAIN


def test_a_prompt_that_ends_with_the_first_mark_has_opened_reasoning(qwen: ModelFiles) -> None:
    assert of(qwen, prompt(), "<|im_start|>assistant\n<think>\n").opened == ""
    assert of(qwen, prompt(), "<|im_start|>assistant\n<think>\n\n</think>\n\n").opened is None
    assert of(qwen, prompt(), "say <think> twice").opened is None


def test_an_answer_whose_beginning_is_given_has_no_other_beginning(qwen: ModelFiles) -> None:
    assert of(qwen, continued("<think>\nOne")).opened == "\nOne"
    closed = of(qwen, continued("<think>\nOne\n</think>\n\nPar"))
    assert (closed.opened, closed.reasoning) == (None, None)
    assert of(qwen, continued("Par", TOOL)).reasoning is None
    assert of(qwen, continued("Par", TOOL)).calls is not None
    assert of(qwen, continued(" ")).reasoning is not None
    assert of(qwen, continued("", reasoning="One")).reasoning is None


def test_json_at_the_beginning_of_the_rest_of_an_answer_is_no_call(tmp_path: Path) -> None:
    files = model_files.load(NAMED["llama3_1"].write(tmp_path))
    fresh, begun = of(files, prompt(TOOL), "").calls, of(files, continued("As in ", TOOL), "").calls
    assert fresh is not None
    assert begun is not None
    assert (fresh.bare, begun.bare) == (True, False)
    assert of(files, prompt(TOOL), "").tools == {"find"}


def test_settings_win_over_the_template(qwen: ModelFiles) -> None:
    off = AnswerFormats(qwen, "none", "none").of(prompt(TOOL), [])
    assert (off.calls, off.reasoning) == (None, None)
    other = AnswerFormats(qwen, "mistral").of(prompt(TOOL), [])
    assert other.calls is not None
    assert other.calls.name == "mistral"
    assert str(AnswerFormats(qwen, "none", "none")) == "tool calls are text, reasoning is text"
    assert str(AnswerFormats(qwen)) == (
        "tool calls are read as hermes writes them, reasoning is what stands between <think> and </think>"
    )


def test_a_template_for_tools_tells_the_format_of_chats_with_tools_alone(tmp_path: Path) -> None:
    directory = NAMED["qwen3"].write(tmp_path)
    (directory / "chat_template.jinja").write_text(NAMED["chatml"].source)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["qwen3"].source)
    files = model_files.load(directory)
    with_tools = of(files, prompt(TOOL))
    assert with_tools.calls is not None
    assert with_tools.calls.name == "hermes"
    assert with_tools.reasoning is not None
    assert of(files, prompt()) is PLAIN


def test_without_a_template_nothing_is_recognised(files: ModelFiles) -> None:
    bare = ModelFiles(files.tokenizer, None, None, 10)
    assert of(bare, prompt(TOOL)).calls is None
