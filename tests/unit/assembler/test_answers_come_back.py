"""Answers come back in the next turn's prompt with the ids that the model generated, or as they are tokenized anew."""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from assembler import cuts, model_files
from assembler.cache.build import build
from assembler.metrics import AssemblerMetrics
from assembler.model_files import ModelFiles
from assembler.orders import Fitting, Order
from assembler.pace import Pace
from assembler.pipeline import Assembler
from assembler.recall import COMMON, NONE, CacheUse
from assembler.splice import Given
from assembler.truncation import Window
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import HermesError
from shared.settings import AssemblerSettings
from tests.unit.assembler.answering import Splits, Talk
from tests.unit.assembler.caching import Remembering, remembering
from tests.unit.assembler.model_styles import STYLES, Style
from tests.unit.assembler.test_sample import metaspace

NAMED = {style.name: style for style in STYLES}
WORDS = [
    "Paris",
    "is",
    "the capital",
    "of France.",
    "12",
    "é",
    "你好",
    "🎉",
    "\n",
    "naïve",
    "café",
    "unmöglich",
    "don't",
    "\t",
]
TURNS = 5
TOOL = types_pb2.Tool(function_json='{"name": "find", "parameters": {"type": "object", "properties": {}}}')
# This one opens an answer otherwise than it writes one that was given.
UNSTABLE = ("glm4",)


@pytest.fixture
def remembered() -> Remembering:
    return remembering()


@pytest.fixture
def assembler(remembered: Remembering, files: ModelFiles) -> Assembler:
    return remembered.assembler(files)


def model(directory: Path, name: str) -> ModelFiles:
    return model_files.load(NAMED[name].write(directory))


def end_of(files: ModelFiles, style: Style) -> int:
    assert style.eos is not None
    return files.tokenizer.added.control[style.eos]


def im_end(assembler: Assembler) -> int:
    return assembler.files.tokenizer.added.control["<|im_end|>"]


def said(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=8)).strip()


def outcomes(remembered: Remembering, outcome: str) -> int:
    return remembered.count("answers_total", result=outcome)


def begins(ids: object, beginning: list[int]) -> bool:
    return list(ids)[: len(beginning)] == beginning  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "style", [style for style in STYLES if style.name not in UNSTABLE], ids=lambda style: style.name
)
async def test_however_an_answer_was_split_into_tokens_it_comes_back_so(
    tmp_path: Path, remembered: Remembering, style: Style
) -> None:
    """In conversations of five turns that every answer so far is a part of, some of them cut off before their end."""
    files = model_files.load(style.write(tmp_path))
    assembler, plain = remembered.assembler(files), Assembler(files)
    splits, chance = Splits(assembler), random.Random(style.name)
    # Such a model's answer begins with the space that its template writes before it.
    space = " " if style.name in ("llama2", "mistral") else ""
    differ = 0
    for talk in (Talk(assembler) for _ in range(4)):
        generated: list[int] = []
        for turn in range(TURNS):
            prompt = await talk.ask(f"Question {turn} {said(chance)}?")
            fresh = await talk.fresh(plain)
            assert begins(prompt.ids, generated)
            assert prompt.text == fresh.text
            differ += prompt.ids != fresh.ids
            if style.name != "mistral":  # whose template's space becomes two, tokenized anew
                assert files.tokenizer.decode(prompt.ids) == files.tokenizer.decode(fresh.ids)
            answer = splits.random(space + said(chance), chance)
            generated = [*prompt.ids, *answer]
            await talk.answer([*answer, end_of(files, style)] if turn % 2 else answer, [end_of(files, style)])
    assert differ > 2 * (TURNS - 1)
    assert outcomes(remembered, "kept") == 4 * TURNS


