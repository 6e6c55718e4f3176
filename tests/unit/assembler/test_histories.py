"""What templates do to earlier turns, and what it costs a conversation."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assembler import histories, model_files, template_files
from assembler.findings import UNSTABLE_HISTORY, Finding
from assembler.histories import History, Rewrite
from assembler.jinja_template import JinjaTemplate
from assembler.messages import Conversation, Message, Role
from assembler.model_files import ModelFiles
from assembler.orders import Fitting, Order
from assembler.pipeline import Assembler
from assembler.recall import CacheUse
from assembler.tools import Tool
from assembler.truncation import Window
from hermes.v1 import assembler_pb2, types_pb2
from tests.unit.assembler.caching import remembering
from tests.unit.assembler.model_styles import STYLES

EXPECTED = {
    "mistral": {Rewrite.SYSTEM, Rewrite.TOOLS, Rewrite.SPACES},
    "qwen3": {Rewrite.REASONING},
    "deepseek": {Rewrite.REASONING},
    "hermes": {Rewrite.CALLS},
    "qwen3_coder": {Rewrite.TOOLS},
} | {name: {Rewrite.SPACES} for name in ("llama2", "llama3_1", "gemma", "command_r")}
ANSWER = "There are a hundred of them, and each has a name of its own. " * 4
# As DeepSeek R1's: an answer is opened with a mark that the next turn does not have.
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + "
    "m.content.split('</think>')[-1] + '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + "
    "'<|im_end|>\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% endif %}"
)
NUMBERED = (
    "{% for m in messages %}{{ loop.revindex }}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def styled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFiles]:
    return {
        style.name: model_files.load(style.write(tmp_path_factory.mktemp(style.name)))
        for style in STYLES
        if style.name in ("qwen3", "deepseek", "mistral", "llama2", "hermes", "qwen3_coder")
    }


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_what_public_templates_do_to_earlier_turns_is_found_at_load(style: Any, tmp_path: Path) -> None:
    template = model_files.load(style.write(tmp_path)).template
    assert template is not None
    history = histories.read(template)
    assert set(history.rewrites) == EXPECTED.get(style.name, set())
    assert history.is_stable == (EXPECTED.get(style.name, set()) <= {Rewrite.SPACES})


@pytest.mark.parametrize("name", ["alpaca", "chatml", "gemma", "llama2", "llama3", "mistral", "vicuna", "zephyr"])
def test_declared_templates_write_turns_always_in_the_same_way(name: str) -> None:
    assert histories.read(template_files.read(name, {"bos_token": "<s>", "eos_token": "</s>"})).is_stable


@pytest.mark.parametrize(
    ("source", "rewrites"),
    [(THINKING, {Rewrite.OPENING, Rewrite.REASONING}), (NUMBERED, {Rewrite.TURNS})],
    ids=["opening", "turns"],
)
def test_templates_that_rewrite_their_turns_are_told_apart(source: str, rewrites: set[Rewrite]) -> None:
    history = histories.read(JinjaTemplate(source, {}))
    assert set(history.rewrites) == rewrites
    assert not history.is_stable
    assert all(each.message in str(history) and each.remedy.endswith(".") for each in rewrites)


def chat(*turns: tuple[str, str] | types_pb2.Message, **fields: object) -> assembler_pb2.Prompt:
    messages = [
        turn if isinstance(turn, types_pb2.Message) else types_pb2.Message(role=turn[0], content=turn[1])
        for turn in turns
    ]
    return assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=messages, **fields))


async def lost(files: ModelFiles, prompt: assembler_pb2.Prompt) -> tuple[int, Finding | None]:
    """Tokens that the last turn's prompt has in common with this one, and what is told of it."""
    assembler = Assembler(files)
    found = (await assembler.assemble(Order(prompt, None))).findings
    told = [each for each in found if each.code == UNSTABLE_HISTORY]
    whole = (await assembler.assemble(Order(prompt, None))).ids
    last = max(at for at, message in enumerate(prompt.chat.messages) if message.role == "assistant")
    earlier = assembler_pb2.Prompt()
    earlier.CopyFrom(prompt)
    del earlier.chat.messages[last:]
    before = (await assembler.assemble(Order(earlier, None))).ids
    assembler.close()
    common = next((at for at, (one, two) in enumerate(zip(before, whole, strict=False)) if one != two), len(before))
    assert len(told) <= 1
    return common, told[0] if told else None


