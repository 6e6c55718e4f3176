"""What every call passes through: errors, one log line, and the gate that closes for draining."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc
from grpc_status import rpc_status

from shared import errors, logs
from shared.errors import HermesError

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic in the stubs only
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
Proceed = Callable[[], Awaitable[Any]]
Around = Callable[[Proceed, Context], Awaitable[Any]]
Behavior = Callable[[Any, Context], Awaitable[Any]]

# A server has a few dozen; callers can make up any number of names.
_MOST_METHODS: Final = 256
# Health and reflection answer while the server drains, and nobody waits for their calls: a watch never ends by itself.
_UNCOUNTED: Final = ("/grpc.health.", "/grpc.reflection.")
_CONSTRUCTORS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

log = logging.getLogger(__name__)


class _Malformed:
    """Stands for a message that could not be parsed."""


class Once(grpc.aio.ServerInterceptor):
    """Has each method's handler made once, and not with each call, by the interceptors after it."""

    def __init__(self) -> None:
        self._made: dict[str, Handler] = {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        method = handler_call_details.method
        made = self._made.get(method)
        if made is None:
            made = await continuation(handler_call_details)
            if made is not None and len(self._made) < _MOST_METHODS:
                self._made[method] = made
        return made


class CallLog(grpc.aio.ServerInterceptor):
    """Logs each call in one line: at debug when it went well or was cancelled, at info when it failed.

    Has to come before the interceptors that answer calls, so that it sees what they make of the call.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        method = handler_call_details.method
        handler = await continuation(handler_call_details)

        async def answer(proceed: Proceed, context: Context) -> Any:
            start, code, reason = time.monotonic(), "OK", ""
            try:
                return await proceed()
            except grpc.aio.AbortError as error:
                code = context.code().name
                reason = error.__cause__.reason if isinstance(error.__cause__, HermesError) else ""
                raise
            except BaseException:  # the caller left, its time was over, or the connection broke
                code = "DEADLINE_EXCEEDED" if context.time_remaining() == 0 else "CANCELLED"
                raise
            finally:
                level = logging.DEBUG if code in {"OK", "CANCELLED"} else logging.INFO
                milliseconds = round((time.monotonic() - start) * 1000, 1)
                extra = {"method": method, "code": code, "reason": reason, "ms": milliseconds}
                log.log(level, "%s: %s after %.1f ms", method, f"{code} {reason}".strip(), milliseconds, extra=extra)

        return handler and _around(handler, answer)


class Errors(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into the status that the caller sees.

    HermesError goes out as it says. Anything else is INTERNAL with a fixed sentence, and in the log without its text.
    CancelledError stays one only where the call itself was cancelled: else gRPC would send no status at all.
    """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            handler = grpc.stream_stream_rpc_method_handler(_unknown(method))

        async def answer(proceed: Proceed, context: Context) -> Any:
            try:
                return await proceed()
            except HermesError as error:
                failure = error
            except (grpc.aio.AbortError, grpc.aio.InternalError):  # has its status already; the connection broke
                raise
            except NotImplementedError:  # what generated servicers raise
                failure = _not_implemented(method)
            except asyncio.CancelledError as error:
                if _was_cancelled():
                    raise
                failure = _unexpected(method, error)
            except Exception as error:  # whatever it was, the caller must hear that the call is over
                failure = _unexpected(method, error)
            return await abort(context, failure)

        return _around(_parsing(handler), answer)


class Gate(grpc.aio.ServerInterceptor):
    """Counts the calls that run; once closed, it refuses new ones with UNAVAILABLE, DRAINING.

    Owned by the server, which closes it to drain, and cuts off what is still running when the time for that is over.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._cut = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def running(self) -> int:
        """Calls that run now."""
        return len(self._running)

    def close(self) -> None:
        """Refuses calls from now on."""
        self._closed = True

    def cut(self) -> None:
        """Ends the calls that still run: their callers get UNAVAILABLE, DRAINING."""
        self._cut = True
        for task in self._running:
            task.cancel()

    async def empty(self) -> None:
        """Returns when no call runs any more."""
        await self._empty.wait()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_UNCOUNTED):
            return handler
        return _around(handler, self._answer)

    async def _answer(self, proceed: Proceed, context: Context) -> Any:
        task = asyncio.current_task()
        if self._closed or task is None:
            raise _draining()
        self._running.add(task)
        self._empty.clear()
        # A call is over when its status is on its way, which is after this.
        context.add_done_callback(lambda _: self._ended(task))  # type: ignore[arg-type]  # the stubs want a class
        try:
            return await proceed()
        except asyncio.CancelledError:
            if not self._cut:
                raise
            task.uncancel()
            raise _draining() from None

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not self._running:
            self._empty.set()


async def abort(context: Context, error: HermesError) -> Any:
    """Ends the call with the error's rich status. Always raises: grpc.aio.AbortError, with the error as its cause."""
    status = rpc_status.to_status(error.status())
    try:
        await context.abort(status.code, status.details, tuple(status.trailing_metadata or ()))
    except grpc.aio.AbortError as aborted:
        raise aborted from error


def _around(handler: Handler, around: Around) -> Handler:
    """The handler with `around` in its place, which gets the handler's own work as something to await."""
    behavior = _behavior(handler)

    async def respond(request: Any, context: Context) -> Any:
        responses = behavior(request, context)
        if not inspect.isasyncgen(responses):
            return await responses
        # Writing here, rather than handing the generator on, closes it at the moment in which the call ends.
        async with aclosing(responses):
            async for response in responses:
                await context.write(response)
        return None

    async def method(request: Any, context: Context) -> Any:
        return await around(lambda: respond(request, context), context)

    return _like(handler, method, handler.request_deserializer)


def _parsing(handler: Handler) -> Handler:
    """The handler, which fails as handlers do where a request cannot be parsed: gRPC parses it before it comes here."""
    behavior, deserialize = _behavior(handler), handler.request_deserializer

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data) if deserialize else data
        except Exception:  # protobuf's own, and what a mistaken encoder makes it raise
            if handler.request_streaming:  # then the handler's own reading leads here
                raise _malformed() from None
            return _Malformed

    def method(request: Any, context: Context) -> Any:
        if request is _Malformed:
            raise _malformed()
        return behavior(request, context)

    return _like(handler, method, parse)