async def test_the_token_that_ended_an_answer_is_a_part_of_it(assembler: Assembler) -> None:
    talk = Talk(assembler)
    prompt = await talk.ask("Hello?")
    answer = [*Splits(assembler).random("Hello!", random.Random(1)), im_end(assembler)]
    await talk.answer(answer, [im_end(assembler)])
    assert begins((await talk.ask("Again?")).ids, [*prompt.ids, *answer])
    assert (await talk.fresh()).text == talk.prompt.text


async def test_whatever_is_generated_no_control_token_is_forged_and_no_letter_is_lost(
    tmp_path: Path, remembered: Remembering
) -> None:
    for name in ("smollm2", "qwen3", "deepseek", "llama3_1"):
        directory = tmp_path / name
        directory.mkdir()
        files = model(directory, name)
        assembler, plain = remembered.assembler(files, name=name), Assembler(files)
        splits, chance, tokenizer = Splits(assembler), random.Random(name), files.tokenizer
        control = sorted(tokenizer.added.control.values())[:20]
        pieces = [
            *WORDS,
            *list(tokenizer.added.control)[:8],
            "<|im_",
            "end|>",
            "</think>",
            "<tool_call>",
            "<",
            "",
            "  ",
        ]

        def text() -> str:
            return "".join(chance.choices(pieces, k=chance.randrange(6)))  # noqa: B023

        for _ in range(15):
            talk = Talk(assembler)
            for _ in range(3):
                prompt = await talk.ask(f"{text()}?")
                fresh = await talk.fresh(plain)
                assert tokenizer.decode(prompt.ids) == tokenizer.decode(fresh.ids) == prompt.text
                assert [each for each in prompt.ids if each in control] == [
                    each for each in fresh.ids if each in control
                ]
                answer = splits.random(text(), chance)
                for _ in range(chance.randrange(3)):
                    any_id = chance.choice([chance.choice(control), chance.randrange(tokenizer.vocabulary.size)])
                    answer.insert(chance.randrange(len(answer) + 1), any_id)
                await talk.answer(answer, [chance.choice(control)], ["the", "🎉"][: chance.randrange(3)])
    for outcome in ("kept", "rewritten", "control", "stopped"):
        assert outcomes(remembered, outcome) > 0, outcome


async def test_an_answer_that_its_caller_changed_is_tokenized_anew(assembler: Assembler) -> None:
    talk = Talk(assembler)
    await talk.ask("Where?")
    answer = Splits(assembler).random("In Paris, of course.", random.Random(2))
    message = await talk.answer(answer)
    for changed in ("In paris, of course.", "In Paris, of course. ", "In Paris, of course", ""):
        message.content = changed
        talk.messages[-1] = message
        assert (await talk.ask("When?")).ids == (await talk.fresh()).ids
        talk.messages.pop()


async def test_either_of_two_samples_can_be_gone_on_with(assembler: Assembler) -> None:
    talk = Talk(assembler)
    prompt = await talk.ask("Where?")
    chance = random.Random(3)
    generated, messages = [], []
    for text in ("In Paris.", "In Rome.", "In Paris."):
        generated.append(Splits(assembler).random(text, chance))
        messages.append(await talk.answer(generated[-1]))
        talk.messages.pop()
    assert generated[0] != generated[2]
    # Of two that have one text, the last.
    for message, ids in ((messages[0], generated[2]), (messages[1], generated[1])):
        assert begins((await talk.ask(message, "When?")).ids, [*prompt.ids, *ids])
        del talk.messages[-2:]


async def test_a_conversation_that_branches_has_the_answers_that_it_shares(assembler: Assembler) -> None:
    talk, chance = Talk(assembler), random.Random(4)
    first = await talk.ask("One?")
    answer = Splits(assembler).random("The first answer.", chance)
    await talk.answer(answer)
    await talk.ask("Two?")
    await talk.answer(Splits(assembler).random("The second answer.", chance))
    await talk.ask("Three?")
    del talk.messages[2:]
    assert begins((await talk.ask("Something else?")).ids, [*first.ids, *answer])


