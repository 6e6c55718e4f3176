"""Every style of model gets the text and the ids that transformers gives it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from assembler import messages, pipeline
from assembler.pipeline import ModelFiles
from assembler.rendering import Renderer
from assembler.order import OrderPolicy
from assembler.templates import render_options
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import HermesError
from tests.unit.assembler.model_styles import STYLES, Style

UNHURRIED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Served:
    """A style as Hermes and as transformers have it."""

    style: Style
    files: ModelFiles
    renderer: Renderer
    reference: Any

    def ids_and_text(self, chat: assembler_pb2.Chat) -> tuple[list[int], str]:
        options = render_options(
            add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
            continue_final_message=chat.continue_final_message,
            kwargs_json=chat.template_kwargs_json,
        )
        reading = self.renderer.render(messages.canonical(chat, "error"), options).reading
        if reading.live is None:
            return list(self.files.tokenizer.encode(reading.text)), reading.text
        return list(self.files.tokenizer.encode_guarded(reading.text, reading.live)), reading.text


@pytest.fixture(scope="session", params=STYLES, ids=lambda style: style.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = request.param.write(tmp_path_factory.mktemp(request.param.name))
    return serve(request.param, directory)


def serve(style: Style, directory: Path) -> Served:
    files = pipeline.load(directory)
    assert files.template is not None
    renderer = Renderer(files.template, files.tokenizer, OrderPolicy(merge_system=False, merge_same_role=False), "encode")
    return Served(style, files, renderer, AutoTokenizer.from_pretrained(directory))


TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="<|>[]/ \n\u2581\uff5ci\u0301e\u0301", max_size=8),
    st.sampled_from(
        ["", " ", "  padded \n", "\n\n", "a <b> c", "x < y", "[1, 2]", "</div>", "<", "\u2800 \\u2800", "你好 🎉 \U0010ffff"]
    ),
    st.text(max_size=3).map(lambda text: text * 200),
)
NAMES = st.from_regex(r"[a-z_][a-z0-9_.-]{0,8}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
SCHEMAS = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer"]), "description": TEXTS}),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=2), "required": st.just([])}
    )
    | st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
    max_leaves=3,
)
TOOLS = st.fixed_dictionaries(
    {
        "name": NAMES,
        "description": TEXTS,
        "parameters": st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, SCHEMAS, max_size=2)}
        ),
    }
)


@st.composite
def conversations(draw: st.DrawFn, style: Style) -> dict[str, Any]:
    """Messages as transformers takes them, and tools, of the kinds that the style knows."""
    told: list[dict[str, Any]] = []
    if style.system and draw(st.booleans()):
        told.append({"role": "system", "content": draw(TEXTS)})
    for place in range(draw(st.integers(1, 3))):
        told.append({"role": "user", "content": draw(TEXTS)})
        if style.calls and draw(st.booleans()):
            told += draw(called(style, place))
        last = {"role": "assistant", "content": draw(TEXTS)}
        if style.reasoning and draw(st.booleans()):
            last["reasoning"] = draw(TEXTS)
        told.append(last)
    if draw(st.booleans()):
        told.append({"role": "user", "content": draw(TEXTS)})
    tools = draw(st.lists(TOOLS, max_size=2)) if style.tools else []
    return {"messages": told, "tools": tools}


@st.composite
def called(draw: st.DrawFn, style: Style, place: int) -> list[dict[str, Any]]:
    ids = [f"call{place:04}{number}" for number in range(1 if style.one_call else draw(st.integers(1, 2)))]
    calls = [
        {"type": "function", "id": each, "function": {"name": draw(NAMES), "arguments": draw(st.dictionaries(NAMES, VALUES, max_size=2))}}
        for each in ids
    ]
    told: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": calls}]
    if style.results:
        told += [{"role": "tool", "content": draw(TEXTS), "tool_call_id": each} for each in ids]
    return told


def as_chat(told: dict[str, Any], **fields: Any) -> assembler_pb2.Chat:
    return assembler_pb2.Chat(
        messages=[
            types_pb2.Message(
                role=each["role"],
                content=each["content"],
                reasoning=each.get("reasoning"),
                name=each.get("name"),
                tool_call_id=each.get("tool_call_id"),
                tool_calls=[
                    types_pb2.ToolCall(
                        id=call["id"],
                        name=call["function"]["name"],
                        arguments_json=json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    )
                    for call in each.get("tool_calls", ())
                ],
            )
            for each in told["messages"]
        ],
        tools=[types_pb2.Tool(function_json=json.dumps(tool, ensure_ascii=False)) for tool in told["tools"]],
        **fields,
    )


def as_reference(served: Served, told: dict[str, Any], **fields: Any) -> tuple[list[int], str]:
    """What transformers makes of it."""
    told = json.loads(json.dumps(told))
    for each in told["messages"]:
        for call in each.get("tool_calls", ()):
            if served.style.arguments_are_text:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    tools = [{"type": "function", "function": tool} for tool in told["tools"]] or None
    fields = {"add_generation_prompt": True} | fields
    ids = served.reference.apply_chat_template(told["messages"], tools=tools, **fields)["input_ids"]
    return ids, served.reference.apply_chat_template(told["messages"], tools=tools, tokenize=False, **fields)


@UNHURRIED
@given(data=st.data())
def test_text_and_ids_are_those_of_transformers(served: Served, data: st.DataObject) -> None:
    told = data.draw(conversations(served.style))
    assume(not any(token in json.dumps(told, ensure_ascii=False) for token in served.files.tokenizer.added.control if len(token) > 3))
    assert served.ids_and_text(as_chat(told)) == as_reference(served, told)


@UNHURRIED
@given(data=st.data())
def test_a_closed_or_a_continued_answer_is_that_of_transformers(served: Served, data: st.DataObject) -> None:
    told = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": data.draw(TEXTS)}], "tools": []}
    closed = as_reference(served, told, add_generation_prompt=False)
    assert served.ids_and_text(as_chat(told, add_generation_prompt=False)) == closed
    try:
        opened = as_reference(served, told, add_generation_prompt=False, continue_final_message=True)
    except ValueError:  # the template does not write the last message
        with pytest.raises(HermesError):
            served.ids_and_text(as_chat(told, continue_final_message=True))
    else:
        assert served.ids_and_text(as_chat(told, continue_final_message=True)) == opened