def _behavior(handler: Handler) -> Behavior:
    kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    behavior: Behavior = getattr(handler, "_".join(kind))
    return behavior


def _like(handler: Handler, method: Behavior, deserialize: Callable[[bytes], Any] | None) -> Handler:
    construct = _CONSTRUCTORS[handler.request_streaming, handler.response_streaming]
    return construct(method, request_deserializer=deserialize, response_serializer=handler.response_serializer)


def _was_cancelled() -> bool:
    # gRPC cancels the call's own task when the caller leaves or the deadline passes; a CancelledError that comes out
    # of something awaited leaves the count at zero.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _unknown(method: str) -> Behavior:
    async def refuse(request: Any, context: Context) -> Any:  # noqa: ARG001  the shape of a handler
        raise errors.unimplemented("UNKNOWN_METHOD", f"This server has no method {method}.", method=method)

    return refuse


def _not_implemented(method: str) -> HermesError:
    return errors.unimplemented("NOT_SUPPORTED_YET", f"This server does not support {method} yet.", method=method)


def _unexpected(method: str, error: BaseException) -> HermesError:
    log.error("%s failed unexpectedly\n%s", method, logs.without_text(error), extra={"method": method})
    return errors.internal("INTERNAL", "The server failed on this call; its log says why.")


def _draining() -> HermesError:
    return errors.unavailable("DRAINING", "This server is shutting down; call another one, or this one again later.")


def _malformed() -> HermesError:
    return errors.invalid_argument("MALFORMED_MESSAGE", "The request's bytes are not a message of the declared type.")
