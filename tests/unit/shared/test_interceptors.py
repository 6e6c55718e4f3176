"""Calls of all four shapes through the interceptors, over a real connection."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared import errors
from shared.errors import HermesError
from shared.interceptors import CallLog, Context, Errors, Gate, Once

SHAPES = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]
INTERNAL = (grpc.StatusCode.INTERNAL, "INTERNAL", "The server failed on this call; its log says why.")
DRAINING = (grpc.StatusCode.UNAVAILABLE, "DRAINING")
PROMPT = "a secret of the caller"

Work = Callable[[Any, Context], Any]


def handler(shape: str, work: Work) -> "grpc.RpcMethodHandler[Any, Any]":
    make = getattr(grpc, f"{shape}_rpc_method_handler")
    return cast("grpc.RpcMethodHandler[Any, Any]", make(work))


@asynccontextmanager
async def serving(gate: Gate | None = None, /, **works: Work) -> AsyncIterator[grpc.aio.Channel]:
    """A server whose method /test.T/<shape> does the work of that name."""
    server = grpc.aio.server(
        interceptors=(Once(), CallLog(), Errors(), gate or Gate()), options=[("grpc.so_reuseport", 0)]
    )
    methods = {name: handler(name, work) for name, work in works.items()}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.T", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def call(channel: grpc.aio.Channel, shape: str, *requests: bytes, **options: Any) -> list[bytes]:
    """All responses of a call."""
    multi = getattr(channel, shape)(f"/test.T/{shape}")
    started = multi(iter(requests) if shape.startswith("stream") else (requests or (b"",))[0], **options)
    if shape.endswith("stream"):
        return [response async for response in started]
    return [await started]


async def failure(channel: grpc.aio.Channel, shape: str, *requests: bytes, **options: Any) -> HermesError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, shape, *requests, **options)
    return errors.from_rpc_error(caught.value)


def raising(error: BaseException) -> dict[str, Work]:
    """For each shape a handler that raises; streams do so after one response."""

    async def single(request: Any, context: Context) -> NoReturn:
        raise error

    async def stream(request: Any, context: Context) -> AsyncIterator[bytes]:
        yield b"first"
        raise error

    return {shape: stream if shape.endswith("stream") else single for shape in SHAPES}


@pytest.mark.parametrize("shape", SHAPES)
async def test_calls_that_go_well_pass_untouched(shape: str) -> None:
    async def whole(request: Any, context: Context) -> bytes:
        return b"".join([part async for part in request]) if shape.startswith("stream") else request

    async def parts(request: Any, context: Context) -> AsyncIterator[bytes]:
        for part in [part async for part in request] if shape.startswith("stream") else (request, b"b"):
            yield part

    async with serving(**{shape: parts if shape.endswith("stream") else whole}) as channel:
        answer = await call(channel, shape, b"a", *([b"b"] if shape != "unary_unary" else []))
    expected = {"unary_unary": [b"a"], "unary_stream": [b"a", b"b"], "stream_unary": [b"ab"]}
    assert answer == expected.get(shape, [b"a", b"b"])


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_hermes_error_reaches_the_caller_whole(shape: str) -> None:
    raised = errors.resource_exhausted("QUEUE_FULL", "256 requests wait already.", retry_after=1.5, waiting="256")
    async with serving(**raising(raised)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, shape, b"")
    error = errors.from_rpc_error(caught.value)
    assert (error.code, error.reason, error.message) == (raised.code, raised.reason, raised.message)
    assert (error.metadata, error.retry_after) == ({"waiting": "256"}, 1.5)
    ((_, data),) = [entry for entry in caught.value.trailing_metadata() if entry[0] == "grpc-status-details-bin"]
    details = status_pb2.Status.FromString(data).details
    assert sum(detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR) for detail in details) == 1


@pytest.mark.parametrize("shape", SHAPES)
async def test_an_unexpected_exception_is_internal_and_its_text_stays_here(
    shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(**raising(RuntimeError(PROMPT))) as channel:
        error = await failure(channel, shape, b"")
    assert (error.code, error.reason, error.message) == INTERNAL
    assert "builtins.RuntimeError" in caplog.text
    assert "in single" in caplog.text or "in stream" in caplog.text
    assert PROMPT not in caplog.text


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_cancellation_from_inside_is_internal_and_leaves_no_caller_hanging(shape: str) -> None:
    async with serving(**raising(asyncio.CancelledError())) as channel:
        error = await failure(channel, shape, b"", timeout=30)
    assert (error.code, error.reason, error.message) == INTERNAL


async def test_a_streaming_handler_may_write_instead_of_yield() -> None:
    async def work(request: Any, context: Context) -> None:
        await context.write(b"one")
        await context.write(b"two")
        if request == b"fail":
            raise errors.internal("BROKEN", "It broke.")

    async with serving(unary_stream=work) as channel:
        assert await call(channel, "unary_stream", b"") == [b"one", b"two"]
        assert (await failure(channel, "unary_stream", b"fail")).reason == "BROKEN"


async def test_a_handlers_own_abort_passes_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    async def work(request: Any, context: Context) -> NoReturn:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")

    caplog.set_level(logging.INFO, "shared")
    async with serving(unary_unary=work) as channel:
        error = await failure(channel, "unary_unary", b"")
    assert (error.code, error.message) == (grpc.StatusCode.NOT_FOUND, "no such thing")
    assert "/test.T/unary_unary: NOT_FOUND after" in caplog.text


async def test_a_caller_that_leaves_cancels_the_handler_and_closes_its_generator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def work(request: Any, context: Context) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.put_nowait("cancelled")
            raise
        finally:
            seen.put_nowait("closed")

    caplog.set_level(logging.DEBUG, "shared")
    async with serving(unary_stream=work) as channel:
        started = channel.unary_stream("/test.T/unary_stream")(b"")
        assert await started.read() == b"first"
        started.cancel()
        assert [await seen.get(), await seen.get()] == ["cancelled", "closed"]
    assert "CANCELLED after" in caplog.text
    assert "unexpectedly" not in caplog.text


async def test_a_generator_that_fills_the_wire_is_closed_when_the_caller_leaves() -> None:
    closed = asyncio.Event()

    async def work(request: Any, context: Context) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 16)
        finally:
            closed.set()

    async with serving(unary_stream=work) as channel:
        started = channel.unary_stream("/test.T/unary_stream")(b"")
        assert await started.read()
        started.cancel()
        await closed.wait()


async def test_a_call_over_its_deadline_is_told_so_and_logged_so(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def work(request: Any, context: Context) -> NoReturn:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    caplog.set_level(logging.INFO, "shared")
    async with serving(unary_unary=work) as channel:
        error = await failure(channel, "unary_unary", b"", timeout=0.2)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await ended.wait()
        async with asyncio.timeout(10):
            while "/test.T/unary_unary: DEADLINE_EXCEEDED after" not in caplog.text:  # noqa: ASYNC110 -- a log tells nobody
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_method_that_nobody_serves_is_unimplemented(shape: str) -> None:
    async with serving() as channel:
        error = await failure(channel, shape, b"")
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNKNOWN_METHOD")
    assert error.metadata == {"method": f"/test.T/{shape}"}


async def test_a_methods_handler_is_made_once_and_not_for_any_number_of_names() -> None:
    made = []

    async def make(details: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        made.append(details.method)
        return handler("unary_unary", lambda request, _: request)

    once = Once()
    for _ in range(3):
        for name in ("/test.T/one", "/test.T/two"):
            assert await once.intercept_service(make, SimpleNamespace(method=name)) is not None  # type: ignore[arg-type]
    assert made == ["/test.T/one", "/test.T/two"]
    for number in range(10_000):
        await once.intercept_service(make, SimpleNamespace(method=f"/test.T/{number}"))  # type: ignore[arg-type]
    kept = len(made)
    for number in range(10_000):
        await once.intercept_service(make, SimpleNamespace(method=f"/test.T/{number}"))  # type: ignore[arg-type]
    assert 9_000 < len(made) - kept < 10_000


@asynccontextmanager
async def executor(servicer: executor_pb2_grpc.ExecutorServicer) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=(Once(), CallLog(), Errors(), Gate()))
    executor_pb2_grpc.add_ExecutorServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def test_a_method_left_to_the_generated_servicer_is_not_supported_yet() -> None:
    async with executor(executor_pb2_grpc.ExecutorServicer()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await executor_pb2_grpc.ExecutorStub(channel).GetLoad(executor_pb2.GetLoadRequest())
    error = errors.from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_SUPPORTED_YET")
    assert error.message == "This server does not support /hermes.v1.Executor/GetLoad yet."


@pytest.mark.parametrize(("shape", "method"), [("unary_unary", "GetLoad"), ("stream_stream", "Generate")])
async def test_bytes_that_are_no_message_are_the_callers_fault(shape: str, method: str) -> None:
    class Servicer(executor_pb2_grpc.ExecutorServicer):
        async def GetLoad(self, request: Any, context: Any) -> executor_pb2.GetLoadResponse:  # noqa: N802  gRPC's name
            return executor_pb2.GetLoadResponse()

        async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]  # noqa: N802  gRPC
            async for _ in request:
                yield executor_pb2.ExecutorGenerateResponse()

    async with executor(Servicer()) as channel:
        multi = getattr(channel, shape)(f"/hermes.v1.Executor/{method}")
        started = multi(iter([b"\xff"])) if shape == "stream_stream" else multi(b"\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (started.read() if shape == "stream_stream" else started)
    error = errors.from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


async def test_failures_are_logged_with_their_reason_and_successes_only_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def well(request: Any, context: Context) -> bytes:
        return b""

    caplog.set_level(logging.DEBUG, "shared")
    works = raising(errors.invalid_argument("NO_MESSAGES", PROMPT)) | {"unary_unary": well}
    async with serving(**works) as channel:
        await call(channel, "unary_unary", b"")
        await failure(channel, "unary_stream", b"")
    good, bad = (record for record in caplog.records if record.name == "shared.interceptors")
    assert (good.levelno, vars(good)["code"]) == (logging.DEBUG, "OK")
    assert (bad.levelno, vars(bad)["code"], vars(bad)["reason"]) == (logging.INFO, "INVALID_ARGUMENT", "NO_MESSAGES")
    assert bad.getMessage().startswith("/test.T/unary_stream: INVALID_ARGUMENT NO_MESSAGES after ")
    assert PROMPT not in caplog.text


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_closed_gate_refuses_calls(shape: str) -> None:
    gate = Gate()
    gate.close()
    async with serving(gate, **raising(AssertionError())) as channel:
        error = await failure(channel, shape, b"")
    assert (error.code, error.reason) == DRAINING


async def test_a_gate_is_empty_when_the_calls_before_it_closed_have_ended() -> None:
    gate, running, finish = Gate(), asyncio.Event(), asyncio.Event()

    async def work(request: Any, context: Context) -> bytes:
        running.set()
        await finish.wait()
        return b"done"

    async with serving(gate, unary_unary=work) as channel:
        await gate.empty()
        first = asyncio.create_task(call(channel, "unary_unary", b""))
        await running.wait()
        gate.close()
        assert gate.running == 1
        assert (await failure(channel, "unary_unary", b"")).reason == "DRAINING"
        finish.set()
        await gate.empty()
        assert (gate.running, await first) == (0, [b"done"])


@pytest.mark.parametrize("shape", ["unary_unary", "unary_stream"])
async def test_calls_that_are_cut_off_hear_why(shape: str) -> None:
    gate, running = Gate(), asyncio.Event()

    async def single(request: Any, context: Context) -> NoReturn:
        running.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def stream(request: Any, context: Context) -> AsyncIterator[bytes]:
        yield b"first"
        await single(request, context)

    async with serving(gate, **{shape: stream if shape == "unary_stream" else single}) as channel:
        failed = asyncio.create_task(failure(channel, shape, b""))
        await running.wait()
        gate.close()
        gate.cut()
        await gate.empty()
        error = await failed
    assert (error.code, error.reason) == DRAINING
