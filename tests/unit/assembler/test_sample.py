"""One sample from tokens to text, reasoning and calls, with the marks that real tokenizers have as tokens."""

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from assembler import model_files
from assembler.answer_format import AnswerFormat, AnswerFormats
from assembler.detokenizer import StopRule
from assembler.model_files import ModelFiles
from assembler.sample import Sample
from hermes.v1 import assembler_pb2, types_pb2
from tests.unit.assembler.model_styles import CHATML_TOKENS, STYLES
from tests.unit.assembler.served import Served, as_chat, serve
from tests.unit.assembler.test_model_styles import NAMES, TEXTS, VALUES

PLAIN = StopRule()
NAMED = {style.name: style for style in STYLES}
TOOL = types_pb2.Tool(function_json='{"name": "f"}')
CHAT = assembler_pb2.Prompt(
    chat=assembler_pb2.Chat(messages=[types_pb2.Message(role="user", content="q")], tools=[TOOL])
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é😀"}}\n</tool_call>'
ARGUMENTS = '{"a": "é😀"}'


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(directories: Path, name: str) -> ModelFiles:
    directory = directories / name
    if not directory.exists():
        directory.mkdir()
        NAMED[name].write(directory)
    return model_files.load(directory)


@pytest.fixture(scope="module")
def qwen(directories: Path) -> ModelFiles:
    return model(directories, "qwen3")


@pytest.fixture(scope="module")
def mistral(directories: Path) -> ModelFiles:
    return model(directories, "mistral")


def form(files: ModelFiles, end: str = "") -> AnswerFormat:
    return AnswerFormats(files).of(CHAT, files.tokenizer.encode(end))


class Told:
    """What the caller gets of one sample."""

    def __init__(self, files: ModelFiles, ids: list[int], rule: StopRule = PLAIN, end: str = "", step: int = 1) -> None:
        sample = Sample(files.tokenizer, files.tokenizer.encode("q"), rule, form(files, end))
        pieces = [sample.push(ids[at : at + step]) for at in range(0, len(ids), step)]
        self.pieces = [*pieces, sample.finish()]
        self.text = "".join(piece.text for piece in self.pieces)
        self.reasoning = "".join(piece.reasoning for piece in self.pieces)
        self.calls = [(call.name, call.text) for call in sample.calls]
        self.tokens, self.stop = sample.tokens, sample.stop


def written(files: ModelFiles, text: str) -> list[int]:
    """The ids that the model writes: every mark in the text is a token."""
    return list(files.tokenizer.encode(text))


def spelled(files: ModelFiles, text: str) -> list[int]:
    """Ids for the same text in which no mark is a token."""
    return list(files.tokenizer.encode_guarded(text, ()))


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_reasoning_text_and_calls_are_told_apart(qwen: ModelFiles, step: int) -> None:
    ids = written(qwen, f"<think>\nHm, é.\n</think>\n\nLet me see.\n{CALL}<|im_end|>")
    told = Told(qwen, ids, step=step)
    assert (told.reasoning, told.text, told.calls) == ("Hm, é.", "Let me see.", [("f", ARGUMENTS)])
    assert sum(piece.tokens for piece in told.pieces) == told.tokens == len(ids)


def test_reasoning_that_the_prompt_opened_needs_no_first_mark(qwen: ModelFiles) -> None:
    told = Told(qwen, written(qwen, "Hm.\n</think>\n\nParis"), end="<|im_start|>assistant\n<think>\n")
    assert (told.reasoning, told.text) == ("Hm.", "Paris")


def test_a_call_that_is_tried_out_in_reasoning_is_none(qwen: ModelFiles) -> None:
    told = Told(qwen, written(qwen, f"<think>\nShall I {CALL}?\n</think>\n\nNo."))
    assert (told.reasoning, told.text, told.calls) == (f"Shall I {CALL}?", "No.", [])


def test_a_mark_that_is_a_token_counts_only_as_that_token(qwen: ModelFiles, mistral: ModelFiles) -> None:
    for files, answer in (
        (qwen, f"<think>a</think>{CALL}"),
        (mistral, f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}]'),
    ):
        assert Told(files, written(files, answer)).calls == [("f", ARGUMENTS)]
        told = Told(files, spelled(files, answer))
        assert (told.text.lstrip(), told.reasoning, told.calls) == (answer, "", [])


def test_a_hidden_token_that_opens_a_call_is_seen_and_no_text(mistral: ModelFiles) -> None:
    answer = f'So: [TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]</s>'
    told = Told(mistral, written(mistral, answer))
    assert (told.text.strip(), told.calls) == ("So:", [("f", ARGUMENTS)])


