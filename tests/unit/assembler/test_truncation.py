from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assembler import order, template_files, truncation
from assembler.messages import Conversation, Message, Role
from assembler.model_files import ModelFiles
from assembler.order import OrderPolicy
from assembler.rendering import Renderer
from assembler.templates import RenderOptions
from assembler.tools import Tool, ToolCall
from assembler.truncation import Truncated, Window
from shared.errors import HermesError

# What each message costs beside its text, and what the prompt has around the messages.
MARKS, AROUND = 3, 5


@dataclass(frozen=True)
class Counted:
    """A prompt as long as its messages' texts say: a token a character."""

    conversation: Conversation
    tokens: int


def counted(conversation: Conversation) -> Counted:
    messages = sum(len(message.content) + MARKS for message in conversation.messages)
    return Counted(conversation, AROUND + messages + sum(tool.characters for tool in conversation.tools))


def told(*turns: str | Message) -> Conversation:
    """Messages by the first letters of their roles."""
    roles = {role[0]: role for role in Role}
    return Conversation(tuple(each if isinstance(each, Message) else Message(roles[each[0]], each) for each in turns))


def calls(*ids: str) -> Message:
    return Message(Role.ASSISTANT, "", tool_calls=tuple(ToolCall("f", "{}", {}, each) for each in ids))


def result(call_id: str) -> Message:
    return Message(Role.TOOL, call_id, tool_call_id=call_id)


def cut(
    conversation: Conversation, tokens: int, keep: int = 1, attempt: Callable[[Conversation], Counted] = counted
) -> Truncated[Counted]:
    return truncation.truncated(conversation, counted(conversation), Window(tokens, keep), attempt)


def kept(conversation: Conversation, tokens: int, keep: int = 1) -> list[str]:
    return [message.content for message in cut(conversation, tokens, keep).prompt.conversation.messages]


def chat(sizes: Iterable[int], head: int = 20) -> Conversation:
    """A system text and rounds of so many tokens each; the last one waits for its answer."""
    messages = [Message(Role.SYSTEM, "s" * (head - MARKS))]
    for size in sizes:
        question = size // 2
        messages.append(Message(Role.USER, "q" * (question - MARKS)))
        messages.append(Message(Role.ASSISTANT, "a" * (size - question - MARKS)))
    return Conversation(tuple(messages[:-1]))


def test_what_fits_stays_as_it_is_and_nothing_is_tried() -> None:
    conversation = chat([50, 50, 50])
    whole = counted(conversation)
    fitting = truncation.truncated(conversation, whole, Window(whole.tokens), pytest.fail)
    assert (fitting.prompt, fitting.dropped_rounds, fitting.dropped) == (whole, 0, range(0))


@pytest.mark.parametrize(
    ("over", "to_drop"),
    [(1, 100), (100, 100), (101, 200), (200, 200), (201, 300)],
)
def test_tokens_go_in_strides_of_a_quarter_window(over: int, to_drop: int) -> None:
    sizes = [10] * 35
    conversation = chat(sizes, head=20 + 400 + over - counted(chat(sizes, head=20)).tokens)
    assert counted(conversation).tokens == 400 + over
    assert cut(conversation, 400).dropped_rounds == to_drop // 10


def test_a_window_that_four_does_not_divide_has_strides_all_the_same() -> None:
    conversation = chat([10] * 60)
    for window in range(31, 60):
        over = counted(conversation).tokens - window
        dropped = 10 * cut(conversation, window).dropped_rounds
        strides = next(count for count in range(1000) if count * window / 4 >= over)
        assert dropped - 10 < strides * window / 4 <= dropped or dropped == 10 * 59


def test_the_system_messages_at_the_beginning_and_the_last_round_stay() -> None:
    conversation = told("s1", "s2", "u1" + 90 * "-", "a1", "s3", "u2" + 90 * "-", "a2", "u3")
    assert kept(conversation, 60) == ["s1", "s2", "u3"]