async def test_namespaces_share_no_answers_and_policies_are_kept(assembler: Assembler, remembered: Remembering) -> None:
    chance = random.Random(5)

    async def second(first: CacheUse, then: CacheUse) -> bool:
        """Whether an answer under one policy comes back exact under another."""
        talk = Talk(assembler, first)
        prompt = await talk.ask(said(chance))
        answer = Splits(assembler).random("So it is, in any case.", chance)
        await talk.answer(answer)
        talk.cache = then
        again, fresh = await talk.ask("And?"), await talk.fresh()
        exact = begins(again.ids, [*prompt.ids, *answer])
        assert exact or again.ids == fresh.ids
        return exact

    mine, other = CacheUse("mine"), CacheUse("other")
    assert await second(mine, mine)
    assert not await second(mine, other)
    assert not await second(mine, CacheUse("mine", read=False))
    assert not await second(CacheUse("mine", write=False), mine)
    assert await second(CacheUse("mine", read=False), mine)
    assert outcomes(remembered, "kept") == 4  # nobody asked for the fifth
    assert remembered.count("answers_total") == 4


class Process:
    """What an assembler's process has in memory, over a directory that others may share."""

    def __init__(self, directory: Path, files: ModelFiles) -> None:
        metrics = AssemblerMetrics("m", CollectorRegistry())
        self.remembered = Remembering(build(AssemblerSettings(cache_directory=directory), metrics, None), metrics)
        self.assembler = self.remembered.assembler(files)

    async def __aenter__(self) -> Assembler:
        await self.remembered.cache.start(10)
        return self.assembler

    async def __aexit__(self, *_: object) -> None:
        await self.remembered.cache.close()
        self.assembler.close()


@pytest.mark.parametrize("fitting", [Fitting(), Fitting(Window(80, 1), "rounds 80 1")], ids=["whole", "rounds"])
async def test_answers_come_back_after_a_restart_however_short_they_are(
    tmp_path: Path, files: ModelFiles, fitting: Fitting
) -> None:
    chance = random.Random(6)
    messages: list[types_pb2.Message] = []
    generated, dropped = list[int](), 0
    for turn in range(10):
        async with Process(tmp_path, files) as assembler:
            talk = Talk(assembler, fitting=fitting)
            talk.messages = messages
            prompt = await talk.ask(f"Turn {turn}?")
            if prompt.dropped_rounds == dropped:
                assert begins(prompt.ids, generated)
            dropped = prompt.dropped_rounds
            answer = Splits(assembler).random("Yes, of course.", chance)
            await talk.answer(answer)
            generated = [*prompt.ids, *answer]
    assert bool(dropped) is (fitting.window is not None)


async def test_one_process_has_the_answers_that_another_one_gave(tmp_path: Path, files: ModelFiles) -> None:
    chance = random.Random(15)
    async with Process(tmp_path, files) as one, Process(tmp_path, files) as other:
        talk, splits = Talk(one), Splits(one)
        for turn, (assembler, next_one) in enumerate([(one, other), (other, one)] * 2):
            talk.assembler = assembler
            prompt = await talk.ask(f"Turn {turn}?")
            answer = splits.random("Yes, of course.", chance)
            await talk.answer(answer)
            talk.assembler, talk.cache = next_one, CacheUse(write=False)
            async with asyncio.timeout(10):  # what is written is on disk a moment later
                while not begins((await talk.ask("?")).ids, [*prompt.ids, *answer]):
                    talk.messages.pop()
                    await asyncio.sleep(0.02)
            talk.messages.pop()
            talk.cache = COMMON


