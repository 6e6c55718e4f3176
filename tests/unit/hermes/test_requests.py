import json

import grpc
import pytest

from hermes.client import HermesError, Message, ToolCall
from hermes.requests import assemble_request, generate_request
from hermes.v1 import assembler_pb2, types_pb2


def messages_of(request):
    return [(m.role, m.content) for m in request.prompt.chat.messages]


def test_a_string_is_one_user_message():
    assert messages_of(generate_request("hi")) == [("user", "hi")]


def test_a_system_message_opens_the_conversation():
    assert messages_of(generate_request("hi", system="Be brief.")) == [("system", "Be brief."), ("user", "hi")]


def test_messages_mappings_and_protos_mean_the_same():
    request = generate_request(
        [Message("user", "a"), {"role": "user", "content": "a"}, types_pb2.Message(role="user", content="a")]
    )
    first, *others = request.prompt.chat.messages
    assert all(other == first for other in others)


def test_content_that_is_none_stays_absent():
    request = generate_request([{"role": "assistant", "content": None}, {"role": "user", "content": ""}])
    assert [m.HasField("content") for m in request.prompt.chat.messages] == [False, True]


def test_content_parts_are_passed_as_parts():
    request = generate_request([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}])
    assert [part.text for part in request.prompt.chat.messages[0].content_parts] == ["a", "b"]


def test_tool_calls_in_the_openai_shape_and_in_ours():
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"name": "f", "arguments": {"x": 1}},
        ToolCall("f", '{"x": 1}'),
    ]
    message = generate_request([{"role": "assistant", "tool_calls": calls}]).prompt.chat.messages[0]
    assert {(call.name, call.arguments_json) for call in message.tool_calls} == {("f", '{"x": 1}')}
    assert [call.HasField("id") for call in message.tool_calls] == [True, False, False]


def test_tools_keep_their_key_order():
    function = {"name": "f", "parameters": {"z": 1, "a": "é"}}
    request = generate_request("hi", tools=[function, {"type": "function", "function": function}, json.dumps(function)])
    first, second, third = request.prompt.chat.tools
    assert first.function_json == second.function_json == '{"name": "f", "parameters": {"z": 1, "a": "é"}}'
    assert json.loads(third.function_json) == function


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"content": "hi"}, "Message 0 has no role"),
        ({"role": "user", "contents": "hi"}, "'contents'"),
        ({"role": "user", "content": 3}, "cannot be read"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "cannot be read"),
        ("hi", "is a str"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(message, sentence):
    with pytest.raises(HermesError, match=sentence) as caught:
        generate_request([message])
    assert caught.value.reason == "BAD_MESSAGE"


def test_raw_text_and_token_ids_are_prompts():
    assert generate_request(None, text="Once").prompt.text == "Once"
    assert list(generate_request(None, token_ids=[1, 2]).prompt.token_ids.ids) == [1, 2]


def test_no_messages_go_to_the_server_which_says_what_it_thinks():
    assert generate_request([]).prompt.WhichOneof("input") == "chat"


def test_a_prompt_is_needed_and_only_one():
    with pytest.raises(HermesError) as missing:
        generate_request(None)
    assert missing.value.reason == "PROMPT_MISSING"
    with pytest.raises(HermesError, match="messages, text") as conflict:
        generate_request("hi", text="hi")
    assert conflict.value.reason == "PROMPT_CONFLICT"


def test_options_that_are_not_given_stay_unset():
    request = generate_request("hi", temperature=None, stop=None)
    assert request.sampling == types_pb2.SamplingParams()
    assert request.stopping == types_pb2.StopParams()
    assert not request.stop
    assert not request.HasField("truncation")
    assert not request.prompt.chat.HasField("add_generation_prompt")


def test_a_zero_is_not_an_absent_option():
    request = generate_request("hi", temperature=0, max_tokens=0, top_k=0)
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("top_k")
    assert request.stopping.HasField("max_tokens")


def test_options_reach_their_fields():
    request = generate_request(
        "hi",
        stop="END",
        include_stop=True,
        stop_token_ids=[7],
        ignore_eos=True,
        logit_bias={5: -1.0},
        namespace="team",
        cache_read=False,
        max_prompt_tokens=100,
        template_kwargs={"enable_thinking": False},
        continue_final_message=True,
        add_generation_prompt=False,
        affinity_key="k",
    )
    assert list(request.stop) == ["END"]
    assert request.cache == types_pb2.CachePolicy(namespace="team", read=False)
    assert request.truncation.mode == assembler_pb2.Truncation.MODE_ROUNDS
    assert request.prompt.chat.template_kwargs_json == '{"enable_thinking": false}'
    assert request.prompt.chat.HasField("add_generation_prompt")
    assert dict(request.sampling.logit_bias) == {5: -1.0}


def test_a_misspelt_option_is_refused():
    with pytest.raises(TypeError, match="'temprature'"):
        generate_request("hi", temprature=0)
    with pytest.raises(TypeError, match="'max_tokens'"):
        assemble_request("hi", max_tokens=1)


def test_an_assembly_returns_its_text_unless_told_otherwise():
    assert assemble_request("hi").return_text
    assert not assemble_request("hi", return_text=False).return_text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 10**30),
        pytest.param("seed", 10**5000, id="huge"),
        ("top_k", 10**11),
        ("max_tokens", -1),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("stop", 5),
        ("stop", ["\udcff"]),
        ("logit_bias", {10**20: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("n", 0.5),
        ("allowed_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("namespace", "\udcff"),
        ("system", "\udcff"),
        ("request_id", 3),
        ("cache_read", "x"),
        ("max_prompt_tokens", 10**12),
        ("template_kwargs", {"a": object()}),
        ("tools", [3]),
    ],
)
def test_a_value_that_cannot_travel_is_named(field, value):
    with pytest.raises(HermesError, match=rf"^{field} ") as caught:
        generate_request("hi", **{field: value})
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.metadata == {"field": field}


@pytest.mark.parametrize(("field", "value"), [("token_ids", [10**12]), ("text", "\udcff"), ("text", 5)])
def test_a_prompt_that_cannot_travel_is_named(field, value):
    for request in (generate_request, assemble_request):
        with pytest.raises(HermesError, match=rf"^{field} "):
            request(None, **{field: value})


@pytest.mark.parametrize("messages", [5, b"hi", {"role": "user", "content": "hi"}])
def test_what_is_no_list_of_messages_is_refused(messages):
    with pytest.raises(HermesError, match="give a text or a list of messages"):
        generate_request(messages)


@pytest.mark.parametrize(
    "message",
    ["\udcff", Message("user", "\udcff"), Message("user", 5), {"role": 3}, {"role": "user", "tool_calls": [3]}],
)
def test_a_message_that_cannot_travel_is_told_by_its_place(message):
    with pytest.raises(HermesError, match="Message 0 ") as caught:
        generate_request(message if isinstance(message, str) else [message])
    assert caught.value.reason == "BAD_MESSAGE"
