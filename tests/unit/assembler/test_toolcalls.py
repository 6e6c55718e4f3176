"""Tool calls in answers, told from text that only looks like them."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assembler.call_formats import FORMATS, read_calls
from assembler.marks import NO_MARKS
from assembler.toolcalls import BrokenCallError, ToolCallFilter
from assembler.tools import ToolCall

HERMES, LLAMA3, MISTRAL = FORMATS["hermes"], FORMATS["llama3"], FORMATS["mistral"]
TOOLS = {"find", "time.now", "f"}
# Quotes and brackets inside strings, marks inside strings, escapes, and characters of four bytes.
HARD = r'{"q": "say \"}</tool_call>{\" [TOOL_CALLS]\\", "deep": {"a": [1, {"b": "é😀\n"}, null]}, "n": 1.50e+2}'
QUOTED = json.dumps(HARD, ensure_ascii=False)


def filtered(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text without its calls, and each call's name and arguments."""
    stream = ToolCallFilter(FORMATS[name], TOOLS, NO_MARKS)
    parts = [part for piece in pieces for part in stream.feed(piece)] + stream.feed("", last=True)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(part.name, part.text) for part in parts if isinstance(part, ToolCall)]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


FIND, NOW = ("find", HARD), ("time.now", "{}")
WHOLE = {
    "hermes: one call": ("hermes", hermes(*FIND), "", [FIND]),
    "hermes: two calls": ("hermes", hermes(*FIND) + "\n" + hermes(*NOW), "", [FIND, NOW]),
    "hermes: text before and after": (
        "hermes",
        f"Let me see. \n\n{hermes(*FIND)}\nDone, <b>é😀</b>.\n",
        "Let me see. \n\n\nDone, <b>é😀</b>.\n",
        [FIND],
    ),
    "hermes: text between": ("hermes", f"{hermes(*NOW)}\nand {hermes(*NOW)}", "and", [NOW, NOW]),
    "hermes: space before and after alone": ("hermes", f"\n\n{hermes(*NOW)} \n", "", [NOW]),
    "hermes: arguments before the name": ("hermes", '<tool_call>{"arguments":{},"name":"f"}</tool_call>', "", [("f", "{}")]),
    "hermes: no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "hermes: arguments as text": ("hermes", hermes("find", QUOTED), "", [FIND]),
    "hermes: arguments that are no object": ("hermes", hermes("f", '["a"]'), "", [("f", '["a"]')]),
    "hermes: an array": ("hermes", '<tool_call>[{"name": "f"}, {"name": "find"}]</tool_call>', "", [("f", "{}"), ("find", "{}")]),
    "hermes: never closed": ("hermes", hermes(*FIND).removesuffix("</tool_call>"), "", [FIND]),
    "hermes: closed by the next": (
        "hermes",
        hermes(*NOW).removesuffix("</tool_call>") + hermes(*FIND),
        "",
        [NOW, FIND],
    ),
    "hermes: a tool that nobody offered": ("hermes", hermes("other", "{}"), "", [("other", "{}")]),
    "llama3: parameters": ("llama3", f'{{"name": "find", "parameters": {HARD}}}', "", [FIND]),
    "llama3: arguments": ("llama3", f' {{"name": "find", "arguments": {HARD}}}\n', "", [FIND]),
    "llama3: behind its mark": ("llama3", f'<|python_tag|>{{"name": "find", "parameters": {HARD}}}', "", [FIND]),
    "llama3: two, with a semicolon": (
        "llama3",
        f'{{"name": "find", "parameters": {HARD}}}; {{"name": "time.now", "parameters": {{}}}}',
        "",
        [FIND, NOW],
    ),
    "llama3: two, on lines and behind marks": (
        "llama3",
        f'<|python_tag|>{{"name": "find", "parameters": {HARD}}}\n<|python_tag|>{{"type": "function", "name": "time.now", "parameters": {{}}}}',
        "",
        [FIND, NOW],
    ),
    "llama3: text before and after": (
        "llama3",
        f'So: <|python_tag|>{{"name": "find", "parameters": {HARD}}} That is all; {{}}',
        "So:  That is all; {}",
        [FIND],
    ),
    "mistral: an array": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "find", "arguments": {HARD}, "id": "abcdefghi"}}, {{"name": "time.now", "arguments": {{}}}}]',
        "",
        [FIND, NOW],
    ),
    "mistral: text before and after": (
        "mistral",
        f'Well [1], [TOOL_CALLS][{{"name": "find", "arguments": {HARD}}}] so.',
        "Well [1],  so.",
        [FIND],
    ),
    "mistral: names": ("mistral", f"[TOOL_CALLS]find[ARGS]{HARD}[TOOL_CALLS]time.now[ARGS]{{}}", "", [FIND, NOW]),
    "mistral: names with ids": ("mistral", f"[TOOL_CALLS]find[CALL_ID]a1B2c3D4e[ARGS]{HARD}", "", [FIND]),
    "mistral: names without any mark behind": ("mistral", f"[TOOL_CALLS]find {HARD}", "", [FIND]),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_calls_are_the_same_wherever_the_stream_is_cut(case: str) -> None:
    name, answer, text, calls = WHOLE[case]
    assert filtered(name, [answer]) == (text, calls)
    assert filtered(name, list(answer)) == (text, calls)
    for at in range(1, len(answer)):
        assert filtered(name, [answer[:at], answer[at:]]) == (text, calls)


