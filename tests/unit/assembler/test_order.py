import pytest

from assembler import order
from assembler.findings import as_warnings, summed_up
from assembler.messages import Conversation, Message, Role
from assembler.order import OrderPolicy
from assembler.tools import ToolCall
from shared.errors import HermesError


def told(*turns: str | Message) -> Conversation:
    """Messages by the first letters of their roles, each with a content of its own."""
    roles = {role[0]: role for role in Role}
    return Conversation(
        tuple(
            turn if isinstance(turn, Message) else Message(roles[turn[0]], turn[1:] or f"{place}")
            for place, turn in enumerate(turns)
        )
    )


def calls(*ids: str | None, name: str = "f") -> Message:
    return Message(Role.ASSISTANT, "", tool_calls=tuple(ToolCall(name, "{}", {}, each) for each in ids))


def result(call_id: str | None = None, name: str | None = None) -> Message:
    return Message(Role.TOOL, "5", name=name, tool_call_id=call_id)


def codes(conversation: Conversation) -> list[tuple[str, int | None]]:
    return [(finding.code, finding.message_index) for finding in order.findings(conversation)]


def contents(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


@pytest.mark.parametrize(
    "conversation",
    [
        told("u"),
        told("s", "u", "a", "u"),
        told("u", calls("1"), result("1"), "a"),
        told("u", calls("1", "2"), result("2"), result("1"), "a", "u"),
        told("u", calls(None, None), result(), result(), "a"),
        told("u", calls("1"), result(name="f"), "a"),
        told("u", calls(None), result("whatever"), "a"),
        told("u", calls("1"), result("1"), calls("1"), result("1"), "a"),
    ],
)
def test_a_canonical_order_is_nothing_to_tell(conversation: Conversation) -> None:
    assert codes(conversation) == []


@pytest.mark.parametrize(
    ("conversation", "index"),
    [
        (told("s", "s", "u"), 1),
        (told("u", "s", "a"), 1),
        (told("u", "u"), 1),
        (told("u", "a", "a"), 2),
        (told("a", "u"), 0),
        (told("s", "a"), 1),
    ],
)
def test_a_role_out_of_order_is_told_with_its_message(conversation: Conversation, index: int) -> None:
    assert codes(conversation) == [("ROLE_ORDER", index)]


@pytest.mark.parametrize(
    ("conversation", "index"),
    [
        (told("u", calls("1"), result("2"), "a"), 2),
        (told("u", calls("1"), result("1"), result("1"), "a"), 3),
        (told("u", calls("1"), result(name="g"), "a"), 2),
        (told("u", "a", result("1"), "a"), 2),
        (told("u", calls(None), result(), result(), "a"), 3),
    ],
)
def test_a_result_that_answers_no_open_call_is_told_with_its_message(conversation: Conversation, index: int) -> None:
    assert codes(conversation) == [("TOOL_RESULT_MISMATCH", index)]


def test_under_strict_the_first_finding_is_an_error() -> None:
    with pytest.raises(HermesError) as caught:
        order.refuse(order.findings(told("u", "u", result("1"))))
    assert (caught.value.reason, caught.value.metadata["message_index"]) == ("ROLE_ORDER", "1")
    assert "take turns" in caught.value.message


def test_of_ten_thousand_findings_the_first_few_are_told_and_how_many_more_there_are() -> None:
    warnings = as_warnings(summed_up(order.findings(told(*["u"] * 10_000))))
    assert [warning.message_index for warning in warnings[:3]] == [1, 2, 3]
    assert len(warnings) == 9
    assert not warnings[-1].HasField("message_index")
    assert "9991 more" in warnings[-1].message


def test_results_are_matched_without_going_through_all_calls_for_each() -> None:
    many = [calls(f"{place}") for place in range(20_000)]
    back = [result(f"{place}") for place in reversed(range(20_000))]
    found = [code for code, _ in codes(Conversation((*many, *back)))]
    assert "TOOL_RESULT_MISMATCH" not in found


def test_results_that_answer_nothing_are_compared_with_none_of_the_calls() -> None:
    many = [calls(f"{place}", None) for place in range(20_000)]
    for odd in (result("x", name="g"), result(name="g")):
        found = [code for code, _ in codes(Conversation((*many, *[odd] * 20_000)))]
        assert found.count("TOOL_RESULT_MISMATCH") == 20_000


@pytest.mark.parametrize(
    ("called", "results", "unanswered"),
    [
        (calls("1", "2"), [result("2"), result("1")], 0),
        (calls("1", None), [result("2"), result("2"), result("1")], 1),
        (calls("1", None), [result(), result("1"), result()], 1),
        (calls(None, "1"), [result(), result("1")], 0),
        (calls(None, None), [result(name="f"), result("x", name="f"), result(name="f")], 1),
        (calls("1", "1"), [result("1"), result("1"), result("1")], 1),
    ],
)
def test_a_result_answers_the_first_open_call_of_its_id_else_one_without(
    called: Message, results: list[Message], unanswered: int
) -> None:
    found = [code for code, _ in codes(told("u", called, *results, "a"))]
    assert found.count("TOOL_RESULT_MISMATCH") == unanswered


def test_the_mend_that_changes_least_comes_first() -> None:
    mends = [contents(mended) for mended in order.mends(told("sA", "uB", "uC", "sD", "aE"), OrderPolicy())]
    assert mends[0] == [("system", "A"), ("user", "B\n\nC"), ("system", "D"), ("assistant", "E")]
    assert mends[1] == [("system", "A\n\nD"), ("user", "B"), ("user", "C"), ("assistant", "E")]
    assert mends[-1] == [("user", "A\n\nD\n\nB\n\nC"), ("assistant", "E")]


def test_only_allowed_mends_are_tried() -> None:
    odd = told("sA", "uB", "uC", "sD")
    assert list(order.mends(odd, OrderPolicy(merge_system=False, merge_same_role=False))) == []
    for mended in order.mends(odd, OrderPolicy(merge_system=False)):
        assert [role for role, _ in contents(mended)].count("system") == 2
    for mended in order.mends(odd, OrderPolicy(merge_same_role=False)):
        assert [role for role, _ in contents(mended)].count("user") == 2


def test_messages_of_two_people_with_calls_or_with_reasoning_stay_apart() -> None:
    conversation = Conversation(
        (
            Message(Role.USER, "a", name="ann"),
            Message(Role.USER, "b", name="bob"),
            calls("1"),
            calls("2"),
            result("1"),
            result("2"),
            Message(Role.ASSISTANT, "c", reasoning="r"),
            Message(Role.ASSISTANT, "d"),
        )
    )
    assert list(order.mends(conversation, OrderPolicy())) == []
