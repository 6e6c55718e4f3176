"""The executor as the assembler sees it: one channel, a handshake at every connection, one call for each answer."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import grpc

from assembler import packed
from assembler.tokenizer import TokenIds
from hermes.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from shared.errors import HermesError, deadline_exceeded, failed_precondition, from_rpc_error, unavailable

_log: Final = logging.getLogger(__name__)

# Ids in one message: 256 KiB of them. Longer prompts go in parts, so that none comes near a message limit.
PART_TOKENS: Final = 65_536
# A handshake that takes longer means that the executor hangs.
_HANDSHAKE_SECONDS: Final = 5.0
# Between handshakes that failed while the connection stands, for example while the executor still loads.
_AGAIN_SECONDS: Final = 0.5
# The trailer that errors of a Hermes service carry, and gRPC's own do not.
_STATUS_DETAILS: Final = "grpc-status-details-bin"

_CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # An executor that comes back is found within about a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # How long one attempt to connect may take (gRPC names it a backoff); a host that is gone does not refuse.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A call that was admitted may have cost tokens: whether to send it again is the caller's decision.
    ("grpc.enable_retries", 0),
    # An idle connection is kept, because it tells when the executor is gone.
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    # A channel of its own, with its own backoff, also when a process holds several to one address.
    ("grpc.use_local_subchannel_pool", 1),
)

# For a look into the tree, which a busy engine takes between two steps; without it the rest can be told.
_MATCH_SECONDS: Final = 2.0

_Event: TypeAlias = executor_pb2.ExecutorGenerateResponse
_Call: TypeAlias = grpc.aio.StreamStreamCall[
    executor_pb2.ExecutorGenerateRequest, executor_pb2.ExecutorGenerateResponse
]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to run. seconds: what is left of the caller's deadline, None without one."""

    request_id: str
    ids: TokenIds
    sampling: types_pb2.SamplingParams
    stopping: types_pb2.StopParams
    cache: types_pb2.CachePolicy
    seconds: float | None


class Run:
    """One call on the executor: its events, and a way to end single samples."""

    def __init__(self, call: _Call, address: str) -> None:
        self._call = call
        self._address = address

    async def events(self) -> AsyncIterator[_Event]:
        """What the executor says, until it is done. Raises HermesError as the executor gave it."""
        try:
            async for event in self._call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise _as_told(error, self._address) from error

    async def stop_sample(self, index: int) -> None:
        """Ends a sample, the others go on."""
        await self._write(executor_pb2.ExecutorGenerateRequest(stop=executor_pb2.StopSample(index=index)))

    async def send(self, job: Job, fingerprint: str) -> None:
        """Sends the request with its whole prompt."""
        first, *others = _parts(job.ids)
        start = executor_pb2.ExecutorStart(
            request_id=job.request_id,
            tokens=first,
            sampling=job.sampling,
            stopping=job.stopping,
            cache=job.cache,
            tokenizer_fingerprint=fingerprint,
        )
        await self._write(executor_pb2.ExecutorGenerateRequest(start=start))
        for part in others:
            await self._write(executor_pb2.ExecutorGenerateRequest(tokens=part))

    async def _write(self, message: executor_pb2.ExecutorGenerateRequest) -> None:
        """Sends a message; where the call is over already, events() tells why.

        Not by `call.write`: when the executor ends the call at that moment, grpc.aio puts an INTERNAL error of its own
        in the place of what the executor said, be it a refusal or that all went well.
        """
        try:
            await self._call.wait_for_connection()
        except grpc.aio.AioRpcError:
            return
        if not self._call.done():
            with contextlib.suppress(grpc.aio.InternalError):
                await cast("Any", self._call)._cython_call.send_serialized_message(message.SerializeToString())