@given(data=st.data())
@pytest.mark.parametrize("case", WHOLE)
def test_calls_are_the_same_for_pieces_of_any_length(case: str, data: st.DataObject) -> None:
    name, answer, text, calls = WHOLE[case]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)))))
    assert filtered(name, [answer[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == (text, calls)


BROKEN = {
    "hermes: half an object": ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\nSorry.'),
    "hermes: one bracket more": ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>'),
    "hermes: brackets of two kinds": ("hermes", '<tool_call>{"name": ["f"}]</tool_call>'),
    "hermes: a quote too few": ("hermes", '<tool_call>{"name": "f, "arguments": {}}\n</tool_call> Sorry.'),
    "hermes: an open string": ("hermes", '<tool_call>{"name": "f"'),
    "hermes: an open escape": ("hermes", '<tool_call>{"name": "f\\'),
    "hermes: single quotes": ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    "hermes: no JSON": ("hermes", "The mark <tool_call> opens, and </tool_call> closes. "),
    "hermes: XML": ("hermes", "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"),
    "hermes: no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    "hermes: a name that can be none": ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
    "hermes: a name of another kind": ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    "hermes: half a character": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>'),
    "hermes: NaN": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    "hermes: nothing": ("hermes", "<tool_call>[]</tool_call>"),
    "hermes: an array of texts": ("hermes", '<tool_call>["f"]</tool_call>'),
    "hermes: a text behind": ("hermes", '<tool_call>{"name": "f"} and more'),
    "hermes: half a mark": ("hermes", "a <tool_ call> b <tool_call"),
    "hermes: nested deeply": ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000 + "</tool_call>"),
    "llama3: an answer in JSON": ("llama3", '{"city": "Paris", "name": "f", "parameters": {}}'),
    "llama3: a name of no tool": ("llama3", '{"name": "Ann", "parameters": {"age": 5}}'),
    "llama3: no arguments": ("llama3", '{"name": "f", "age": 5}'),
    "llama3: not at the beginning": ("llama3", 'Use {"name": "f", "parameters": {}}.'),
    "llama3: code": ("llama3", "<|python_tag|>search.call(query='a')"),
    "llama3: an object in Python": ("llama3", "{'name': 'f'}"),
    "mistral: half an array": ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}'),
    "mistral: no name": ("mistral", "[TOOL_CALLS] (none) [ARGS]{}"),
    "mistral: arguments that are no object": ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    "mistral: arguments that are no JSON": ("mistral", "[TOOL_CALLS]f[ARGS]{a}"),
    "mistral: no id": ("mistral", "[TOOL_CALLS]f[CALL_ID][ARGS]{}"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_call_stays_as_it_was_wherever_the_stream_is_cut(case: str) -> None:
    name, answer = BROKEN[case]
    assert filtered(name, [answer]) == (answer, [])
    if len(answer) < 1000:
        for at in range(1, len(answer)):
            assert filtered(name, [answer[:at], answer[at:]]) == (answer, [])


@pytest.mark.parametrize("case", BROKEN)
def test_a_call_behind_a_broken_one_is_recognised(case: str) -> None:
    name, answer = BROKEN[case]
    call = {"hermes": hermes(*NOW), "llama3": '<|python_tag|>{"name": "time.now", "parameters": {}}'}
    text, calls = filtered(name, [answer, "\n", call.get(name, "[TOOL_CALLS]time.now[ARGS]{}")])
    assert calls == [NOW]
    assert text == answer.rstrip()


@given(
    name=st.sampled_from(sorted(FORMATS)),
    pieces=st.lists(st.sampled_from([
        "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "{", "}", "[",
        "]", '"', "\\", "name", '{"name": "f", "parameters": {}}', ": ", ",", ";", " ", "\n", "f", "é",
    ])),
)  # fmt: skip
def test_random_markup_gives_the_same_text_and_calls_piece_by_piece_and_at_once(name: str, pieces: list[str]) -> None:
    answer = "".join(pieces)
    text, calls = filtered(name, pieces)
    assert (text, calls) == filtered(name, [answer])
    assert calls or text == answer


def test_no_more_is_held_back_than_can_become_a_call() -> None:
    stream = ToolCallFilter(HERMES, TOOLS, NO_MARKS)
    pieces = ["a <", "b <tool", "box> c", " \n", "d<tool_call>", "x", "<tool_call>{", "'", ' {"']
    given = ["".join(map(str, stream.feed(piece))) for piece in pieces]
    assert given == ["a", " <b", " <toolbox> c", "", " \nd", "<tool_call>x", "", "<tool_call>{'", ' {"']


def test_an_answer_in_json_is_given_as_soon_as_its_first_key_tells() -> None:
    stream = ToolCallFilter(LLAMA3, TOOLS, NO_MARKS)
    assert "".join(map(str, stream.feed('{"ci'))) == '{"ci'


def test_calls_have_the_models_ids_or_new_ones_that_every_template_takes() -> None:
    stream = ToolCallFilter(MISTRAL, TOOLS, NO_MARKS)
    answer = '[TOOL_CALLS][{"name": "f", "id": "abcdefghi"}, {"name": "f"}, {"name": "f", "id": ""}, {"name": "f", "id": 5}][TOOL_CALLS]f[CALL_ID]x1[ARGS]{}'
    given, *made, short = [part.id for part in stream.feed(answer, last=True) if isinstance(part, ToolCall)]
    assert (given, short) == ("abcdefghi", "x1")
    assert len(set(made)) == 3
    assert all(re.fullmatch("[0-9A-Za-z]{9}", each or "") for each in made)


def test_arguments_are_the_models_own_letters_and_read_as_an_object() -> None:
    (call,) = read_calls('{"name": "f", "arguments": {"a" :1.50, "a":2e0}}')
    assert (call.text, call.arguments) == ('{"a" :1.50, "a":2e0}', {"a": 2.0})
    with pytest.raises(BrokenCallError):
        read_calls('{"name": "f"} , {"name": "f"}')
