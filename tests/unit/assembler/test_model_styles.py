"""Every style of model gets the text and the ids that transformers gives it."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shared.errors import HermesError
from tests.unit.assembler.model_styles import STYLES, Style
from tests.unit.assembler.served import Served, as_chat, as_reference, serve

UNHURRIED = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="session", params=STYLES, ids=lambda style: style.name)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = request.param.write(tmp_path_factory.mktemp(request.param.name))
    return serve(request.param, directory)


TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="<|>[]/ \n\u2581\uff5ci\u0301e\u0301", max_size=8),
    st.sampled_from(
        [
            "",
            " ",
            "  padded \n",
            "\n\n",
            "a <b> c",
            "x < y",
            "[1, 2]",
            "</div>",
            "<",
            "\u2800 \\u2800",
            "你好 🎉 \U0010ffff",
        ]
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
    lambda inner: (
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(NAMES, inner, max_size=2),
                "required": st.just([]),
            }
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    ),
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
        {
            "type": "function",
            "id": each,
            "function": {"name": draw(NAMES), "arguments": draw(st.dictionaries(NAMES, VALUES, max_size=2))},
        }
        for each in ids
    ]
    told: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": calls}]
    if style.results:
        told += [{"role": "tool", "content": draw(TEXTS), "tool_call_id": each} for each in ids]
    return told


@UNHURRIED
@given(data=st.data())
def test_text_and_ids_are_those_of_transformers(served: Served, data: st.DataObject) -> None:
    told = data.draw(conversations(served.style))
    assume(
        not any(
            token in json.dumps(told, ensure_ascii=False)
            for token in served.files.tokenizer.added.control
            if len(token) > 3
        )
    )
    assert served.ids_and_text(as_chat(told)) == as_reference(served, told)


@UNHURRIED
@given(data=st.data())
def test_a_closed_or_a_continued_answer_is_that_of_transformers(served: Served, data: st.DataObject) -> None:
    answer = data.draw(TEXTS)
    assume(not any(token in answer for token in served.files.tokenizer.added.control))
    told = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}], "tools": []}
    closed = as_reference(served, told, add_generation_prompt=False)
    assert served.ids_and_text(as_chat(told, add_generation_prompt=False)) == closed
    try:
        opened = as_reference(served, told, add_generation_prompt=False, continue_final_message=True)
    except ValueError:  # the template does not write the last message
        with pytest.raises(HermesError):
            served.ids_and_text(as_chat(told, continue_final_message=True))
    else:
        assert served.ids_and_text(as_chat(told, continue_final_message=True)) == opened