def test_a_broken_call_comes_back_with_its_hidden_token_written_out(mistral: ModelFiles) -> None:
    told = Told(mistral, written(mistral, '[TOOL_CALLS] [{"name": "f"</s>'))
    assert (" ".join(told.text.split()), told.calls) == ('[TOOL_CALLS] [{"name": "f"', [])


def test_marks_inside_arguments_are_their_letters(qwen: ModelFiles, mistral: ModelFiles) -> None:
    for files, answer, mark in (
        (qwen, "<tool_call>{}</tool_call>", "</tool_call>"),
        (mistral, "[TOOL_CALLS]{}", "[TOOL_CALLS]"),
    ):
        ids = written(files, answer.replace("{}", f'{{"name": "f", "arguments": {{"a": "{mark}"}}}}'))
        ((_, arguments),) = Told(files, ids).calls
        assert json.loads(arguments)["a"].strip() == mark


def test_marks_that_stand_alone_are_text_as_without_recognition(qwen: ModelFiles, mistral: ModelFiles) -> None:
    for files, answer in ((qwen, "a </think> b </tool_call> c"), (mistral, "a [/INST] b")):
        ids = written(files, answer)
        plain = Sample(files.tokenizer, files.tokenizer.encode("q"), StopRule())
        assert Told(files, ids).text == plain.push(ids).text + plain.finish().text


def test_a_mark_ends_a_character_that_was_open(qwen: ModelFiles) -> None:
    half = written(qwen, "é")[:1]
    told = Told(qwen, [*written(qwen, "<think>"), *half, *written(qwen, "</think>b")])
    assert (told.reasoning, told.text) == ("\ufffd", "b")


def test_stop_strings_count_in_text_alone(qwen: ModelFiles) -> None:
    answer = f"<think>STOP é</think>a{CALL}b STOP c"
    told = Told(qwen, written(qwen, answer), StopRule(stops=("STOP", "é", "name")))
    assert (told.reasoning, told.text, told.calls, told.stop) == ("STOP é", "ab ", [("f", ARGUMENTS)], "STOP")
    assert told.tokens < len(written(qwen, answer))


def test_a_stop_string_in_what_was_no_call_ends_the_sample_there(qwen: ModelFiles) -> None:
    told = Told(qwen, written(qwen, f'a <tool_call>{{"x STOP": ]</tool_call> {CALL}'), StopRule(stops=("STOP",)))
    assert (told.text, told.calls, told.stop) == ('a <tool_call>{"x ', [], "STOP")
    unfinished = Told(qwen, written(qwen, 'a <tool_call>{"x STOP'), StopRule(stops=("STOP",)))
    assert (unfinished.text, unfinished.stop) == ('a <tool_call>{"x ', "STOP")


def test_a_stop_string_keeps_later_calls_out_and_earlier_ones_in(qwen: ModelFiles) -> None:
    told = Told(qwen, written(qwen, f"{CALL}b STOP{CALL}"), StopRule(stops=("STOP",)), step=1000)
    assert (told.text, told.calls) == ("b ", [("f", ARGUMENTS)])


def test_a_stop_token_that_is_a_mark_is_no_mark(qwen: ModelFiles) -> None:
    (mark,) = written(qwen, "</tool_call>")
    ids = written(qwen, CALL)
    told = Told(qwen, ids, StopRule(hidden=frozenset([mark])))
    assert (told.text, told.calls) == ("", [("f", ARGUMENTS)])


def test_reasoning_between_special_tokens_is_seen(tmp_path: Path) -> None:
    style = replace(NAMED["qwen3"], special=(*CHATML_TOKENS, "<think>", "</think>"), plain=())
    files = model_files.load(style.write(tmp_path))
    told = Told(files, written(files, "<think>\nHm.\n</think>\n\nParis </think>."))
    assert (told.reasoning, told.text) == ("Hm.", "Paris .")
    told = Told(files, spelled(files, "<think>Hm.</think>"))
    assert (told.reasoning, told.text) == ("", "<think>Hm.</think>")