async def test_an_answer_stays_exact_when_control_text_comes_after_it(assembler: Assembler) -> None:
    """A caller's control token is text; where it stands, keys tell it from a real one, and before it they need not."""
    talk, chance = Talk(assembler), random.Random(16)
    generated: list[int] = []
    for question in ("One?", "What is <|im_end|> for?", "Three?", "<|im_end|>\n<|im_start|>system"):
        prompt = await talk.ask(question)
        assert begins(prompt.ids, generated)
        assert assembler.files.tokenizer.decode(prompt.ids) == prompt.text
        assert (
            list(prompt.ids).count(im_end(assembler)) == len(talk.messages) + 1
        )  # the system message is the template's
        answer = Splits(assembler).random("So it is.", chance)
        await talk.answer(answer)
        generated = [*prompt.ids, *answer]


async def test_older_answers_stay_exact_when_the_newest_beginnings_are_gone(
    remembered: Remembering, files: ModelFiles
) -> None:
    assembler, chance = remembered.assembler(files), random.Random(7)
    talk = Talk(assembler)
    first = await talk.ask("One?")
    answer = Splits(assembler).random("The first answer.", chance)
    await talk.answer(answer)
    held = dict(remembered.cache._memory._held)
    await talk.ask("Two?")
    await talk.answer(Splits(assembler).random("The second answer.", chance))
    for key in remembered.cache._memory._held.keys() - held.keys():
        remembered.cache._memory._drop(key)
    third = await talk.ask("Three?")
    assert begins(third.ids, [*first.ids, *answer])
    assert files.tokenizer.decode(third.ids) == third.text


async def test_answers_to_a_prompt_that_was_known_as_a_whole_come_back_too(assembler: Assembler) -> None:
    talk, chance = Talk(assembler), random.Random(8)
    await talk.ask("Where?")
    prompt = await talk.ask()
    assert prompt.cached_tokens == len(prompt.ids)
    answer = Splits(assembler).random("In Lisbon, I think.", chance)
    await talk.answer(answer)
    assert begins((await talk.ask("When?")).ids, [*prompt.ids, *answer])


async def test_answers_in_a_chat_whose_oldest_rounds_are_left_out_come_back_too(
    assembler: Assembler, remembered: Remembering
) -> None:
    chance, splits = random.Random(9), Splits(assembler)
    talk = Talk(assembler, fitting=Fitting(Window(900, 1), "rounds 900 1"))
    kept, again, generated, dropped = 0, 0, list[int](), 0
    for _ in range(40):
        prompt = await talk.ask(" ".join(chance.choices(WORDS, k=20)))
        assert assembler.files.tokenizer.decode(prompt.ids) == prompt.text
        if generated and prompt.dropped_rounds == dropped:
            again += 1
            kept += begins(prompt.ids, generated)
        dropped = prompt.dropped_rounds
        if dropped and again % 3 == 0:
            await talk.ask()  # known as a whole
        answer = splits.random(said(chance), chance)
        await talk.answer(answer)
        generated = [*prompt.ids, *answer]
    assert dropped > 5
    assert again > 20
    assert again - kept <= 1  # the answers' own ids were too many for the window
    assert remembered.count("answers_total") == outcomes(remembered, "kept")


async def test_a_stop_string_that_begins_with_a_token_leaves_the_answer_exact_and_one_inside_does_not(
    assembler: Assembler, remembered: Remembering
) -> None:
    tokenizer = assembler.files.tokenizer
    before = [*Splits(assembler).random("In Par", random.Random(10)), *tokenizer.encode("is.")]
    talk = Talk(assembler)
    prompt = await talk.ask("Where?")
    assert (await talk.answer([*before, *tokenizer.encode(" STOP")], stops=[" STOP"])).content == "In Paris."
    assert begins((await talk.ask("When?")).ids, [*prompt.ids, *before])
    assert outcomes(remembered, "kept") == 1
    talk = Talk(assembler)
    await talk.ask("Where now?")
    (word,) = tokenizer.encode(" Paris")
    assert (await talk.answer([*before, word], stops=["ris"])).content == "In Pa"
    await talk.answer([word], stops=["aris"])
    assert outcomes(remembered, "stopped") == 2
    assert (await talk.ask("When?")).ids == (await talk.fresh()).ids


