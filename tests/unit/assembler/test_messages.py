import grpc
import pytest

from assembler.messages import Role, canonical
from hermes.v1 import assembler_pb2, types_pb2
from shared.errors import HermesError


def chat(*messages: types_pb2.Message) -> assembler_pb2.Chat:
    return assembler_pb2.Chat(messages=messages)


def message(role: str = "user", **fields: object) -> types_pb2.Message:
    return types_pb2.Message(role=role, **fields)


def refusal(bad: assembler_pb2.Chat) -> HermesError:
    with pytest.raises(HermesError) as caught:
        canonical(bad, "error")
    return caught.value


@pytest.mark.parametrize(
    ("alias", "role"),
    [
        *[(alias, Role.SYSTEM) for alias in ("system", "system_prompt", "developer", "instruction", "instructions")],
        *[(alias, Role.USER) for alias in ("user", "human", "prompter")],
        *[(alias, Role.ASSISTANT) for alias in ("assistant", "bot", "ai", "model", "gpt")],
        *[(alias, Role.TOOL) for alias in ("tool", "function", "tool_result", "observation", "ipython")],
    ],
)
def test_every_alias_is_its_canonical_role_whatever_its_case_and_space(alias: str, role: Role) -> None:
    for written in (alias, alias.upper(), f"  {alias.title()}\n", alias.replace("_", " ")):
        assert canonical(chat(message(written)), "error").messages[0].role is role


def test_an_unknown_role_is_refused_with_the_message_and_the_known_roles() -> None:
    error = refusal(chat(message(), message("wizard")))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_ROLE")
    assert error.metadata["message_index"] == "1"
    for word in ("Message 1", "wizard", "assistant", "system_prompt"):
        assert word in error.message


def test_an_unknown_role_is_a_user_where_the_server_says_so() -> None:
    assert canonical(chat(message("wizard")), "user").messages[0].role is Role.USER


def test_a_chat_without_messages_is_refused() -> None:
    assert refusal(chat()).reason == "NO_MESSAGES"


def test_absent_content_is_empty_and_other_absent_fields_stay_absent() -> None:
    (only,) = canonical(chat(message()), "error").messages
    assert (only.content, only.name, only.tool_call_id, only.reasoning) == ("", None, None, None)


def test_parts_are_joined_without_anything_between_them() -> None:
    parts = [types_pb2.ContentPart(text="a "), types_pb2.ContentPart(text=""), types_pb2.ContentPart(text="b")]
    assert canonical(chat(message(content_parts=parts)), "error").messages[0].content == "a b"


@pytest.mark.parametrize("content", ["", "text"])
def test_content_and_parts_together_are_refused(content: str) -> None:
    parts = [types_pb2.ContentPart(text="a")]
    assert refusal(chat(message(content=content, content_parts=parts))).reason == "CONTENT_CONFLICT"


def test_a_part_that_holds_nothing_is_refused() -> None:
    error = refusal(chat(message(content_parts=[types_pb2.ContentPart()])))
    assert error.reason == "EMPTY_CONTENT_PART"
