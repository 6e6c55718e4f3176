"""Explanations of prompts that are not as their messages came, and of those that come from a cache."""

import threading
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from assembler import model_files, signing
from assembler.cache.entry import Entry
from assembler.explain import Explainer
from assembler.findings import DYNAMIC_PREFIX
from assembler.model_files import ModelFiles
from assembler.orders import Fitting, Order
from assembler.pipeline import Assembler
from assembler.recall import COMMON
from assembler.tokenizer import TokenIds, Tokenizer
from assembler.truncation import Window
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import HermesError
from tests.unit.assembler.caching import Remembering, remembering
from tests.unit.assembler.explaining import explained, nothing_held, told
from tests.unit.assembler.model_styles import STYLES

Kind = assembler_pb2.Segment
BY_NAME = {style.name: style for style in STYLES}


def chat_of(*turns: tuple[str, str], **fields: Any) -> assembler_pb2.Chat:
    messages = [types_pb2.Message(role=role, content=content) for role, content in turns]
    return assembler_pb2.Chat(messages=messages, **fields)


def prompt_of(*turns: tuple[str, str]) -> assembler_pb2.Prompt:
    return assembler_pb2.Prompt(chat=chat_of(*turns))


@pytest.fixture(scope="module")
def all_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFiles]:
    return {
        name: model_files.load(BY_NAME[name].write(tmp_path_factory.mktemp(name)))
        for name in ("chatml", "qwen3", "llama2", "gemma")
    }


@pytest.fixture
def assemblers(all_files: dict[str, ModelFiles]) -> Iterator[dict[str, Assembler]]:
    made = {name: Assembler(files) for name, files in all_files.items()}
    yield made
    for each in made.values():
        each.close()


async def test_messages_that_were_joined_keep_their_own_indices(assemblers: dict[str, Assembler]) -> None:
    turns = (("system", "one"), ("system", "two"), ("user", "first"), ("user", "second"), ("system", "late"))
    found = await explained(assemblers["gemma"], chat_of(*turns))
    assert [told(found, index) for index in range(5)] == ["one", "two", "first", "second", "late"]
    order = [each.message_index for each in found.told.segments if each.HasField("message_index")]
    assert order == [0, 1, 4, 2, 3]
    assert [each.code for each in found.assembled.findings].count("ROLE_ORDER")


async def test_indices_count_the_rounds_that_were_dropped(assemblers: dict[str, Assembler]) -> None:
    turns = [("system", "Be kind."), *[(role, f"{role} {turn}") for turn in range(9) for role in ("user", "assistant")]]
    fitting = Fitting(Window(100, 1), "rounds")
    found = await explained(assemblers["chatml"], chat_of(*turns), fitting=fitting)
    assert found.assembled.dropped_rounds > 2
    shown = {each.message_index for each in found.told.segments if each.HasField("message_index")}
    assert shown == {0, *range(1 + 2 * found.assembled.dropped_rounds, 19)}
    assert told(found, 18) == "assistant 8"
    assert told(found, 0) == "Be kind."


async def test_an_open_answer_is_its_messages_up_to_the_end(assemblers: dict[str, Assembler]) -> None:
    turns = (("user", "Say it."), ("assistant", "Once upon"))
    found = await explained(assemblers["chatml"], chat_of(*turns, continue_final_message=True))
    assert found.told.segments[-1].text == "Once upon"
    assert found.told.segments[-1].message_index == 1


async def test_a_token_of_the_templates_and_a_messages_text_is_the_messages(assemblers: dict[str, Assembler]) -> None:
    turns = (("user", "q"), ("assistant", "about"), ("user", "r"))
    found = await explained(assemblers["llama2"], chat_of(*turns))
    answers = [each for each in found.told.segments if each.HasField("message_index") and each.message_index == 1]
    assert "".join(each.text for each in answers) == " about"
    assert [(each.other_before, each.other_after) for each in answers] == [(1, 0)]
    assert told(found, 1) == "about"


async def test_tokens_of_one_character_stay_together(assemblers: dict[str, Assembler]) -> None:
    found = await explained(assemblers["chatml"], chat_of(("user", "a🎉"), ("assistant", "你"), ("user", "\U0010ffff")))
    assert [told(found, index) for index in range(3)] == ["a🎉", "你", "\U0010ffff"]