def test_so_many_last_rounds_stay_as_are_asked_for() -> None:
    conversation = chat([40] * 10)
    assert cut(conversation, 300, keep=6).dropped_rounds == 4
    assert cut(conversation, 300, keep=0) == cut(conversation, 300, keep=1)


def test_what_comes_before_the_first_question_goes_with_it() -> None:
    conversation = told("s", "a greeting", "u1" + 90 * "-", "a1", "u2")
    assert kept(conversation, 60) == ["s", "u2"]
    assert cut(conversation, 60).dropped == range(1, 4)


def test_questions_in_a_row_are_one_round_also_with_a_system_message_between_them() -> None:
    conversation = told("u1" + 90 * "-", "a1", "u2", "s", "u3", "a3")
    assert kept(conversation, 60) == ["u2", "s", "u3", "a3"]


def test_a_tools_result_keeps_its_call_whatever_is_said_between_them() -> None:
    long = "u1" + 90 * "-"
    conversation = told(long, "a1", "u2", calls("x", "y"), result("y"), "u3 hurry", "a3", result("x"), "a4", "u5")
    assert kept(conversation, 80, keep=2) == ["u2", "", "y", "u3 hurry", "a3", "x", "a4", "u5"]
    assert kept(conversation, 40, keep=1) == ["u5"]


def test_a_result_that_nobody_asked_for_stays_in_its_place() -> None:
    conversation = told("u1" + 90 * "-", "a1", "u2", result("?"), "u3")
    assert kept(conversation, 60, keep=2) == ["u2", "?", "u3"]


def test_tools_and_all_else_around_the_messages_stay() -> None:
    conversation = replace(chat([40] * 10), tools=(Tool({"name": "f"}, 50),))
    assert cut(conversation, 300).prompt.conversation.tools == conversation.tools


def test_what_has_to_stay_and_is_too_long_is_refused_with_the_numbers() -> None:
    conversation = chat([40] * 10, head=200)
    with pytest.raises(
        HermesError, match=r"and \d+ with nothing but .* the last 3 rounds, .* no more than 300"
    ) as caught:
        cut(conversation, 300, keep=3)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert caught.value.metadata == {
        "prompt_tokens": str(AROUND + 200 + 3 * 40 - 20),  # the last answer is still to come
        "max_prompt_tokens": "300",
        "whole_prompt_tokens": str(counted(conversation).tokens),
        "kept_rounds": "3",
    }


@pytest.mark.parametrize("conversation", [chat([400]), told("s" * 400), told(calls("x"), result("x"), "a" * 400)])
def test_one_round_alone_is_never_cut(conversation: Conversation) -> None:
    with pytest.raises(HermesError, match="none of its rounds may be left out") as caught:
        truncation.truncated(conversation, counted(conversation), Window(100), pytest.fail)
    assert caught.value.reason == "PROMPT_TOO_LONG"


def test_two_or_three_attempts_find_the_cut_among_rounds_of_about_one_length() -> None:
    for rounds in (10, 100, 1000, 5000):
        tried: list[Conversation] = []
        sizes = [80 + place * 37 % 140 for place in range(rounds)]

        def attempt(conversation: Conversation, tried: list[Conversation] = tried) -> Counted:
            tried.append(conversation)
            return counted(conversation)

        cut(chat(sizes), 1200, attempt=attempt)
        assert len(tried) <= 4


