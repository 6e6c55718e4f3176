import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from assembler.upstream import PART_TOKENS, Job, Upstream
from hermes.v1 import types_pb2
from shared.errors import HermesError, resource_exhausted
from tests.unit.assembler.fake_executor import FakeExecutor, delta, started


def job(ids: "array[int]" = array("I", [1, 2]), **fields: Any) -> Job:  # noqa: B008 - never written to
    plain = {
        "request_id": "r",
        "sampling": types_pb2.SamplingParams(),
        "stopping": types_pb2.StopParams(),
        "cache": types_pb2.CachePolicy(),
        "seconds": None,
    }
    return Job(ids=ids, **{**plain, **fields})


@pytest.fixture
async def executor() -> AsyncIterator[FakeExecutor]:
    fake = FakeExecutor("f" * 64)
    await fake.start()
    yield fake
    await fake.stop()


@asynccontextmanager
async def connected(address: str, fingerprint: str = "f" * 64) -> AsyncIterator[tuple[Upstream, "asyncio.Queue[bool]"]]:
    """An upstream, and the news that it gives about its health."""
    news: asyncio.Queue[bool] = asyncio.Queue()
    upstream = Upstream(address, fingerprint, max_message_bytes=2**20, on_change=news.put)
    upstream.start()
    try:
        yield upstream, news
    finally:
        await upstream.close()


async def run_through(upstream: Upstream, asked: Job, executor: FakeExecutor | None = None) -> None:
    """Reads an answer to its end; where an executor is given, it dies after the first event."""
    async with upstream.generate(asked) as run:
        async for _ in run.events():
            if executor is not None:
                await executor.stop()


async def failure(upstream: Upstream, asked: Job, executor: FakeExecutor | None = None) -> HermesError:
    with pytest.raises(HermesError) as caught:
        await run_through(upstream, asked, executor)
    return caught.value


async def test_a_long_prompt_goes_in_parts_and_only_the_last_ends_it(executor: FakeExecutor) -> None:
    ids = array("I", range(2 * PART_TOKENS + 1))
    async with connected(executor.address) as (upstream, news):
        assert await news.get()
        cache = types_pb2.CachePolicy(namespace="tenant")
        async with upstream.generate(job(ids, cache=cache)) as run:
            assert len([event async for event in run.events()]) == 2
    start, *others = executor.parts
    chunks = [start.start.tokens, *(part.tokens for part in others)]
    assert [len(chunk.token_ids) for chunk in chunks] == [PART_TOKENS, PART_TOKENS, 1]
    assert [chunk.end_of_prompt for chunk in chunks] == [False, False, True]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(ids)
    assert (start.start.tokenizer_fingerprint, start.start.cache.namespace) == ("f" * 64, "tenant")


async def test_nothing_can_be_asked_before_an_executor_is_there() -> None:
    fake = FakeExecutor("f" * 64)
    await fake.start()
    await fake.stop()
    async with connected(fake.address) as (upstream, news):
        error = await failure(upstream, job())
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
        assert fake.address in error.message
        await fake.start()
        assert await news.get()
        upstream.check()
    await fake.stop()


async def test_an_executor_that_goes_away_mid_answer_fails_the_call_and_serves_again_when_back(
    executor: FakeExecutor,
) -> None:
    async def endless(_: FakeExecutor) -> AsyncIterator[Any]:
        yield started()
        await asyncio.Event().wait()

    executor.script = endless
    async with connected(executor.address) as (upstream, news):
        assert await news.get()
        error = await failure(upstream, job(), executor)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_UNAVAILABLE")
        assert not await news.get()
        await executor.start()
        assert await news.get()
        upstream.check()


async def test_another_tokenizer_is_refused_with_both_digests_until_it_fits(executor: FakeExecutor) -> None:
    executor.model.tokenizer_fingerprint = "0" * 64
    async with connected(executor.address) as (upstream, news):
        assert not await news.get()
        error = await failure(upstream, job())
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TOKENIZER_MISMATCH")
        assert {"f" * 64, "0" * 64} == set(error.metadata.values())
        assert upstream.model is None
        await executor.stop()
        executor.model.tokenizer_fingerprint = "f" * 64
        await executor.start()
        while not await news.get():
            pass
        upstream.check()


async def test_the_executors_errors_pass_through_with_all_they_say(executor: FakeExecutor) -> None:
    executor.error = resource_exhausted("QUEUE_FULL", "Too many wait.", retry_after=1.5, waiting="256")
    async with connected(executor.address) as (upstream, news):
        await news.get()
        error = await failure(upstream, job(array("I", range(3 * PART_TOKENS))))
    assert (error.code, error.reason, error.message) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        "Too many wait.",
    )
    assert (error.metadata["waiting"], error.retry_after) == ("256", 1.5)


async def test_the_deadline_is_passed_on_and_ends_the_call(executor: FakeExecutor) -> None:
    async def endless(_: FakeExecutor) -> AsyncIterator[Any]:
        yield started()
        await asyncio.Event().wait()

    executor.script = endless
    async with connected(executor.address) as (upstream, news):
        await news.get()
        error = await failure(upstream, job(seconds=0.3))
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert executor.seconds is not None
        assert executor.seconds < 1
        assert (await failure(upstream, job(seconds=-1))).reason == "DEADLINE_EXCEEDED"


async def test_leaving_a_call_cancels_it_on_the_executor(executor: FakeExecutor) -> None:
    async def endless(_: FakeExecutor) -> AsyncIterator[Any]:
        yield started()
        while True:
            yield delta(5)
            await asyncio.sleep(0)

    executor.script = endless
    async with connected(executor.address) as (upstream, news):
        await news.get()
        async with upstream.generate(job()) as run:
            await anext(run.events())
        await executor.ended.wait()


async def test_a_sample_is_stopped_by_a_message_on_the_same_call(executor: FakeExecutor) -> None:
    async def until_told(fake: FakeExecutor) -> AsyncIterator[Any]:
        yield started()
        assert (await fake.heard.get()).stop.index == 3

    executor.script = until_told
    async with connected(executor.address) as (upstream, news):
        await news.get()
        async with upstream.generate(job()) as run:
            async for _ in run.events():
                await run.stop_sample(3)
            await run.stop_sample(3)  # the call is over, which is no error


async def test_a_sample_that_ends_while_it_is_being_stopped_is_no_error(executor: FakeExecutor) -> None:
    async with connected(executor.address) as (upstream, news):
        await news.get()
        for _ in range(50):  # the write meets the end of the call at another moment each time
            async with upstream.generate(job()) as run:
                async for _ in run.events():
                    await run.stop_sample(0)


async def test_what_the_tree_has_is_asked_for_no_longer_than_a_caller_waits(executor: FakeExecutor) -> None:
    executor.held = 3
    async with connected(executor.address) as (upstream, news):
        assert await upstream.held(array("I", [1, 2, 3, 4]), "n", None) is None  # before a handshake nobody is asked
        assert await news.get()
        assert await upstream.held(array("I", [1, 2, 3, 4]), "n", None) == 3
        assert (list(executor.asked[0].token_ids), executor.asked[0].namespace) == ([1, 2, 3, 4], "n")
        executor.match_seconds = 30.0
        assert await upstream.held(array("I", [1]), "n", 0.2) is None
        executor.held = None
        assert await upstream.held(array("I", [1]), "n", None) is None
