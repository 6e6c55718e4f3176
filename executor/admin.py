"""The servicer for operators: warm, pin, describe and flush the prefix tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import grpc
import numpy as np

from executor.engine import Engine
from executor.events import Failed, Finished, Started
from executor.kv.description import Branch
from executor.kv.pins import Pin, PinLimitError, UnknownPinError
from executor.mailbox import Mailbox, Outbox
from executor.requests import Request
from executor.translate import Translator
from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared.durations import duration
from shared.errors import HermesError, failed_precondition, invalid_argument, not_found, resource_exhausted

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

_BRANCHES: Final = 20  # what the contract lists where a caller names no number
_LONGEST_PIN_SECONDS: Final = 100 * 365 * 86400
_TRIES: Final = 3  # a full pool may evict a prefix between its last step and the pin


class ExecutorAdminService(executor_pb2_grpc.ExecutorAdminServicer):
    """hermes.v1.ExecutorAdmin over one engine."""

    def __init__(
        self, engine: Engine, outbox: Outbox, translator: Translator, *, bytes_per_token: int, show_prompts: bool
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._translator = translator
        self._bytes_per_token = bytes_per_token
        self._show_prompts = show_prompts

    async def WarmPrefix(
        self, request: executor_pb2.WarmPrefixRequest, context: Context
    ) -> executor_pb2.WarmPrefixResponse:
        """Computes a prefix where it is not there yet, and pins it where that is asked for."""
        self._translator.check_length(len(request.token_ids))
        prefix = self._translator.prefix(np.array(request.token_ids, dtype=np.uint32).tolist(), request.namespace)
        seconds = request.pin.seconds + request.pin.nanos * 1e-9 if request.HasField("pin") else None
        if seconds is not None and not 0 < seconds <= _LONGEST_PIN_SECONDS:
            raise invalid_argument(
                "BAD_PIN", "pin must be longer than nothing and at most a hundred years; leave it out.", field="pin"
            )
        keepable = await self._ask(lambda: self._engine.cache.keepable(len(prefix.prompt)))
        if seconds is not None:
            await self._check_pin(prefix, keepable)
        computed = 0
        for _ in range(_TRIES):
            computed += await self._warm(prefix, keepable)
            pin = None if seconds is None else await self._pin(prefix, keepable, time.monotonic() + seconds)
            if seconds is None or pin is not None:
                return executor_pb2.WarmPrefixResponse(
                    cached_tokens=max(len(prefix.prompt) - computed, 0) if computed else keepable,
                    computed_tokens=min(computed, len(prefix.prompt)),
                    pin_id=pin.id if pin else "",
                )
        raise resource_exhausted(
            "POOL_BUSY", "Running requests need the blocks of this prefix; try again later.", retry_after=1.0
        )

    async def UnpinPrefix(
        self, request: executor_pb2.UnpinPrefixRequest, context: Context
    ) -> executor_pb2.UnpinPrefixResponse:
        """Ends a pin."""
        try:
            await self._ask(lambda: self._engine.cache.pins.unpin(request.pin_id))
        except UnknownPinError:
            raise not_found(
                "UNKNOWN_PIN", f"There is no pin {request.pin_id[:64]!r}; it may have ended.", pin_id=request.pin_id
            ) from None
        return executor_pb2.UnpinPrefixResponse()

    async def DescribeTree(
        self, request: executor_pb2.DescribeTreeRequest, context: Context
    ) -> executor_pb2.DescribeTreeResponse:
        """The tree's counters since the start, and its largest branches."""
        namespace, most = request.namespace or None, request.max_branches or _BRANCHES

        def look() -> executor_pb2.DescribeTreeResponse:
            cache, scheduler, jobs = self._engine.cache, self._engine.scheduler, self._engine.jobs
            stats, running = cache.stats, (job.nodes() for job in jobs)
            return executor_pb2.DescribeTreeResponse(
                nodes=stats.nodes,
                tokens=stats.tokens,
                bytes=stats.nodes * cache.block_size * self._bytes_per_token,
                requests=jobs.admissions.requests,
                prompt_tokens=jobs.admissions.prompt_tokens,
                cached_tokens=jobs.admissions.cached_tokens,
                copied_tokens=stats.copied_tokens,
                waited_requests=scheduler.waited_requests,
                evicted_blocks=stats.evicted_blocks,
                pruned_branches=stats.pruned_branches,
                preemptions=scheduler.preemptions,
                branches=[self._branch(branch) for branch in cache.describe(namespace, most, running)],
            )

        return await self._ask(look)

    async def FlushTree(
        self, request: executor_pb2.FlushTreeRequest, context: Context
    ) -> executor_pb2.FlushTreeResponse:
        """Drops every cached block, or those of one namespace, pins too."""
        freed = await self._ask(lambda: self._engine.cache.flush(request.namespace or None))
        return executor_pb2.FlushTreeResponse(freed_blocks=freed)

    async def _warm(self, prefix: Request, keepable: int) -> int:
        """Sees to it that the tree has all that it can keep of the prefix. Returns how many tokens that computed."""
        if await self._ask(lambda: self._engine.cache.covers(prefix.scope, prefix.prompt)) >= keepable > 0:
            return 0
        mailbox = Mailbox()
        job = self._engine.submit(prefix, lambda event: self._outbox.put(mailbox, event))
        cached = 0
        try:
            while True:
                for event in await mailbox.take():
                    match event:
                        case Started():
                            cached = event.cached_tokens
                        case Failed(error):
                            raise error
                        case Finished():
                            return len(prefix.prompt) - cached
        finally:
            self._engine.cancel(job)

    async def _check_pin(self, prefix: Request, keepable: int) -> None:
        """Refuses a pin that cannot be made, before its prefix is computed."""
        if not keepable:
            raise failed_precondition(
                "NOT_CACHEABLE", "This executor keeps no prefix of this length, so there is nothing to pin."
            )
        try:
            await self._ask(lambda: self._engine.cache.pins.check(prefix.scope, prefix.prompt[:keepable]))
        except PinLimitError as error:
            raise _over_the_limit(error) from None

    async def _pin(self, prefix: Request, keepable: int, until: float) -> Pin | None:
        """Pins the prefix; None where the tree has lost a part of it meanwhile."""

        def pin() -> Pin | None:
            cache = self._engine.cache
            if cache.covers(prefix.scope, prefix.prompt) < keepable:
                return None
            return cache.pins.pin(prefix.scope, prefix.prompt, until)

        try:
            return await self._ask(pin)
        except PinLimitError as error:
            raise _over_the_limit(error) from None

    def _branch(self, branch: Branch) -> executor_pb2.Branch:
        return executor_pb2.Branch(
            id=branch.id,
            parent_id=branch.parent_id,
            namespace=branch.namespace,
            start=branch.start,
            tokens=branch.tokens,
            children=branch.children,
            running_requests=branch.running,
            hits=branch.hits,
            idle=duration(branch.idle),
            pinned=branch.pinned,
            head_token_ids=branch.head if self._show_prompts else (),
        )

    async def _ask(self, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._engine.call(work))


def _over_the_limit(error: PinLimitError) -> HermesError:
    return resource_exhausted("PIN_LIMIT", f"{error}; unpin something, or raise max_pinned.", retry_after=60.0)
