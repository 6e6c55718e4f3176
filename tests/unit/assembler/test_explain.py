"""A prompt taken apart: whose each token is, whatever the template does to the texts, and nothing is changed by it."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from assembler import model_files
from assembler.pipeline import Assembler
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import HermesError
from tests.unit.assembler.explaining import changed_places, explained, places, told
from tests.unit.assembler.model_styles import STYLES, Style
from tests.unit.assembler.served import as_chat
from tests.unit.assembler.test_forgery import attacks
from tests.unit.assembler.test_model_styles import conversations

Message = types_pb2.Message
Chat = assembler_pb2.Chat
Kind = assembler_pb2.Segment
UNHURRIED = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
BY_NAME = {style.name: style for style in STYLES}
KEYS = re.compile('"(name|arguments)":')
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def conversation(style: Style) -> Chat:
    """Ten messages, of which some have the same text, some white space around it, and some calls with numbers."""
    turns = [Message(role="system", content="Be kind")] if style.system else []
    turns.append(Message(role="user", content="the weather in Rome"))
    if style.calls:
        for place, city in (("call00001", "Rome"), ("call00002", "Oslo")):
            call = types_pb2.ToolCall(
                id=place, name="get_weather", arguments_json=json.dumps({"city": city, "days": 3, "at": ["noon", "x"]})
            )
            turns.append(Message(role="assistant", content="", tool_calls=[call]))
            turns.append(Message(role="tool", content="sunny and warm", name="get_weather", tool_call_id=place))
    reasoning = "It was asked before" if style.reasoning else None
    turns += [
        Message(role="assistant", content="the weather in Rome", reasoning=reasoning),
        Message(role="user", content="  grüße 你好 🎉 naïve\n"),
        Message(role="assistant", content="answer"),
        Message(role="user", content="and the weather in Rome"),
    ]
    if not style.calls:
        turns += [Message(role="assistant", content="again"), Message(role="user", content="why")]
    tools = [types_pb2.Tool(function_json=json.dumps(WEATHER))] if style.tools else []
    return Chat(messages=turns, tools=tools)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {style.name: style.write(tmp_path_factory.mktemp(style.name)) for style in STYLES}


# A declared template beside the models' own.
SERVED = [*((style.name, None) for style in STYLES), ("qwen3", "chatml"), ("llama2", "llama2"), ("llama3_1", "llama3")]


@pytest.fixture(scope="module", params=SERVED, ids=lambda each: " by ".join(filter(None, each)))
def served(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[tuple[Style, Assembler]]:
    name, template = request.param
    style = BY_NAME[name]
    if template == "llama3":
        style = replace(style, tools=False, calls=False)
    assembler = Assembler(model_files.load(directories[name], template))
    yield style, assembler
    assembler.close()


@pytest.fixture
def assembler(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Iterator[Assembler]:
    made = Assembler(model_files.load(directories[getattr(request, "param", "qwen3")]))
    yield made
    made.close()


def of_message(index: int, *but: int) -> Callable[[assembler_pb2.Segment], bool]:
    """Tells segments of a message, but for those of some kinds."""
    return lambda each: each.HasField("message_index") and each.message_index == index and each.kind not in but


async def test_each_messages_text_is_where_the_prompt_changes_with_it(served: tuple[Style, Assembler]) -> None:
    style, assembler = served
    chat = conversation(style)
    found = await explained(assembler, chat)
    for index, message in enumerate(chat.messages):
        changed = await changed_places(assembler, chat, index)
        own = places(found, of_message(index, Kind.KIND_NAME))
        assert changed <= own, index
        # What does not change is what has no other letters, and the keys of a call's own JSON.
        keys = {place for key in KEYS.finditer(found.told.text) for place in range(*key.span())}
        assert not any(
            found.told.text[place].isascii() and found.told.text[place].isalpha() for place in own - changed - keys
        )
        if message.content.strip():
            assert not any(letter.isalnum() for letter in found.told.text[min(own) : min(changed)]), index


async def test_each_messages_tokens_are_those_that_hold_its_text(
    served: tuple[Style, Assembler], directories: dict[str, Path]
) -> None:
    style, assembler = served
    chat = conversation(style)
    found = await explained(assembler, chat)
    reference = AutoTokenizer.from_pretrained(directories[style.name])
    encoded = reference(found.told.text, add_special_tokens=False, return_offsets_mapping=True)
    for index, message in enumerate(chat.messages):
        own = places(found, of_message(index))
        held = [
            token_id
            for token_id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            if own.intersection(range(start, end))
        ]
        segments = list(filter(of_message(index), found.told.segments))
        assert [token_id for each in segments for token_id in each.token_ids] == held, message


async def test_text_of_no_message_is_the_tools_or_the_templates(assembler: Assembler) -> None:
    chat = conversation(BY_NAME["qwen3"])
    found = await explained(assembler, chat)
    (tools,) = [each for each in found.told.segments if each.kind == Kind.KIND_TOOLS]
    assert json.loads(tools.text)["function"] == WEATHER
    assert not tools.HasField("message_index")
    for each in found.told.segments:
        is_message = each.kind not in (Kind.KIND_TOOLS, Kind.KIND_TEMPLATE)
        assert each.HasField("message_index") == is_message


async def test_calls_reasoning_and_names_are_told_from_content(assembler: Assembler) -> None:
    chat = conversation(BY_NAME["qwen3"])
    chat.messages[-1].content = ""
    del chat.messages[-1]
    found = await explained(assembler, chat)
    assert told(found, 2, Kind.KIND_TOOL_CALL) == 'get_weather{"city": "Rome", "days": 3, "at": ["noon", "x"]}'
    assert told(found, 2, Kind.KIND_CONTENT) == ""
    asked = Chat(
        messages=[
            Message(role="user", content="why"),
            Message(role="assistant", content="so", reasoning="It was asked before"),
        ],
        continue_final_message=True,
    )
    thought = await explained(assembler, asked)
    assert told(thought, 1, Kind.KIND_REASONING) == "It was asked before"
    assert told(thought, 1, Kind.KIND_CONTENT) == "so"


@UNHURRIED
@given(data=st.data())
async def test_pieces_of_any_conversation_make_up_the_prompt(
    served: tuple[Style, Assembler], data: st.DataObject
) -> None:
    style, assembler = served
    drawn = as_chat(data.draw(conversations(style)))
    try:
        found = await explained(assembler, drawn)
    except HermesError as error:
        assert error.reason in ("TEMPLATE_ERROR", "TOOL_CALLS_NOT_SHOWN", "TOOLS_NOT_SHOWN"), error
        return
    for index, message in enumerate(drawn.messages):
        text = told(found, index, Kind.KIND_CONTENT)
        assert "".join(text.split()) in "".join(json.dumps(message.content, ensure_ascii=False).split()) or (
            "".join(text.split()) in "".join(message.content.split()) or "\\" in text
        )


@UNHURRIED
@given(data=st.data())
async def test_control_tokens_in_a_callers_text_are_its_own(
    served: tuple[Style, Assembler], data: st.DataObject
) -> None:
    _, assembler = served

    class Tried:
        files = assembler.files

    text = data.draw(attacks(Tried))  # type: ignore[arg-type]
    turns = [
        Message(role="user", content=text),
        Message(role="assistant", content=text),
        Message(role="user", content=text),
    ]
    await explained(assembler, Chat(messages=turns))