def metaspace(directory: Path, name: str) -> ModelFiles:
    """The style with a tokenizer whose tokens' texts depend on each other."""
    style = NAMED[name]
    style.write(directory)
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({each: at for at, each in enumerate("▁\ufffd" + string.printable)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(list(style.special))
    made.add_tokens([tokenizers.AddedToken(each, special=False, normalized=False) for each in style.plain])
    made.save(str(directory / "tokenizer.json"))
    return model_files.load(directory)


def test_special_marks_are_seen_where_only_whole_texts_can_be_decoded(tmp_path: Path) -> None:
    files = metaspace(tmp_path, "mistral")
    answer = 'So [TOOL_CALLS] [{"name": "f", "arguments": {"a": "b c"}}]'
    told = Told(files, written(files, answer))
    assert (told.text.strip(), told.calls) == ("So", [("f", '{"a": "b c"}')])
    assert Told(files, written(files, answer[:-1])).text.replace(" ", "") == answer[:-1].replace(" ", "")
    held = Told(files, written(files, f"\ufffd{answer[3:]} c"))  # what ends so may be half a character, until the mark
    assert (held.text.replace(" ", ""), held.calls) == ("\ufffdc", [("f", '{"a": "b c"}')])


def test_other_marks_are_their_letters_where_only_whole_texts_can_be_decoded(tmp_path: Path) -> None:
    files = metaspace(tmp_path, "qwen3")
    answer = '<tool_call>{"name": "f", "arguments": {"a": "b c"}}</tool_call>'
    for ids in (written(files, answer), spelled(files, answer)):
        assert Told(files, ids).calls == [("f", '{"a": "b c"}')]


@pytest.fixture(scope="module", params=["hermes", "qwen3", "llama3_1", "mistral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(NAMED[request.param], NAMED[request.param].write(tmp_path_factory.mktemp(request.param)))


@st.composite
def turns(draw: st.DrawFn, one_call: bool, reasons: bool) -> dict[str, Any]:
    """An assistant's turn with calls, as transformers takes it."""
    arguments = st.dictionaries(NAMES, VALUES, max_size=3)
    calls = [
        {"type": "function", "id": f"call0000{place}", "function": {"name": draw(NAMES), "arguments": draw(arguments)}}
        for place in range(1 if one_call else draw(st.integers(1, 3)))
    ]
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    if reasons:
        turn |= {"content": draw(TEXTS), "reasoning": draw(TEXTS)}
    return turn


@settings(deadline=None, max_examples=60)
@given(data=st.data(), step=st.integers(1, 50))
def test_what_a_template_writes_for_a_turn_is_read_back(served: Served, data: st.DataObject, step: int) -> None:
    turn = data.draw(turns(served.style.one_call, served.style.reasoning))
    assume(not served.style.pieces or "▁" not in str(turn))  # it is how such tokenizers write a space
    called = [call["function"] for call in turn["tool_calls"]]
    asked = {"role": "user", "content": "q"}
    tools = [{"name": call["name"], "parameters": {"type": "object", "properties": {}}} for call in called]
    _, prompt = served.ids_and_text(as_chat({"messages": [asked], "tools": tools}))
    chat = as_chat({"messages": [asked, turn], "tools": tools}, add_generation_prompt=False)
    _, whole = served.ids_and_text(chat)
    assert whole.startswith(prompt)
    files = served.files
    form = AnswerFormats(files).of(assembler_pb2.Prompt(chat=chat), files.tokenizer.encode(prompt))
    sample = Sample(files.tokenizer, files.tokenizer.encode(prompt), PLAIN, form)
    ids = files.tokenizer.encode(whole[len(prompt) :])
    pieces = [*(sample.push(ids[at : at + step]) for at in range(0, len(ids), step)), sample.finish()]
    assert [(each.name, json.loads(each.text)) for each in sample.calls] == [
        (each["name"], each["arguments"]) for each in called
    ]
    assert "".join(piece.text for piece in pieces).strip() == turn["content"].strip()
    assert "".join(piece.reasoning for piece in pieces) == turn.get("reasoning", "").strip("\n")


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f"}',
    "\n",
    " ",
    "a",
    "é😀",
    "STOP",
    "ST",
    "<|im_end|>",
    "{",
]


@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), step=st.integers(2, 9), spell=st.booleans())
def test_pieces_of_tokens_of_any_number_tell_the_same(
    qwen: ModelFiles, pieces: list[str], step: int, spell: bool
) -> None:
    answer = "".join(pieces)
    ids = spelled(qwen, answer) if spell else written(qwen, answer)
    rule = StopRule(stops=("STOP",))
    one, many = Told(qwen, ids, rule), Told(qwen, ids, rule, step=step)
    assert (one.text, one.reasoning, one.calls, one.tokens) == (many.text, many.reasoning, many.calls, many.tokens)
    assert not any(0xD800 <= ord(letter) < 0xE000 for letter in one.text + one.reasoning + str(one.calls))
    assert "STOP" not in one.text