def thought(content: str, reasoning: str) -> types_pb2.Message:
    return types_pb2.Message(role="assistant", content=content, reasoning=reasoning)


async def test_dropped_reasoning_costs_the_answer_after_it(styled: dict[str, ModelFiles]) -> None:
    files = styled["qwen3"]
    answer = len(files.tokenizer.encode(ANSWER.strip()))
    for message in (thought(ANSWER, "Let me see. " * 20), ("assistant", f"<think>\nLet me see.\n</think>\n\n{ANSWER}")):
        _, found = await lost(files, chat(("user", "Which rivers?"), message, ("user", "And lakes?")))
        assert found is not None
        assert abs(found.tokens - answer) <= 2
        assert found.message_index == 1
        assert str(found.tokens) in found.message


async def test_an_opening_that_is_not_kept_costs_the_answer_after_it(files: ModelFiles) -> None:
    thinking = replace(files, template=JinjaTemplate(THINKING, {}))
    _, found = await lost(thinking, chat(("user", "Which?"), ("assistant", ANSWER), ("user", "And?")))
    assert found is not None
    assert abs(found.tokens - len(files.tokenizer.encode(ANSWER.strip()))) <= 2


async def test_a_system_text_that_moves_costs_all_that_comes_after_its_old_place(styled: dict[str, ModelFiles]) -> None:
    files = styled["mistral"]
    system, question = "Answer as a pirate does. " * 20, "Which rivers are there? " * 10
    prompt = chat(("system", system), ("user", question), ("assistant", ANSWER), ("user", "And lakes?"))
    common, found = await lost(files, prompt)
    assert found is not None
    again = len(files.tokenizer.encode(question)) + len(files.tokenizer.encode(ANSWER))
    assert abs(found.tokens - again) < 0.1 * again
    assert common < 10
    assert found.message_index == 0


async def test_the_message_is_that_of_the_callers_list_also_where_rounds_were_dropped(
    styled: dict[str, ModelFiles],
) -> None:
    rounds = [turn for at in range(9) for turn in (("user", f"Which? {at} " * 9), ("assistant", f"{at} {ANSWER}"))]
    prompt = chat(("system", "Be brief."), *rounds, ("user", "And?"))
    assembler = Assembler(styled["qwen3"])
    fitting = Fitting(Window(1500), "rounds")
    assembled = await assembler.assemble(Order(prompt, 1500, fitting=fitting))
    assembler.close()
    assert assembled.dropped_rounds > 0
    assert [each.message_index for each in assembled.findings] == [18]


CALL = types_pb2.Message(
    role="assistant",
    tool_calls=[types_pb2.ToolCall(id="call00001", name="rates", arguments_json='{"currency": "EUR"}')],
)
RESULT = types_pb2.Message(role="tool", tool_call_id="call00001", name="rates", content="1.08 is the rate. " * 9)
TOOL = types_pb2.Tool(
    function_json='{"name": "rates", "description": "d", "parameters": {"type": "object", "properties": {}}}'
)


async def test_what_a_template_writes_behind_a_last_result_costs_the_answer_after_it(
    styled: dict[str, ModelFiles],
) -> None:
    files = styled["hermes"]
    answer = len(files.tokenizer.encode(ANSWER.strip()))
    turns = [("user", "Which?"), CALL, RESULT, ("assistant", ANSWER), ("user", "And?")]
    _, found = await lost(files, chat(*turns))
    assert found is not None
    assert answer <= found.tokens <= answer + 10
    assert found.message_index == 3
    _, found = await lost(files, chat(("user", "Which?"), ("assistant", ANSWER), ("user", "And?")))
    assert found is None


