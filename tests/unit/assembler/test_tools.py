import json

import pytest

from assembler import tools
from hermes.v1 import types_pb2
from shared.errors import HermesError


def refusal(function_json: str) -> HermesError:
    with pytest.raises(HermesError) as caught:
        tools.read_tools([types_pb2.Tool(function_json='{"name": "ok"}'), types_pb2.Tool(function_json=function_json)])
    assert caught.value.metadata["tool_index"] == "1"
    return caught.value


def test_a_tool_keeps_its_keys_their_order_and_what_it_leaves_out() -> None:
    text = (
        '{"name": "f", "zeta": null, "description": "ünï \\u00e9", "parameters": {"b": 1.0, "a": [true]}, "extra": {}}'
    )
    (tool,) = tools.read_tools([types_pb2.Tool(function_json=text)])
    assert json.dumps(tool.function) == json.dumps(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        '{"name": NaN}',
        '{"name": "\\ud800"}',
        '{"parameters": {}}',
        '{"name": 5}',
        '{"name": ""}',
        '{"name": "a b"}',
        '{"name": "<s>"}',
        '{"name": "f", "parameters": {"properties": {"a b": {}}}}',
        '{"name": "f", "parameters": {"properties": {"a": {"anyOf": [{"properties": {"[INST]": 1}}]}}}}',
        "[" * 100_000,
        '{"name": "f", "parameters": ' + '{"a": ' * 100 + "1" + "}" * 101,
        '{"name": "f", "x": ' + "[" * 64 + "]" * 64 + "}",
        '{"name": "f", "x": ' + "[" * 900 + "]" * 900 + "}",
        '{"name": "f", "x": 1e999}',
    ],
)
def test_what_is_no_description_of_a_function_is_refused_with_its_place(text: str) -> None:
    error = refusal(text)
    assert (error.code.name, error.reason) == ("INVALID_ARGUMENT", "BAD_TOOL")
    assert error.message.startswith("Tool 1 ")


@pytest.mark.parametrize("name", ["f", "get_weather", "get-weather.v2", "mcp/server:tool", "größe", "$ref", "工具"])
def test_names_of_letters_digits_and_what_joins_words_are_names(name: str) -> None:
    assert tools.is_name(name)


@pytest.mark.parametrize("name", ["", " ", "a b", "<s>", "a\n", "[INST]", 'a"', "a|b", "a\u2581b", "｜"])
def test_other_names_are_none(name: str) -> None:
    assert not tools.is_name(name)


def test_arguments_that_are_no_json_object_stay_the_text_that_the_model_wrote() -> None:
    for text, arguments in (('{"a": 1}', {"a": 1}), ("{bad", None), ("[1]", None), ("", None)):
        call = tools.read_call(types_pb2.ToolCall(name="f", arguments_json=text), 0)
        assert (call.text, call.arguments, call.id) == (text, arguments, None)


def test_a_call_of_what_is_no_name_is_refused_with_its_message() -> None:
    with pytest.raises(HermesError) as caught:
        tools.read_call(types_pb2.ToolCall(name="<s>", arguments_json="{}"), 7)
    assert (caught.value.reason, caught.value.metadata["message_index"]) == ("BAD_TOOL_CALL", "7")


@pytest.mark.parametrize("levels", [63, 64, 500, 990, 5_000])
def test_json_of_too_many_levels_is_no_object_for_anybody(levels: int) -> None:
    text = '{"x": ' + "[" * levels + '"<s>"' + "]" * levels + "}"
    call = tools.read_call(types_pb2.ToolCall(name="f", arguments_json=text), 0)
    assert call.text == text
    assert (call.arguments is None) == (levels > 63)
    if levels > 63:
        with pytest.raises(ValueError, match="levels"):
            tools.parse_object(text)


def test_json_of_more_values_than_are_parsed_at_once_is_no_object_for_anybody() -> None:
    for values, is_object in ((50_000, True), (50_001, False)):
        text = f'{{"x": [{", ".join(["1"] * values)}]}}'
        call = tools.read_call(types_pb2.ToolCall(name="f", arguments_json=text), 0)
        assert (call.arguments is not None) == is_object
        if not is_object:
            with pytest.raises(ValueError, match="more than 50000 values"):
                tools.parse_object(text)


def test_many_lists_beside_each_other_are_no_levels() -> None:
    assert len(tools.parse_object('{"x": [' + "[]," * 1_000 + "{}]}")["x"]) == 1_001


def test_a_number_that_is_too_large_leaves_arguments_as_they_were_written() -> None:
    call = tools.read_call(types_pb2.ToolCall(name="f", arguments_json='{"a": -1e999}'), 0)
    assert (call.text, call.arguments) == ('{"a": -1e999}', None)