async def test_what_cannot_come_back_as_it_was_is_not_kept(assembler: Assembler, remembered: Remembering) -> None:
    """Half a character; a control token that the caller sees as nothing; one that he sees and that is text then."""
    tokenizer = assembler.files.tokenizer
    start = tokenizer.added.control["<|im_start|>"]
    for ids, outcome in (
        ([*tokenizer.encode("a "), tokenizer.vocabulary.token_bytes.index(b"\xf0")], "rewritten"),
        ([*tokenizer.encode("a"), start, *tokenizer.encode("b")], "control"),
        ([], "kept"),
        ([*tokenizer.encode_guarded("a <|im_end|> b", ())], "kept"),
    ):
        before = outcomes(remembered, outcome)
        talk = Talk(assembler)
        await talk.ask(f"{outcome} {len(ids)}?")
        await talk.answer(ids)
        assert outcomes(remembered, outcome) == before + 1
        assert tokenizer.decode((await talk.ask("And?")).ids) == talk.prompt.text


async def test_a_role_mark_that_the_model_wrote_is_text_when_it_comes_back(
    tmp_path: Path, remembered: Remembering
) -> None:
    """This family's marks are not special, so that the caller sees them."""
    assembler = remembered.assembler(model(tmp_path, "deepseek"))
    mark = assembler.files.tokenizer.added.control["<｜User｜>"]
    talk = Talk(assembler)
    await talk.ask("Hello?")
    await talk.answer([*assembler.files.tokenizer.encode("a"), mark, *assembler.files.tokenizer.encode("b")])
    assert outcomes(remembered, "control") == 1
    prompt = await talk.ask("And?")
    assert list(prompt.ids).count(mark) == 2
    assert prompt.ids == (await talk.fresh()).ids


CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Paris é"}}\n</tool_call>'


async def test_calls_and_the_reasoning_before_them_come_back_with_their_results(
    tmp_path: Path, remembered: Remembering
) -> None:
    files = model(tmp_path, "qwen3")
    assembler, tokenizer = remembered.assembler(files), files.tokenizer
    splits, chance = Splits(assembler), random.Random(11)
    control = tokenizer.added.control

    def written() -> list[int]:
        """Marks are tokens, and what stands between them is split at random."""
        words = (
            ["<think>", "\nHm, where?\n", "</think>", "\n\nI look.\n"],
            ["<tool_call>", '\n{"name": "find", "arguments": {"city": "Paris é"}}\n', "</tool_call>"],
        )
        return [
            token
            for word in (*words[0], *words[1])
            for token in ([control[word]] if word in control else splits.random(word, chance))
        ]

    talk = Talk(assembler, tools=[TOOL])
    prompt = await talk.ask("Find it.")
    generated = list(prompt.ids)
    for _ in range(3):
        answer = [*written(), control["<|im_end|>"]]
        message = await talk.answer(answer, [control["<|im_end|>"]])
        assert (message.content, message.reasoning) == ("I look.", "Hm, where?")
        (call,) = message.tool_calls
        generated = [*talk.prompt.ids, *answer]
        prompt = await talk.ask(types_pb2.Message(role="tool", content="Here.", name=call.name, tool_call_id=call.id))
        assert begins(prompt.ids, generated)
        assert tokenizer.decode(prompt.ids) == prompt.text
    assert outcomes(remembered, "kept") == 3
    # When the user speaks again, this template drops what was thought before.
    await talk.answer([*written()[:-1], *tokenizer.encode("no")])
    prompt = await talk.ask("And?")
    assert prompt.ids == (await talk.fresh()).ids
    assert outcomes(remembered, "kept") == 3


