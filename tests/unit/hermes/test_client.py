import asyncio

import grpc
import pytest

from hermes.channels import unreachable
from hermes.client import AsyncClient, Client, HermesError, Message, ToolCall, Usage
from hermes.health import ASSEMBLER, GENERATE, probe
from hermes.v1 import assembler_pb2
from shared.errors import invalid_argument, resource_exhausted, unavailable
from tests.unit.hermes.fake_assembler import CALLING, FakeAssembler, delta, finished, started, usage


@pytest.fixture
def client(assembler):
    with Client(assembler.address) as client:
        yield client


def test_chat_returns_the_whole_answer(client):
    answer = client.chat("What is the capital of France?")
    assert answer.text == "Paris."
    assert answer.token_ids == (10, 11, 2)
    assert answer.finish_reason == "stop"
    assert answer.samples[0].matched_stop == 2
    assert answer.usage == Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=4)
    assert answer.info.cached_tokens == 5
    assert answer.timings.prefill == pytest.approx(0.25)
    assert answer.time_to_first_token is not None


def test_a_stream_gives_the_text_in_pieces_and_the_answer_at_its_end(client):
    stream = client.stream("hi")
    assert list(stream) == ["Par", "is."]
    assert stream.answer.text == "Paris."


def test_the_answer_of_a_stream_that_has_not_ended_is_an_error(client):
    with client.stream("hi") as stream, pytest.raises(RuntimeError, match="has not ended"):
        _ = stream.answer


def test_samples_are_kept_apart(assembler, client):
    assembler.events = [
        started(),
        delta("a", 1, index=1),
        delta("b", 2),
        delta("c", 3, index=1),
        finished(1),
        finished(0, usage=usage()),
    ]
    stream = client.stream("hi", n=2)
    assert [(piece.index, piece.text) for piece in stream.deltas()] == [(1, "a"), (0, "b"), (1, "c")]
    assert [sample.text for sample in stream.answer.samples] == ["b", "ac"]
    assert stream.answer.text == "b"
    assert assembler.requests[0].sampling.n == 2


def test_reasoning_and_calls_stand_beside_the_text(assembler, client):
    assembler.events = CALLING
    answer = client.chat("hi", tools=[{"name": "find"}])
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Let me see.", "I do not know.", "tool_calls")
    assert answer.tool_calls == (ToolCall("find", '{"q": "é"}', "abcdefghi"),)
    assert answer.token_ids == (5, 6, 7, 10, 11, 2)
    stream = client.stream("hi")
    assert [piece.reasoning for piece in stream.deltas()] == ["I do not", " know.", "", ""]


def test_an_answers_calls_can_be_sent_again_with_their_results(assembler, client):
    assembler.events = CALLING
    answer = client.chat("hi")
    called = Message("assistant", answer.text, tool_calls=answer.tool_calls, reasoning=answer.reasoning)
    client.chat([Message("user", "hi"), called, Message("tool", "5", tool_call_id=answer.tool_calls[0].id)])
    _, sent, result = assembler.requests[1].prompt.chat.messages
    assert (sent.tool_calls[0].arguments_json, sent.reasoning) == ('{"q": "é"}', "I do not know.")
    assert result.tool_call_id == sent.tool_calls[0].id == "abcdefghi"


def test_leaving_a_stream_early_cancels_the_call(assembler, client):
    assembler.hold = True
    for _ in client.stream("hi"):
        break
    assert assembler.gone.wait(10)


def test_leaving_the_with_block_of_a_stream_cancels_the_call(assembler, client):
    assembler.hold = True
    with client.stream("hi") as stream:
        assert next(iter(stream)) == "Par"
    assert assembler.gone.wait(10)