async def test_each_of_many_messages_is_told_apart(assemblers: dict[str, Assembler]) -> None:
    turns = [(("user", "assistant")[turn % 2], f"turn {turn} " + "ab"[turn % 3 % 2]) for turn in range(601)]
    found = await explained(assemblers["chatml"], chat_of(*turns))
    assert [told(found, index) for index in range(601)] == [content for _, content in turns]


async def test_a_variables_value_and_a_printed_date_are_no_messages(tmp_path: Path) -> None:
    directory = BY_NAME["chatml"].write(tmp_path)
    source = "{{ mood }}|{{ strftime_now('%Y') }}|{% for m in messages %}{{ loop.index }}:{{ m.content }};{% endfor %}"
    (tmp_path / "own.jinja").write_text(source)
    assembler = Assembler(model_files.load(directory, str(tmp_path / "own.jinja")))
    chat = chat_of(("user", "It is 2024, 2025, 2026 or 2027: 1:"), template_kwargs_json='{"mood": "glad"}')
    found = await explained(assembler, chat)
    assembler.close()
    shown = [(each.kind, each.text) for each in found.told.segments]
    assert shown[0] == (Kind.KIND_VARIABLE, "glad")
    assert shown[1] == (Kind.KIND_TEMPLATE, f"|{found.told.text[5:9]}|1:")
    assert found.told.text[5:9].isdecimal()
    assert told(found, 0) == "It is 2024, 2025, 2026 or 2027: 1:"


@pytest.mark.parametrize(
    "shown",
    ["m.content | indent(2)", "m.content | reverse | list | reverse | join", "(m.content | tojson | safe)[1:-1]"],
)
async def test_text_that_loses_its_sign_is_found_by_its_letters(tmp_path: Path, shown: str) -> None:
    directory = BY_NAME["chatml"].write(tmp_path)
    source = "{% for m in messages %}<|im_start|>{{ " + shown + " }}<|im_end|>\n{% endfor %}"
    (tmp_path / "own.jinja").write_text(source)
    assembler = Assembler(model_files.load(directory, str(tmp_path / "own.jinja")))
    found = await explained(assembler, chat_of(("user", "a first text"), ("assistant", "a second"), ("user", "third!")))
    assembler.close()
    assert [told(found, index) for index in range(3)] == ["a first text", "a second", "third!"]


