from array import array

from hypothesis import given
from hypothesis import strategies as st

from assembler import packed
from hermes.v1 import assembler_pb2, executor_pb2

ids = st.lists(st.integers(0, 2**32 - 1), max_size=300).map(lambda each: array("I", each))


@given(ids)
def test_a_message_with_packed_ids_is_the_one_that_protobuf_makes(given_ids: "array[int]") -> None:
    response = assembler_pb2.AssembleResponse(request_id="r")
    packed.add(response, "token_ids", given_ids)
    assert response == assembler_pb2.AssembleResponse(request_id="r", token_ids=given_ids)
    part = executor_pb2.TokenChunk(end_of_prompt=True)
    packed.add(part, "token_ids", given_ids)
    assert part.SerializeToString() == executor_pb2.TokenChunk(
        token_ids=given_ids, end_of_prompt=True
    ).SerializeToString(deterministic=True)


@given(ids)
def test_bytes_are_little_endian_and_become_the_same_ids(given_ids: "array[int]") -> None:
    data = packed.to_bytes(given_ids)
    assert data == b"".join(each.to_bytes(4, "little") for each in given_ids)
    assert packed.from_bytes(data) == given_ids