def test_a_deadline_ends_the_call(assembler):
    assembler.hold = True
    with Client(assembler.address, timeout=0.2) as client, pytest.raises(HermesError, match="longer timeout") as caught:
        client.chat("hi")
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_an_error_keeps_its_reason_metadata_and_delay(assembler, client):
    assembler.events, assembler.error = (
        [],
        resource_exhausted("QUEUE_FULL", "Too much to do.", retry_after=1.5, waiting="9"),
    )
    with pytest.raises(HermesError, match="Too much to do") as caught:
        client.chat("hi")
    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.metadata == {"waiting": "9"}
    assert caught.value.retry_after == pytest.approx(1.5)


def test_an_error_in_the_middle_follows_the_text_that_came(assembler, client):
    assembler.events, assembler.error = (
        [started(), delta("Par", 10)],
        unavailable("EXECUTOR_UNAVAILABLE", "It is gone."),
    )
    pieces = []
    with pytest.raises(HermesError, match="gone"):
        pieces.extend(client.stream("hi"))
    assert len(assembler.requests) == 1, "what has begun is never tried again"


def test_what_fails_before_it_begins_is_tried_again(assembler, client):
    assembler.events, assembler.error = [], unavailable("DRAINING", "Ask another.")
    with pytest.raises(HermesError, match="Ask another"):
        client.chat("hi")
    assert len(assembler.requests) == 3


def test_a_stream_that_ends_before_its_answer_is_an_error(assembler, client):
    assembler.events = [started(), delta("Par", 10)]
    with pytest.raises(HermesError) as caught:
        client.chat("hi")
    assert caught.value.reason == "BROKEN_STREAM"


def test_nobody_at_the_address_is_a_sentence_with_the_address():
    with Client("127.0.0.1:1") as client, pytest.raises(HermesError, match=r"127\.0\.0\.1:1") as caught:
        client.chat("hi")
    assert caught.value.reason == "ASSEMBLER_UNREACHABLE"


def test_a_ca_file_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(HermesError, match="cannot be read"):
        Client(tls_ca=tmp_path / "ca.pem")


def test_a_ca_file_without_a_certificate_is_a_sentence(tmp_path):
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(HermesError, match="no PEM certificate") as caught:
        Client(tls_ca=tmp_path / "ca.pem")
    assert caught.value.metadata == {"field": "tls_ca"}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "dns:///host:1", "unix:/run/hermes.sock", "my_host:1"])
def test_every_form_of_address_that_grpc_takes_is_taken(address):
    Client(address).close()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "soon", True])
def test_a_timeout_that_is_no_time_is_refused_before_the_call(client, assembler, timeout):
    for call in (lambda: client.chat("hi", timeout=timeout), lambda: Client(timeout=timeout)):
        with pytest.raises(HermesError, match="timeout cannot be") as caught:
            call()
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert assembler.requests == []


def test_an_endless_timeout_is_no_limit(client):
    assert client.chat("hi", timeout=float("inf")).text == "Paris."
    assert client.chat("hi", timeout=1e30).text == "Paris."


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("tls handshake failed: ssl_error_ssl: wrong_version_number: invalid certificate", "does not speak TLS"),
        ("tls handshake failed: certificate_verify_failed: self signed certificate", "does not trust"),
        ("custom verification check failed: hostname verification check failed", "for another name"),
        ("ipv4:127.0.0.1:1: Socket closed", "where it is TLS, give --tls-ca"),
        ("address lookup failed: domain name not found", "spelled right"),
        ("connect: Network is unreachable", "no way to that network"),
        ("connect: Connection refused", "is it started"),
    ],
)
def test_a_failed_connection_says_what_is_likely_wrong(said, sentence):
    assert sentence in unreachable(unavailable("UNAVAILABLE", said), "assembler", "x:1").message


def test_plaintext_where_tls_was_asked_for_is_said(assembler, certificate):
    with Client(assembler.address, tls_ca=certificate) as client, pytest.raises(HermesError, match="not speak TLS"):
        client.chat("hi")


def test_assemble_returns_ids_and_text(assembler, client):
    result = client.assemble([Message("user", "hi")])
    assert result.token_ids == (1, 4093, 198)
    assert result.text == "<|im_start|>"
    assert client.assemble("hi", return_text=False).text is None