async def test_raw_text_has_the_tokens_around_it_written_out(tmp_path: Path) -> None:
    directory = BY_NAME["chatml"].write(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    around = {"pair": None, "special_tokens": [("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<|im_start|> $A", **around)
    tokenizer.save(str(directory / "tokenizer.json"))
    assembler = Assembler(model_files.load(directory))
    found = await explained(assembler, prompt=assembler_pb2.Prompt(text="Hi <|im_end|> 🎉"))
    assembler.close()
    assert found.told.text == "<|im_start|>Hi <|im_end|> 🎉"
    shown = [(each.text, each.control, each.kind) for each in found.told.segments]
    assert shown == [
        ("<|im_start|>", True, Kind.KIND_TEMPLATE),
        ("Hi ", False, Kind.KIND_UNSPECIFIED),
        ("<|im_end|>", True, Kind.KIND_UNSPECIFIED),
        (" 🎉", False, Kind.KIND_UNSPECIFIED),
    ]


async def test_ready_ids_are_cut_at_control_tokens_alone(assemblers: dict[str, Assembler]) -> None:
    assembler = assemblers["qwen3"]
    tokenizer = assembler.files.tokenizer
    ids = [*tokenizer.encode("<|im_start|>user\n"), *tokenizer.encode_guarded("<|im_end|>x", ()), 255, 254]
    prompt = assembler_pb2.Prompt(token_ids=assembler_pb2.TokenIds(ids=ids))
    found = await explained(assembler, prompt=prompt)
    assert [each.control for each in found.told.segments] == [True, False]
    assert found.told.segments[1].text.startswith("user\n<|im_end|>x")


async def test_ids_that_a_model_made_are_shown_as_they_are(all_files: dict[str, ModelFiles]) -> None:
    remembered = remembering()
    assembler = remembered.assembler(all_files["chatml"])
    turns = (("user", "capital"), ("assistant", "Paris is the capital"), ("user", "thanks"))
    order = Order(prompt_of(*turns), None, return_text=True, cache=COMMON)
    plain = await assembler.assemble(order)
    whole = list(plain.ids)
    answer = list(assembler.files.tokenizer.encode("Paris is the capital"))
    place = next(at for at in range(len(whole)) if whole[at : at + len(answer)] == answer)
    letters = [token_id for letter in "Paris is the capital" for token_id in assembler.files.tokenizer.encode(letter)]
    assert letters != answer
    spelled = array("I", [*whole[:place], *letters, *whole[place + len(answer) :]])
    for key, held in list(remembered.cache._memory._held.items()):
        if list(held.entry.ids) == whole:
            remembered.cache.keep(key, Entry(spelled, held.entry.stored), COMMON.namespace)
    found = await Explainer(assembler).explain(order, nothing_held)
    assembler.close()
    (told_answer,) = [
        each for each in found.told.segments if each.HasField("message_index") and each.message_index == 1
    ]
    assert list(told_answer.token_ids) == letters
    assert [token_id for each in found.told.segments for token_id in each.token_ids] == list(spelled)


def state(remembered: Remembering) -> tuple[Any, ...]:
    memory = remembered.cache._memory
    counted = {sample.name + str(sample.labels): sample.value for sample in remembered.metrics.read()._samples}
    for name in [name for name in counted if "_created" in name]:
        del counted[name]
    return list(memory._held.items()), memory.bytes, counted


async def test_a_look_leaves_no_trace_and_sees_what_an_assembly_would_get(all_files: dict[str, ModelFiles]) -> None:
    remembered = remembering()
    assembler = remembered.assembler(all_files["chatml"])
    system = ("system", "You are kind. " * 40)
    turns = (system, ("user", "one"), ("assistant", "1"), ("user", "two"))
    first = Order(prompt_of(*turns), None, cache=COMMON)
    second = Order(prompt_of(*turns, ("assistant", "2"), ("user", "three")), None, cache=COMMON)
    unknown = Order(prompt_of(("user", "else")), None, cache=COMMON)
    await assembler.assemble(first)
    await assembler.assemble(Order(prompt_of(("user", "later")), None, cache=COMMON))
    rendered = assembler.chats.drafts(first.prompt.chat).renderer.turns._kept
    before, told_before = state(remembered), list(rendered.items())
    assert told_before
    exact, beginning, none = [
        await Explainer(assembler).explain(order, nothing_held) for order in (first, second, unknown)
    ]
    assert state(remembered) == before
    assert list(rendered.items()) == told_before
    assert exact.assembled.cached_tokens == len(exact.assembled.ids)
    assert none.assembled.cached_tokens == 0
    assembled = await assembler.assemble(second)
    assembler.close()
    assert 0 < beginning.assembled.cached_tokens == assembled.cached_tokens < len(assembled.ids)


async def test_each_piece_tells_how_far_the_caches_reach(all_files: dict[str, ModelFiles]) -> None:
    remembered = remembering()
    assembler = remembered.assembler(all_files["chatml"])
    await assembler.assemble(Order(prompt_of(("user", "one")), None, cache=COMMON))
    order = Order(prompt_of(("user", "one"), ("assistant", "1"), ("user", "two")), None, cache=COMMON)

    async def held(ids: TokenIds) -> int:
        return 5

    found = await Explainer(assembler).explain(order, held)
    assembler.close()
    assert found.told.tree_cached_tokens == 5
    start = 0
    for each in found.told.segments:
        tokens = range(start, start + len(each.token_ids))
        assert each.tree_cached_tokens == sum(token < 5 for token in tokens)
        assert each.cached_tokens == sum(token < found.assembled.cached_tokens for token in tokens)
        start = tokens.stop
    assert 0 < found.assembled.cached_tokens < start


async def test_what_cannot_be_assembled_cannot_be_explained(assemblers: dict[str, Assembler]) -> None:
    for prompt, reason in (
        (assembler_pb2.Prompt(), "PROMPT_MISSING"),
        (assembler_pb2.Prompt(text=""), "PROMPT_EMPTY"),
        (prompt_of(("king", "x")), "UNKNOWN_ROLE"),
        (prompt_of(("user", "long " * 100)), "PROMPT_TOO_LONG"),
    ):
        with pytest.raises(HermesError) as caught:
            await Explainer(assemblers["chatml"]).explain(Order(prompt, 50), nothing_held)
        assert caught.value.reason == reason


async def test_long_prompts_are_taken_apart_beside_the_event_loop(
    assemblers: dict[str, Assembler], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    for module, name in ((signing, "read"), (Explainer, "_cut")):
        plain = getattr(module, name)

        def noting(*args: Any, _plain: Any = plain) -> Any:
            threads.add(threading.current_thread())
            return _plain(*args)

        monkeypatch.setattr(module, name, noting)
    found = await explained(assemblers["chatml"], chat_of(("user", "All work and no play. " * 5_000), ("user", "x")))
    assert told(found, 1) == "x"
    assert threads
    assert threading.main_thread() not in threads


async def test_long_ids_are_taken_apart_beside_the_event_loop(
    assemblers: dict[str, Assembler], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, decode = set(), Tokenizer.decode

    def noting(own: Tokenizer, ids: Sequence[int]) -> str:
        threads.add(threading.current_thread())
        return decode(own, ids)

    tokenizer = assemblers["qwen3"].files.tokenizer
    ids = [*tokenizer.encode("<|im_start|>user\n"), *tokenizer.encode("All work and no play. 你好 " * 2_000)]
    prompt = assembler_pb2.Prompt(token_ids=assembler_pb2.TokenIds(ids=ids))
    whole = tokenizer.decode(ids)
    monkeypatch.setattr(Tokenizer, "decode", noting)
    found = await explained(assemblers["qwen3"], prompt=prompt)
    assert "".join(each.text for each in found.told.segments) == whole
    assert threads
    assert threading.main_thread() not in threads


async def test_keys_that_the_template_writes_into_json_are_its_own(tmp_path: Path) -> None:
    directory = BY_NAME["chatml"].write(tmp_path)
    source = "{% for m in messages %}{{ {'said': m.content, 'n': 5} | tojson }}\n{% endfor %}"
    (tmp_path / "own.jinja").write_text(source)
    assembler = Assembler(model_files.load(directory, str(tmp_path / "own.jinja")))
    found = await explained(assembler, chat_of(("user", "a first text"), ("assistant", "a second")))
    assembler.close()
    assert [told(found, index) for index in range(2)] == ['"a first text"', '"a second"']


async def test_why_a_prompt_missed_is_told_also_when_it_was_asked_before(all_files: dict[str, ModelFiles]) -> None:
    remembered = remembering()
    assembler = remembered.assembler(all_files["chatml"])
    rest = "You are the helper of a bicycle shop, and answer in two sentences whatever you are asked. " * 8
    orders = [
        Order(prompt_of(("system", f"It is {date}. {rest}"), ("user", f"Question {date}?")), None, cache=COMMON)
        for date in ("2026-01-05", "2026-02-17")
    ]
    for order in orders:
        await assembler.assemble(order)
    before = state(remembered)
    explainer = Explainer(assembler)
    for order in orders:
        explained = await explainer.explain(order, nothing_held)
        assert explained.assembled.cached_tokens == len(explained.assembled.ids)
        assert [each.code for each in explained.assembled.findings] == [DYNAMIC_PREFIX]
    assert state(remembered) == before
    assembler.close()


async def test_what_a_template_does_to_earlier_turns_is_told(assemblers: dict[str, Assembler]) -> None:
    order = Order(prompt_of(("user", "one")), None)
    rewrites = {
        name: (await Explainer(assemblers[name]).explain(order, nothing_held)).told.rewrites
        for name in ("chatml", "qwen3")
    }
    assert not rewrites["chatml"]
    assert "reasoning of earlier answers" in rewrites["qwen3"][0].message
    assert rewrites["qwen3"][0].remedy