class Upstream:
    """Owns the channel to the executor and knows whether it can be used."""

    def __init__(
        self, address: str, fingerprint: str, *, max_message_bytes: int, on_change: Callable[[bool], Awaitable[None]]
    ) -> None:
        """fingerprint: digest of the tokenizer that prompts are made with.
        on_change: told whether answers can be had now, whenever that changes.
        """
        self._address = address
        self._fingerprint = fingerprint
        self._on_change = on_change
        limits = (
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
        )
        self._channel = grpc.aio.insecure_channel(address, options=(*_CHANNEL_OPTIONS, *limits))
        self._stub: executor_pb2_grpc.ExecutorAsyncStub = executor_pb2_grpc.ExecutorStub(self._channel)
        self._model: executor_pb2.GetModelInfoResponse | None = None
        self._refusal: HermesError = _gone(address)
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects in the background, and stays at it."""
        self._watcher = asyncio.create_task(self._watch(), name="executor watcher")

    async def close(self) -> None:
        """Ends the calls that still run and the connection."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._channel.close()

    @property
    def model(self) -> executor_pb2.GetModelInfoResponse | None:
        """The executor's model while it can be used, else None."""
        return self._model

    def check(self) -> None:
        """Raises HermesError EXECUTOR_UNAVAILABLE or TOKENIZER_MISMATCH where no answer can be had now."""
        if self._model is None:
            raise self._refusal

    async def held(self, ids: TokenIds, namespace: str, seconds: float | None) -> int | None:
        """How many of a prompt's tokens the executor's tree has; None where it cannot be asked.

        seconds: what is left of the caller's deadline, None without one; half of it is left for the caller.
        """
        if self._model is None:
            return None
        request = executor_pb2.MatchPrefixRequest(namespace=namespace)
        packed.add(request, "token_ids", ids)
        timeout = _MATCH_SECONDS if seconds is None else min(_MATCH_SECONDS, seconds / 2)
        try:
            return (await self._stub.MatchPrefix(request, timeout=timeout)).cached_tokens
        except grpc.aio.AioRpcError as error:
            _log.info("executor %s does not tell what its tree has (%s)", self._address, error.code().name)
            return None

    @contextlib.asynccontextmanager
    async def generate(self, job: Job) -> AsyncIterator[Run]:
        """Starts a job; leaving the context cancels what is still running of it. Raises as `check` does."""
        self.check()
        if job.seconds is not None and job.seconds <= 0:
            raise _too_late()
        call = self._stub.Generate(timeout=job.seconds)
        try:
            run = Run(call, self._address)
            await run.send(job, self._fingerprint)
            yield run
        finally:
            call.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                await self._follow()
            except Exception:
                _log.exception("watching the executor failed; it is tried again")
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow(self) -> None:
        """Shakes hands whenever a connection is there, and says so when none can be had."""
        while True:
            state = self._channel.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                if not await self._shake_hands():
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
            elif state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await self._change(None, _gone(self._address))
            # Idle and connecting say nothing new: an executor ends old connections from time to time.
            await self._channel.wait_for_state_change(state)

    async def _shake_hands(self) -> bool:
        """Asks for the model. False where there was no answer, and it has to be asked again."""
        try:
            model = await self._stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=_HANDSHAKE_SECONDS)
        except grpc.aio.AioRpcError as error:
            await self._change(None, _gone(self._address))
            _log.info("executor %s does not answer yet (%s)", self._address, error.code().name)
            return False
        if model.tokenizer_fingerprint == self._fingerprint:
            await self._change(model, _gone(self._address))
        else:
            await self._change(None, _mismatch(self._fingerprint, model.tokenizer_fingerprint))
        return True

    async def _change(self, model: executor_pb2.GetModelInfoResponse | None, refusal: HermesError) -> None:
        was_usable, is_usable = self._model is not None, model is not None
        news = refusal.reason != self._refusal.reason or was_usable != is_usable
        self._model, self._refusal = model, refusal
        if not news:
            return
        if model is not None:
            _log.info("executor %s serves %s on %s", self._address, model.model, model.device)
        else:
            _log.warning("%s", refusal.message)
        await self._on_change(is_usable)


def _parts(ids: TokenIds) -> list[executor_pb2.TokenChunk]:
    ends = [*range(PART_TOKENS, len(ids), PART_TOKENS), len(ids)]
    parts = []
    for begin, end in itertools.pairwise([0, *ends]):
        part = executor_pb2.TokenChunk(end_of_prompt=end == len(ids))
        packed.add(part, "token_ids", ids[begin:end])
        parts.append(part)
    return parts


def _as_told(error: grpc.aio.AioRpcError, address: str) -> HermesError:
    """The executor's own error; what gRPC itself says of a broken connection or a deadline in words of ours."""
    said_by_executor = any(key == _STATUS_DETAILS for key, _ in error.trailing_metadata() or ())
    if not said_by_executor and error.code() is grpc.StatusCode.UNAVAILABLE:
        return _gone(address)
    if not said_by_executor and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _too_late()
    return from_rpc_error(error)


def _gone(address: str) -> HermesError:
    return unavailable(
        "EXECUTOR_UNAVAILABLE",
        f"The executor at {address} cannot be reached: start it, or try again when it is back.",
        executor=address,
    )


def _too_late() -> HermesError:
    return deadline_exceeded("DEADLINE_EXCEEDED", "The time for the call was over before the answer was complete.")


def _mismatch(own: str, executors: str) -> HermesError:
    return failed_precondition(
        "TOKENIZER_MISMATCH",
        f"The executor's tokenizer ({executors}) is not the assembler's ({own}): give both the same model directory "
        "and the same version of the tokenizers library.",
        assembler_fingerprint=own,
        executor_fingerprint=executors,
    )