def looked_at() -> assembler_pb2.ExplainResponse:
    piece = assembler_pb2.Segment(
        text="Hi", token_ids=[4, 5], message_index=0, kind=assembler_pb2.Segment.KIND_CONTENT, cached_tokens=1
    )
    return assembler_pb2.ExplainResponse(text="Hi", segments=[piece], tree_cached_tokens=2, request_id="r1")


def test_explain_returns_the_prompt_in_pieces(assembler, client):
    assembler.explained = looked_at()
    found = client.explain("Hi", system="Be brief.", namespace="n", cache_read=False, request_id="r1")
    assert found.token_ids == (4, 5)
    assert (found.text, found.tree_cached_tokens, found.request_id) == ("Hi", 2, "r1")
    (piece,) = found.segments
    assert (piece.kind, piece.message_index, piece.cached_tokens, piece.control) == ("content", 0, 1, False)
    request = assembler.requests[0]
    assert [each.content for each in request.prompt.chat.messages] == ["Be brief.", "Hi"]
    assert (request.cache.namespace, request.cache.read, request.request_id) == ("n", False, "r1")
    with pytest.raises(TypeError, match="return_text"):
        client.explain("Hi", return_text=True)


def test_what_was_not_told_is_none(assembler, client):
    assembler.explained = assembler_pb2.ExplainResponse(segments=[assembler_pb2.Segment(text="x")])
    found = client.explain(text="x")
    assert found.tree_cached_tokens is None
    assert found.segments[0].message_index is None
    assert found.segments[0].kind == "raw"


async def test_asyncio_explain(assembler):
    assembler.explained = looked_at()
    async with AsyncClient(assembler.address) as client:
        assert (await client.explain("Hi")).token_ids == (4, 5)
        assembler.error = invalid_argument("PROMPT_EMPTY", "The prompt has no tokens.")
        with pytest.raises(HermesError) as caught:
            await client.explain("Hi")
    assert caught.value.reason == "PROMPT_EMPTY"


def test_health_tells_each_service_state(assembler, client):
    assembler.set_health(ASSEMBLER, serving=True)
    assembler.set_health(GENERATE, serving=False)
    assert [health.state for health in client.health()] == ["serving", "not serving"]
    assert probe("hermes.v1.Nobody", assembler.address).state == "unknown"
    assert probe(ASSEMBLER, "127.0.0.1:1").state == "unreachable"


async def test_asyncio_chat_returns_the_whole_answer(assembler):
    async with AsyncClient(assembler.address) as client:
        answer = await client.chat("hi", temperature=0)
    assert answer.text == "Paris."
    assert assembler.requests[0].sampling.HasField("temperature")


async def test_asyncio_stream_gives_pieces_then_the_answer(assembler):
    async with AsyncClient(assembler.address) as client, client.stream("hi") as stream:
        assert [piece async for piece in stream] == ["Par", "is."]
        assert stream.answer.usage.completion_tokens == 3


async def test_leaving_an_asyncio_stream_cancels_the_call(assembler: FakeAssembler):
    assembler.hold = True
    async with AsyncClient(assembler.address) as client:
        async with client.stream("hi") as stream:
            async for _ in stream:
                break
        await _gone(assembler)


async def test_asyncio_errors_assemble_and_health(assembler):
    assembler.set_health(ASSEMBLER, serving=True)
    async with AsyncClient(assembler.address) as client:
        assert (await client.assemble("hi")).token_ids == (1, 4093, 198)
        assert [health.state for health in await client.health()] == ["serving", "unknown"]
        assembler.error, assembler.events = resource_exhausted("QUEUE_FULL", "Too much.", retry_after=1), []
        with pytest.raises(HermesError, match="Too much"):
            await client.chat("hi")
        with pytest.raises(HermesError, match="Too much"):
            await client.assemble("hi")


async def _gone(assembler: FakeAssembler) -> None:
    assert await asyncio.to_thread(assembler.gone.wait, 10)