async def test_tools_behind_the_last_message_cost_the_answer_and_the_call_after_them(
    styled: dict[str, ModelFiles],
) -> None:
    files = styled["qwen3_coder"]
    answer = len(files.tokenizer.encode(ANSWER.strip()))
    turns = [("user", "Which?"), ("assistant", ANSWER), ("user", "And?")]
    _, found = await lost(files, chat(*turns, tools=[TOOL]))
    assert found is not None
    assert answer <= found.tokens <= answer + 10
    _, found = await lost(files, chat(*turns))
    assert found is None
    argument = "rivers and lakes of the north " * 20
    call = types_pb2.Message(role="assistant")
    call.tool_calls.add(id="call00001", name="rates", arguments_json=json.dumps({"query": argument}))
    _, found = await lost(files, chat(("user", "Which?"), call, RESULT, tools=[TOOL]))
    assert found is not None
    # The marks of a call are the answer's, too.
    assert 0 <= found.tokens - len(files.tokenizer.encode(argument)) < 80


def calls(count: int, content: str = "") -> types_pb2.Message:
    message = types_pb2.Message(role="assistant", content=content)
    for index in range(count):
        message.tool_calls.add(id=f"call{index:05}", name="rates", arguments_json=json.dumps({"query": "rivers " * 9}))
    return message


def result(index: int, content: str) -> types_pb2.Message:
    return types_pb2.Message(role="tool", content=content, tool_call_id=f"call{index:05}", name="rates")


@pytest.mark.parametrize("name", ["mistral", "qwen3_coder"])
@pytest.mark.parametrize("first", ["ok", "1", "done, and well"])
async def test_a_result_that_comes_again_in_a_later_one_is_not_taken_for_it(
    styled: dict[str, ModelFiles], name: str, first: str
) -> None:
    later = f"{'Rivers run to the sea. ' * 100}{first}"
    turns = [("system", "Be brief."), ("user", "Which?"), calls(2), result(0, first), result(1, later)]
    _, found = await lost(styled[name], chat(*turns, tools=[TOOL]))
    assert found is not None
    assert 0 < found.tokens < len(styled[name].tokenizer.encode(later)) / 2


async def test_the_calls_of_an_answer_with_text_are_lost_with_it(styled: dict[str, ModelFiles]) -> None:
    files = styled["qwen3_coder"]
    costs = []
    for content in ("", "Let me look that up."):
        turns = [("user", "Which?"), calls(3, content), *(result(index, "Many.") for index in range(3))]
        _, found = await lost(files, chat(*turns, tools=[TOOL]))
        assert found is not None
        assert found.message_index == 1
        costs.append(found.tokens)
    assert 0 < costs[1] - costs[0] <= len(files.tokenizer.encode("Let me look that up.")) + 3


@pytest.mark.parametrize("question", ["yes", "Which?"])
async def test_a_system_text_that_goes_along_to_the_last_question_is_no_beginning(
    styled: dict[str, ModelFiles], question: str
) -> None:
    assembler = Assembler(styled["mistral"])
    for day in (10, 11, 12):
        answer = f"The parcel of 2026-12-{day} is on its way. {ANSWER}"
        turns = [("system", ANSWER), ("user", question), ("assistant", answer), ("user", question)]
        found = (await assembler.assemble(Order(chat(*turns), None, cache=CacheUse("a")))).findings
    assembler.close()
    assert {each.code for each in found} == {UNSTABLE_HISTORY}


@pytest.mark.parametrize("name", ["llama2", "mistral"])
async def test_white_space_that_an_answer_begins_with_costs_the_answer_where_it_is_taken_off(
    styled: dict[str, ModelFiles], name: str
) -> None:
    files = styled[name]
    answer = len(files.tokenizer.encode(ANSWER.strip()))
    for content, tokens in ((f"\n\n  {ANSWER}", answer), (ANSWER, 0), (f"{ANSWER}\n\n", 0)):
        _, found = await lost(files, chat(("user", "Which?"), ("assistant", content), ("user", "And?")))
        told = 0 if found is None else found.tokens
        assert abs(told - tokens) <= 4, content


async def test_the_first_turn_of_a_conversation_loses_nothing(styled: dict[str, ModelFiles]) -> None:
    for files in styled.values():
        assert (await Assembler(files).assemble(Order(chat(("user", "Which?")), None))).findings == ()


