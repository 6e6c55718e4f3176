import json
from pathlib import Path
from typing import Any

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


def test_templates_read_all_tokens_that_have_a_name(tmp_path: Path) -> None:
    config = {
        "bos_token": "<s>",
        "image_token": "<image>",
        "audio_token": {"content": "<audio>", "__type": "AddedToken"},
        "extra_special_tokens": {"think_token": "<think>"},
        "model_max_length": 5,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    declared = tokenizer_config.load(tmp_path)
    assert dict(declared.named) == {
        "bos_token": "<s>",
        "image_token": "<image>",
        "audio_token": "<audio>",
        "think_token": "<think>",
    }
    assert {token.content for token in declared.added} == set(declared.named.values())


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": 5},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": "a"}},
        {"added_tokens_decoder": ["a"]},
        {"extra_special_tokens": 5},
        {"extra_special_tokens": {"a": 5}},
        {"chat_template": [{"template": "x"}]},
        {"chat_template": ["x"]},
    ],
)
def test_a_damaged_configuration_stops_the_start_with_a_sentence(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"damaged .*: prepare the model again\.$"):
        tokenizer_config.load(tmp_path)


def test_a_template_of_the_model_s_own_that_is_no_text_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match="damaged"):
        tokenizer_config.load(tmp_path)


@pytest.mark.parametrize("config", ["[]", "5", '{"text_config": "x"}', '{"text_config": [1]}', '{"vocab_size": "x"}'])
def test_a_config_that_says_nothing_of_limits_is_none(tmp_path: Path, config: str) -> None:
    style = next(each for each in STYLES if each.name == "zephyr")
    directory = style.write(tmp_path)
    (directory / "config.json").write_text(config)
    files = model_files.load(directory)
    assert (files.context_length, files.vocab_size) == (None, files.tokenizer.vocabulary.size)