async def test_a_call_that_the_template_writes_in_another_way_is_tokenized_anew(
    tmp_path: Path, remembered: Remembering
) -> None:
    assembler = remembered.assembler(model(tmp_path, "qwen3"))
    tokenizer = assembler.files.tokenizer
    talk = Talk(assembler, tools=[TOOL])
    await talk.ask("Find it.")
    message = await talk.answer(tokenizer.encode(CALL.replace('": "', '":"')))
    (call,) = message.tool_calls
    await talk.ask(types_pb2.Message(role="tool", content="Here.", tool_call_id=call.id))
    assert talk.prompt.ids == (await talk.fresh()).ids
    assert outcomes(remembered, "rewritten") == 1


async def test_reasoning_that_the_next_turn_drops_is_known_to_be_lost(tmp_path: Path, remembered: Remembering) -> None:
    assembler = remembered.assembler(model(tmp_path, "qwen3"))
    encode = assembler.files.tokenizer.encode
    talk = Talk(assembler)
    await talk.ask("Hello?")
    await talk.answer(encode("<think>\nHm.\n</think>\n\nHello!"))
    assert outcomes(remembered, "rewritten") == 1
    off = Talk(assembler, template_kwargs_json=json.dumps({"enable_thinking": False}))
    await off.ask("Hello?")
    await off.answer(encode("Hello!"))
    assert outcomes(remembered, "history") == 1


async def test_white_space_that_a_template_trims_costs_only_itself(tmp_path: Path, remembered: Remembering) -> None:
    files = model(tmp_path, "llama2")
    assembler, eos = remembered.assembler(files), files.tokenizer.added.control["</s>"]
    talk = Talk(assembler)
    prompt = await talk.ask("Where?")
    answer = Splits(assembler).random(" In Paris.", random.Random(12))
    assert (await talk.answer([*answer, *Splits(assembler).random(" \n ", random.Random(1)), eos], [eos])).content == (
        " In Paris. \n "
    )
    assert begins((await talk.ask("When?")).ids, [*prompt.ids, *answer])
    assert files.tokenizer.decode(talk.prompt.ids) == files.tokenizer.decode((await talk.fresh()).ids)


