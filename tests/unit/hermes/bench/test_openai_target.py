"""The peer's protocol, on a transport that sends what a test tells it to, byte by byte where it wants."""

import json
import socket
from collections.abc import AsyncIterator

import httpx2
import pytest

from hermes.bench.loads import Caches
from hermes.bench.openai_target import OpenAITarget
from hermes.bench.targets import Call, TargetError
from hermes.messages import Message

CALL = Call((Message("system", "s"), Message("user", "Grüße")), max_tokens=5, ignore_eos=False, caches=Caches.ON)
USAGE = {"prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


def chunk(content: str | None = None, finish: str | None = None, **delta: str) -> bytes:
    fields = delta if content is None else {"content": content, **delta}
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode()) + b"\n\n"


WHOLE = [
    chunk(role="assistant"),
    chunk(""),
    b": keep-alive\n\n",
    chunk("Grü"),
    chunk("ße."),
    chunk(finish="length"),
    event({"choices": [], "usage": USAGE}),
    event(b"[DONE]"),
]


class Server:
    """Answers with these bytes, in these pieces; keeps the requests."""

    def __init__(
        self,
        pieces: list[bytes],
        status: int = 200,
        kind: str = "text/event-stream; charset=utf-8",
        models: object = None,
    ) -> None:
        self.pieces, self.status, self.kind = pieces, status, kind
        self.models = {"data": [{"id": "m", "max_model_len": 8192, "root": None}]} if models is None else models
        self.bodies: list[dict[str, object]] = []
        self.breaks = False

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json=self.models)
        assert (request.method, request.url.path) == ("POST", "/v1/chat/completions")
        self.bodies.append(json.loads(await request.aread()))
        return httpx2.Response(self.status, headers={"content-type": self.kind}, content=self._sending())

    async def _sending(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        if self.breaks:
            raise httpx2.ReadError("the peer went away")

    def target(self, model: str | None = "m", **extra: object) -> OpenAITarget:
        return OpenAITarget("http://peer:1", model, extra, httpx2.MockTransport(self))


async def asked(server: Server, call: Call = CALL, **extra: object):
    """The reply, and how many pieces of text were heard."""
    heard: list[None] = []
    target = server.target(**extra)
    try:
        reply = await target.answer(call, lambda: heard.append(None))
    finally:
        await target.close()
    return reply, len(heard)


async def test_an_answer_has_its_text_and_what_the_server_counted():
    reply, heard = await asked(Server(WHOLE))
    assert reply == ("Grüße.", 20, 16, 3, None, None)
    assert heard == 2, "only events with text are heard"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_events_are_whole_however_the_bytes_are_split(size, newline):
    everything = b"".join(WHOLE).replace(b"\n", newline)
    pieces = [everything[at : at + size] for at in range(0, len(everything), size)]
    reply, heard = await asked(Server(pieces))
    assert reply == ("Grüße.", 20, 16, 3, None, None)
    assert heard == 2


async def test_the_request_is_greedy_streamed_and_counted():
    server = Server(WHOLE)
    await asked(server)
    assert server.bodies == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Grüße"}],
            "max_tokens": 5,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_answers_of_full_length_and_extra_fields_are_asked_for():
    server = Server(WHOLE)
    await asked(server, Call(CALL.messages, 5, ignore_eos=True, caches=Caches.ON), cache_salt="a", temperature=1)
    assert server.bodies[0]["ignore_eos"] is True
    assert server.bodies[0]["cache_salt"] == "a"
    assert server.bodies[0]["temperature"] == 1


async def test_reasoning_is_heard_and_is_no_part_of_the_answer():
    pieces = [chunk(reasoning_content="hm"), chunk(reasoning="so"), *WHOLE]
    reply, heard = await asked(Server(pieces))
    assert (reply.text, heard) == ("Grüße.", 4)


async def test_a_server_without_a_prefix_cache_has_no_cached_tokens():
    pieces = [*WHOLE[:-2], event({"choices": [], "usage": {**USAGE, "prompt_tokens_details": None}}), WHOLE[-1]]
    assert (await asked(Server(pieces)))[0].cached_tokens == 0


REFUSALS = {
    "refused with a sentence": (
        Server([b'{"error": {"message": "too long", "type": "x"}}'], 400, "application/json"),
        ("HTTP_400", "too long"),
    ),
    "refused by FastAPI": (
        Server([b'{"detail": "no", "message": "bad"}'], 422, "application/json"),
        ("HTTP_422", "bad"),
    ),
    "refused without JSON": (Server([b"<html>busy"], 503, "text/html"), ("HTTP_503", "<html>busy")),
    "failed within the stream": (
        Server([chunk("a"), event({"error": {"message": "out of memory"}}), event(b"[DONE]")]),
        ("STREAM_ERROR", "out of memory"),
    ),
    "failed with a text": (Server([event({"error": "no"})]), ("STREAM_ERROR", "no")),
    "no JSON in the stream": (Server([event(b"{"), event(b"[DONE]")]), ("BAD_JSON", "no JSON object")),
    "JSON of another kind": (Server([event(b"[1]")]), ("BAD_JSON", "no JSON object")),
    "ended before the answer": (Server([chunk("a"), event(b"[DONE]")]), ("BROKEN_STREAM", "before the answer")),
    "ended in the middle of an event": (Server([chunk("a"), WHOLE[3][:10]]), ("BROKEN_STREAM", "before the answer")),
    "not counted": (Server([chunk("a", finish="stop"), event(b"[DONE]")]), ("NO_USAGE", "counts no tokens")),
    "no stream at all": (Server([b"{}"], kind="application/json"), ("SSEError", "text/event-stream")),
}


@pytest.mark.parametrize(("server", "expected"), REFUSALS.values(), ids=REFUSALS)
async def test_what_is_no_answer_is_an_error_that_says_why(server, expected):
    with pytest.raises(TargetError) as error:
        await asked(server)
    assert error.value.reason == expected[0]
    assert expected[1] in error.value.message


async def test_a_connection_that_breaks_within_an_answer_is_an_error():
    server = Server([chunk("a")])
    server.breaks = True
    with pytest.raises(TargetError) as error:
        await asked(server)
    assert (error.value.reason, error.value.message) == ("ReadError", "the peer went away")


async def test_a_server_that_is_not_there_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    target = OpenAITarget(f"http://127.0.0.1:{port}", "m", {})
    with pytest.raises(TargetError) as error:
        await target.answer(CALL, lambda: None)
    await target.close()
    assert error.value.reason == "ConnectError"


async def test_without_a_name_the_first_listed_model_is_asked():
    server = Server(WHOLE)
    target = server.target(model=None)
    await target.begin()
    await target.answer(CALL, lambda: None)
    assert await target.facts() == {"id": "m", "max_model_len": 8192}
    await target.close()
    assert server.bodies[0]["model"] == "m"


async def test_a_server_with_no_model_says_so():
    target = Server([], models={"data": []}).target(model=None)
    with pytest.raises(TargetError, match="lists no model"):
        await target.begin()
    await target.close()


async def test_a_request_cannot_be_kept_out_of_the_cache():
    with pytest.raises(TargetError, match="CACHES_OFF"):
        await asked(Server(WHOLE), Call(CALL.messages, 5, ignore_eos=False, caches=Caches.OFF))
