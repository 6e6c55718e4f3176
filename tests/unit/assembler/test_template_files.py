import json
from pathlib import Path

import pytest

from assembler import model_files, template_files, tokenizer_config
from assembler.declared import DeclaredTemplate
from assembler.jinja_template import JinjaTemplate
from assembler.messages import Conversation, Message, Role
from assembler.templates import RenderOptions
from shared.errors import StartupError
from tests.unit.assembler.model_styles import STYLES, TEMPLATES

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = Conversation((Message(Role.USER, "q"),))


def test_a_built_in_name_a_toml_file_and_a_jinja_file_are_templates(tmp_path: Path) -> None:
    declaration = tmp_path / "mine.toml"
    declaration.write_text((template_files._BUILT_IN / "zephyr.toml").read_text())
    assert isinstance(template_files.read("zephyr", NAMED), DeclaredTemplate)
    assert isinstance(template_files.read(str(declaration), NAMED), DeclaredTemplate)
    assert isinstance(template_files.read(str(TEMPLATES / "zephyr.jinja"), NAMED), JinjaTemplate)


def test_a_name_that_is_neither_is_told_with_the_built_in_ones(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"alpaca, chatml, .* zephyr"):
        template_files.read("zefyr", NAMED)
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    with pytest.raises(StartupError, match="UTF-8"):
        template_files.read(str(tmp_path / "bad.jinja"), NAMED)


def test_the_setting_takes_the_place_of_the_model_s_own(tmp_path: Path) -> None:
    style = next(each for each in STYLES if each.name == "zephyr")
    directory = style.write(tmp_path)
    own, chosen = model_files.load(directory).template, model_files.load(directory, "alpaca").template
    assert own is not None
    assert chosen is not None
    assert own.render(TALK, RenderOptions()).startswith("<|user|>")
    assert chosen.render(TALK, RenderOptions()).endswith("### Response:\n")


def test_a_template_for_tools_of_the_model_s_own_serves_chats_with_tools(tmp_path: Path) -> None:
    entries = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    declared = tokenizer_config.load(tmp_path)
    assert (declared.chat_template, declared.tool_template) == ("plain", "{{ tools[0].function.name }}")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("file {{ tools }}")
    (tmp_path / "chat_template.jinja").write_text("main")
    declared = tokenizer_config.load(tmp_path)
    assert (declared.chat_template, declared.tool_template) == ("main", "file {{ tools }}")
    chosen = template_files.choose(None, declared)
    assert chosen.plain is not None
    assert chosen.for_tools is not None