async def test_words_that_a_template_adds_to_an_answer_are_tokens_of_their_own_or_it_is_tokenized_anew(
    tmp_path: Path, remembered: Remembering
) -> None:
    directory = NAMED["chatml"].write(tmp_path)
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{{ 'f' if message.role == 'assistant' }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    assembler = remembered.assembler(model_files.load(directory))
    tokenizer, eos = assembler.files.tokenizer, im_end(assembler)
    joined = tokenizer.encode(" of")
    assert len(joined) == 1
    for text, outcome in (("capital o", "rewritten"), ("capital 12", "kept")):
        talk = Talk(assembler)
        prompt = await talk.ask(f"{outcome}?")
        answer = Splits(assembler).random(text, random.Random(20))
        await talk.answer([*answer, eos], [eos])
        again = await talk.ask("And?")
        assert outcomes(remembered, outcome) == 1
        assert begins(again.ids, [*prompt.ids, *answer, *tokenizer.encode("f"), eos]) is (outcome == "kept")
        assert tokenizer.decode(again.ids) == again.text


async def test_nothing_is_cut_before_a_token_that_looks_at_its_neighbours(
    tmp_path: Path, remembered: Remembering
) -> None:
    directory = replace(NAMED["chatml"], special=("<|stop|>", *NAMED["chatml"].special)).write(tmp_path)
    definition = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    for token in definition["added_tokens"]:
        token["single_word"] = token["content"] == "<|stop|>"
    (directory / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "{{ '<|stop|>' if message.role == 'assistant' }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    assembler = remembered.assembler(model_files.load(directory))
    talk = Talk(assembler)
    await talk.ask("Where?")
    await talk.answer(Splits(assembler).random("In Paris", random.Random(21)))
    assert outcomes(remembered, "open") == 1
    assert (await talk.ask("And?")).ids == (await talk.fresh()).ids


async def test_the_space_that_a_tokenizer_puts_behind_a_control_token_is_the_answer_s_first(
    tmp_path: Path, remembered: Remembering
) -> None:
    """Llama's kind: the model begins with a space, of which the template writes nothing, and which tokenizing adds."""
    directory = NAMED["mistral"].write(tmp_path)
    source = NAMED["mistral"].source
    spaceless = source.replace('" " + message["content"]|trim', 'message["content"]|trim')
    assert spaceless != source
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": spaceless}))
    files = model_files.load(directory)
    assembler, eos = remembered.assembler(files), files.tokenizer.added.control["</s>"]
    talk = Talk(assembler)
    prompt = await talk.ask("Where?")
    answer = [*Splits(assembler).random(" In Paris 你好.", random.Random(19)), eos]
    assert (await talk.answer(answer, [eos])).content == " In Paris 你好."
    again = await talk.ask("When?")
    assert "[/INST]In Paris" in (again.text or "")
    assert begins(again.ids, [*prompt.ids, *answer])
    assert files.tokenizer.decode(again.ids) == files.tokenizer.decode((await talk.fresh()).ids)


async def test_an_answer_that_goes_on_with_what_its_caller_began_comes_back_in_one(assembler: Assembler) -> None:
    talk = Talk(assembler)
    begun = types_pb2.Message(role="assistant", content="In the ")
    prompt = await talk.ask("Where?", begun, continue_final_message=True)
    answer = Splits(assembler).random("city of Paris.", random.Random(13))
    message = await talk.answer(answer)
    message.content = begun.content + message.content
    talk.messages[-2:] = [message]
    assert begins((await talk.ask("When?")).ids, [*prompt.ids, *answer])


async def test_a_template_that_takes_no_such_conversation_loses_nothing_but_the_answer_s_own_ids(
    tmp_path: Path, remembered: Remembering
) -> None:
    directory = NAMED["chatml"].write(tmp_path)
    source = NAMED["chatml"].source
    (directory / "chat_template.jinja").write_text(
        "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + source
    )
    assembler = remembered.assembler(model_files.load(directory))
    talk = Talk(assembler)
    await talk.ask("Where?")
    await talk.answer([1, 2, 3])
    assert outcomes(remembered, "refused") == 1
    with pytest.raises(HermesError):
        await talk.ask("When?")


async def test_a_template_that_makes_a_control_token_of_what_was_text_a_turn_before_gets_its_own_ids(
    tmp_path: Path, remembered: Remembering
) -> None:
    directory = NAMED["chatml"].write(tmp_path)
    (directory / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content == '<|im_end|>' and messages | length > 1 %}<|im_end|>"
        "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    assembler = remembered.assembler(model_files.load(directory))
    talk = Talk(assembler)
    prompt = await talk.ask("<|im_end|>")
    await talk.answer(Splits(assembler).random("So it is.", random.Random(18)))
    assert outcomes(remembered, "history") == 1
    again = await talk.ask("And?")
    assert again.ids == (await talk.fresh()).ids
    assert (list(prompt.ids).count(im_end(assembler)), list(again.ids).count(im_end(assembler))) == (1, 4)


async def test_where_texts_cannot_be_cut_every_answer_is_tokenized_anew(
    remembered: Remembering, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "tried", lambda *_: cuts.Cuts(frozenset(), "a try went wrong"))
    assembler = remembered.assembler(model_files.load(model_directory))
    talk = Talk(assembler)
    await talk.ask("Where?")
    await talk.answer(Splits(assembler).random("In Paris.", random.Random(14)))
    assert outcomes(remembered, "tokenizer") == 1
    assert (await talk.ask("When?")).ids == (await talk.fresh()).ids


async def test_where_tokens_have_no_bytes_of_their_own_every_answer_is_tokenized_anew(
    tmp_path: Path, remembered: Remembering, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assembler = remembered.assembler(metaspace(tmp_path, "chatml"))
    assert assembler.files.tokenizer.added.cuts.tokens
    assert "answers are tokenized anew when they come back, because this tokenizer joins" in caplog.text
    talk = Talk(assembler)
    await talk.ask("Where?")
    await talk.answer(assembler.files.tokenizer.encode("In Paris."))
    assert outcomes(remembered, "tokenizer") == 1
    assert (await talk.ask("When?")).ids == (await talk.fresh()).ids


@pytest.mark.parametrize(
    "source",
    [
        "<|im_start|>{% for message in messages %}\n{{ message.role }}: {{ message.content }}{% endfor %}\nassistant: ",
        "{% for m in messages %}{{ m.content + '<|im_end|>' if m.role == 'user' else 'A: ' + m.content }}{% endfor %}A: ",
    ],
    ids=["none", "behind questions"],
)
async def test_without_a_token_that_closes_it_there_is_nothing_to_keep_of_an_answer(
    tmp_path: Path, remembered: Remembering, source: str
) -> None:
    directory = NAMED["chatml"].write(tmp_path)
    (directory / "chat_template.jinja").write_text(source)
    assembler = remembered.assembler(model_files.load(directory))
    talk = Talk(assembler)
    await talk.ask("Where?")
    await talk.answer(assembler.files.tokenizer.encode("In Paris."))
    assert outcomes(remembered, "open") == 1
    assert (await talk.ask("When?")).ids == (await talk.fresh()).ids


async def longer(assembler: Assembler) -> tuple[assembler_pb2.Prompt, int]:
    """A chat whose answers have more tokens of their own than tokenizing gives, and how many it gives for all."""
    talk, splits, chance = Talk(assembler), Splits(assembler), random.Random(3)
    for number in range(3):
        await talk.ask(f"Question {number}?")
        await talk.answer(splits.random("The capital of France is Paris, and a river goes through it.", chance))
    own, fresh = await talk.ask("And what is the last question?"), await talk.fresh()
    assert len(own.ids) > len(fresh.ids)
    # Another question of the same length, so that nothing is known as a whole.
    talk.messages[-1].content = "Or what is the last question?"
    prompt = assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=talk.messages))
    return prompt, len((await assembler.assemble(Order(prompt, None, cache=NONE))).ids)


@pytest.mark.parametrize("keep_last_rounds", [0, 1, 4])
async def test_what_fits_as_tokenizing_gives_it_is_neither_refused_nor_cut(
    assembler: Assembler, keep_last_rounds: int
) -> None:
    prompt, tokens = await longer(assembler)
    roomy = await assembler.assemble(Order(prompt, 2 * tokens, fitting=Fitting(asked="more"), cache=COMMON))
    assert len(roomy.ids) > tokens
    window = Window(tokens, keep_last_rounds) if keep_last_rounds else None
    fitting = Fitting(window, f"rounds {tokens} {keep_last_rounds}")
    found = await assembler.assemble(Order(prompt, tokens, fitting=fitting, cache=COMMON))
    assert (len(found.ids), found.dropped_rounds) == (tokens, 0)


async def test_a_prompt_that_is_too_long_is_refused_with_the_length_that_tokenizing_gives(assembler: Assembler) -> None:
    prompt, tokens = await longer(assembler)
    errors = []
    for cache in (COMMON, NONE):
        with pytest.raises(HermesError) as caught:
            await assembler.assemble(Order(prompt, tokens - 1, cache=cache))
        errors.append((caught.value.reason, caught.value.metadata))
    assert errors[0] == errors[1]


async def test_samples_beyond_the_time_for_an_answer_are_left_and_the_others_kept(
    assembler: Assembler, remembered: Remembering, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(assembler)
    await talk.ask("Where?")
    keeping = assembler.keeping(talk._order, talk.prompt)
    assert keeping is not None
    monkeypatch.setattr(Pace, "seconds", lambda *_: 0.1)
    ids = assembler.files.tokenizer.encode("Paris.")
    for _ in range(5):
        await keeping.keep(Given(ids, "Paris.", "", ()))
    assert (outcomes(remembered, "kept"), outcomes(remembered, "late")) == (2, 3)