def test_attempts_are_few_also_where_lengths_tell_nothing() -> None:
    tried: list[Conversation] = []
    ends = told(*(turn for _ in range(2000) for turn in ("u", "a")), "u")

    def attempt(conversation: Conversation) -> Counted:
        """All tokens are in a few rounds in the middle, which are no longer than the others."""
        tried.append(conversation)
        return Counted(conversation, 10 + 50 * max(0, min(40, len(conversation.messages) // 2 - 700)))

    found = truncation.truncated(ends, attempt(ends), Window(1000), attempt)
    assert found.prompt.tokens <= 1000
    assert len(tried) <= 18


@given(st.lists(st.integers(80, 220), min_size=1, max_size=80), st.integers(700, 3000), st.integers(0, 2))
def test_the_cut_moves_at_most_once_in_a_quarter_window_of_growth(sizes: list[int], window: int, keep: int) -> None:
    places = []
    for turn in range(1, len(sizes) + 1):
        conversation = chat(sizes[:turn])
        places.append((counted(conversation).tokens, cut(conversation, window, keep).dropped_rounds))
    dropped = [rounds for _, rounds in places]
    assert dropped == sorted(dropped)
    for tokens, _ in places:
        within = {rounds for later, rounds in places if tokens <= later <= tokens + window / 4}
        assert len(within) <= 2


ids = st.sampled_from("xyz")
roles = st.sampled_from((Role.SYSTEM, Role.USER, Role.ASSISTANT))
texts = st.tuples(roles, st.text("-", max_size=60)).map(lambda each: Message(*each))
turns = st.one_of(texts, texts, ids.map(calls), ids.map(result))


@settings(max_examples=300)
@given(st.lists(turns, min_size=1, max_size=40), st.integers(10, 400), st.integers(0, 4))
def test_whatever_is_said_the_prompt_fits_or_cannot_and_nothing_loses_its_question(
    messages: list[Message], window: int, keep: int
) -> None:
    conversation = Conversation(tuple(messages))
    try:
        found = cut(conversation, window, keep)
    except HermesError as error:
        assert error.reason == "PROMPT_TOO_LONG"
        assert int(error.metadata["prompt_tokens"]) > window
        return
    assert found == cut(conversation, window, keep)
    assert found.prompt.tokens <= window
    left = found.prompt.conversation.messages
    assert left == (*messages[: found.dropped.start], *messages[found.dropped.stop :])
    assert all(message.role is Role.SYSTEM for message in messages[: found.dropped.start])
    if found.dropped_rounds:
        assert left[found.dropped.start].role is Role.USER
        assert messages[found.dropped.stop - 1].role is not Role.USER
    for answer, asked in order.results(conversation.messages):
        assert asked is None or (asked in found.dropped) == (answer in found.dropped)


@dataclass(frozen=True)
class Encoded:
    text: str
    tokens: int


@pytest.mark.parametrize("template", [None, "gemma", "mistral", "llama2", "alpaca"])
@pytest.mark.parametrize("open_end", [False, True])
def test_with_real_templates_the_cut_fits_and_its_beginning_stays_while_the_conversation_grows(
    files: ModelFiles, template: str | None, open_end: bool
) -> None:
    chosen = (
        files.template if template is None else template_files.read(template, {"bos_token": "", "eos_token": "</s>"})
    )
    assert chosen is not None
    renderer = Renderer(chosen, files.tokenizer, OrderPolicy(), "encode")
    options = RenderOptions(add_generation_prompt=not open_end, continue_final_message=open_end)

    def attempt(conversation: Conversation) -> Encoded:
        text = renderer.render(conversation, options).reading.text
        return Encoded(text, len(files.tokenizer.encode(text)))

    def answer(place: int) -> Message:
        return Message(Role.ASSISTANT, f"Here is answer {place}, " + "which is long. " * (place % 5 + 1))

    messages = [Message(Role.SYSTEM, "Be brief.")]
    cuts = []
    for place in range(40):
        messages.append(Message(Role.USER, f"Question {place}: " + "why is that so? " * (place % 3 + 1)))
        conversation = Conversation((*messages, answer(place)) if open_end else tuple(messages))
        found = truncation.truncated(conversation, attempt(conversation), Window(1000, 2), attempt)
        assert found.prompt.tokens <= 1000
        assert "Be brief." in found.prompt.text
        assert f"Question {place}: " in found.prompt.text
        cuts.append((found.dropped_rounds, found.prompt.text))
        messages.append(answer(place))
    stayed = [(one, other) for (rounds, one), (others, other) in pairwise(cuts) if rounds == others]
    assert len(stayed) >= 30
    assert cuts[-1][0] > 10
    for one, other in stayed:
        last_turn = one.rindex("Question ")
        assert one[:last_turn] == other[:last_turn]