async def test_stable_templates_are_rendered_once(
    styled: dict[str, ModelFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = chat(("user", "Which?"), ("assistant", ANSWER), ("user", "And?"))
    for name, times in (("llama2", 1), ("qwen3", 3)):
        assembler, rendered = Assembler(styled[name]), []
        write = JinjaTemplate.write

        def counted(self: JinjaTemplate, *arguments: Any) -> Any:
            rendered.append(self)  # noqa: B023 - called in this round alone
            return write(self, *arguments)  # noqa: B023

        monkeypatch.setattr(JinjaTemplate, "write", counted)
        await assembler.assemble(Order(prompt, None))
        monkeypatch.undo()
        assembler.close()
        assert len(rendered) == times, name


async def test_a_prompt_from_the_cache_is_told_of_its_history_again(styled: dict[str, ModelFiles]) -> None:
    cached = remembering()
    assembler = cached.assembler(styled["qwen3"])
    prompt = chat(("user", "Which?"), thought(ANSWER, "Hm."), ("user", "And?"))
    order = Order(prompt, None, cache=CacheUse())
    first = await assembler.assemble(order)
    is_hit, again = await cached.is_hit(assembler, order)
    assembler.close()
    assert is_hit
    assert again.findings == first.findings
    assert [each.code for each in first.findings] == [UNSTABLE_HISTORY]


def test_the_log_says_at_load_what_the_template_does(
    styled: dict[str, ModelFiles], caplog: pytest.LogCaptureFixture
) -> None:
    Assembler(styled["qwen3"]).close()
    assert "it drops the reasoning of earlier answers" in caplog.text
    caplog.clear()
    Assembler(styled["llama2"]).close()
    assert "earlier" not in caplog.text


def test_an_assembler_tells_what_its_templates_do(files: ModelFiles, styled: dict[str, ModelFiles]) -> None:
    tools = styled["qwen3"].template
    made: Iterator[Assembler] = iter([Assembler(files), Assembler(replace(files, tool_template=tools))])
    assert [each.chats.rewrites for each in made] == [[], [Rewrite.REASONING]]


def test_conversations_without_what_a_template_rewrites_are_kept() -> None:
    ask, answer = Message(Role.USER, "q"), Message(Role.ASSISTANT, "a")
    plain = Conversation((ask, answer, ask))
    system = Conversation((Message(Role.SYSTEM, "s"), ask, answer, ask))
    called = Conversation((ask, Message(Role.TOOL, "5"), answer, ask))
    tools = Conversation((ask, answer, ask), (Tool({}, 2),))
    spaced = Conversation((ask, Message(Role.ASSISTANT, "\na"), ask))
    concerned = [
        (Rewrite.SYSTEM, [system]),
        (Rewrite.CALLS, [called]),
        (Rewrite.TOOLS, [tools]),
        (Rewrite.SPACES, [spaced]),
        (Rewrite.TURNS, [plain, system, called, tools, spaced]),
    ]
    for rewrite, conversations in concerned:
        history = History((rewrite,))
        kept = [each for each in (plain, system, called, tools, spaced) if history.keeps(each)]
        assert kept == [each for each in (plain, system, called, tools, spaced) if each not in conversations]


def test_only_white_space_is_no_unstable_history() -> None:
    assert History((Rewrite.SPACES,)).is_stable
    assert not History((Rewrite.SPACES, Rewrite.TURNS)).is_stable


async def test_an_answer_whose_words_stand_in_the_next_question_costs_no_more_than_itself(
    styled: dict[str, ModelFiles],
) -> None:
    assembler = Assembler(styled["qwen3"])
    document = "There is a long document about whatever it may be. " * 200
    turns = [("user", "How many?"), ("assistant", "42"), ("user", f"{document} Is it 42?")]
    messages = [types_pb2.Message(role=role, content=content) for role, content in turns]
    prompt = assembler_pb2.Prompt(chat=assembler_pb2.Chat(messages=messages))
    found = (await assembler.assemble(Order(prompt, None, cache=CacheUse()))).findings
    assembler.close()
    assert sum(each.tokens for each in found) < 20
