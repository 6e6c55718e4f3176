"""The assembly cache of real processes: over restarts, shared by processes, in trouble; and several on one port."""

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from assembler import model_files
from assembler.model_files import ModelFiles
from assembler.orders import Order
from assembler.pipeline import Assembler
from hermes.v1 import assembler_pb2, assembler_pb2_grpc, types_pb2
from shared import models
from tests.service.test_assembler import Running, chat, process, saying
from tests.unit.assembler.fake_executor import FakeExecutor

NOWHERE = "127.0.0.1:1"
SECONDS = 30
WORDS = "the capital of France is Paris and a river goes through it where people like to walk".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def files(model_directory: Path) -> ModelFiles:
    return model_files.load(model_directory)


def conversation(seed: int, turns: int) -> assembler_pb2.Prompt:
    """The conversation of one caller as it is with its turn of that number; its turns before it are the beginning."""
    chance = random.Random(seed)
    told = [("system", " ".join(random.Random(7).choices(WORDS, k=300)))]
    for _ in range(turns):
        told.append(("user", " ".join(chance.choices(WORDS, k=80))))
        told.append(("assistant", " ".join(chance.choices(WORDS, k=40))))
    return chat(*told[:-1])


def admin(running: Running) -> Any:
    return assembler_pb2_grpc.AssemblerAdminStub(running.channel)


async def stats(running: Running) -> assembler_pb2.GetAssemblyCacheStatsResponse:
    return await admin(running).GetAssemblyCacheStats(assembler_pb2.GetAssemblyCacheStatsRequest())


async def assemble(running: Running, prompt: assembler_pb2.Prompt, **fields: Any) -> assembler_pb2.AssembleResponse:
    return await running.stub.Assemble(assembler_pb2.AssembleRequest(prompt=prompt, **fields), timeout=SECONDS)


@contextlib.asynccontextmanager
async def serving(model: Path, directory: Path, *settings: str) -> AsyncIterator[Running]:
    async with process(model, NOWHERE, "--cache-directory", str(directory), *settings) as running:
        yield running


async def test_a_restart_finds_prompts_and_beginnings_on_disk(model_directory: Path, tmp_path: Path) -> None:
    prompt, grown = conversation(1, 3), conversation(1, 4)
    async with serving(model_directory, tmp_path) as running:
        first = await assemble(running, prompt)
        assert first.info.cached_tokens == 0
        assert running.process.returncode is None
    async with serving(model_directory, tmp_path) as running:
        again = await assemble(running, prompt)
        assert (list(again.token_ids), again.info.cached_tokens) == (list(first.token_ids), len(first.token_ids))
        counted = await stats(running)
        assert (counted.lookups, counted.memory_hits, counted.disk_hits) == (1, 0, 1)
        assert counted.entries == 3  # the prompt, its system part, and it up to its last closed message
    async with serving(model_directory, tmp_path) as running:
        assert (await assemble(running, grown)).info.cached_tokens > 0.9 * len(first.token_ids)
        assert (await stats(running)).prefix_hits == 1
    async with serving(model_directory, tmp_path, "--no-cache") as running:
        assert (await assemble(running, prompt)).info.cached_tokens == 0
        assert (await stats(running)).lookups == 0


async def test_an_answer_s_prompt_comes_from_the_cache_too(model_directory: Path, tmp_path: Path) -> None:
    executor = FakeExecutor(models.tokenizer_fingerprint(model_directory))
    await executor.start()
    executor.script = saying([260, 2], stop_token_id=2)
    async with process(model_directory, executor.address, "--cache-directory", str(tmp_path)) as running:
        await running.becomes(serving=True)
        assembled = await assemble(running, conversation(1, 2))
        (started, *_) = await running.generate(prompt=conversation(1, 2))
        assert started.started.info.cached_tokens == len(assembled.token_ids)
        (part,) = executor.parts
        assert list(part.start.tokens.token_ids) == list(assembled.token_ids)
    await executor.stop()


async def test_rounds_are_dropped_where_the_caller_asks_for_it(model_directory: Path, tmp_path: Path) -> None:
    async with serving(model_directory, tmp_path) as running:
        rounds = assembler_pb2.Truncation(
            mode=assembler_pb2.Truncation.MODE_ROUNDS, max_prompt_tokens=1200, keep_last_rounds=2
        )
        dropped, shares = [], []
        for turns in range(1, 25):
            answer = await assemble(running, conversation(1, turns), truncation=rounds, return_text=True)
            assert len(answer.token_ids) <= 1200
            assert answer.text.startswith("<|im_start|>system\n")
            assert answer.text.count("<|im_start|>user") == turns - answer.info.dropped_rounds
            dropped.append(answer.info.dropped_rounds)
            shares.append(answer.info.cached_tokens / len(answer.token_ids))
            again = await assemble(running, conversation(1, turns), truncation=rounds, return_text=True)
            assert (again.token_ids, again.text, again.info.dropped_rounds) == (
                answer.token_ids, answer.text, answer.info.dropped_rounds,
            )  # fmt: skip
        cuts = [place for place in range(1, len(dropped)) if dropped[place] != dropped[place - 1]]
        assert dropped[-1] > 0
        assert min(later - earlier for earlier, later in pairwise(cuts)) >= 2
        stayed = [share for place, share in enumerate(shares) if place > 0 and place not in cuts]
        assert min(stayed) > 0.7
        # Without a window of the caller's own, the server's: the context less its reserve for the answer.
        long = conversation(2, 70)
        by_server = await assemble(
            running, long, truncation=assembler_pb2.Truncation(mode=assembler_pb2.Truncation.MODE_ROUNDS)
        )
        assert 4000 < len(by_server.token_ids) <= 8192 - 1024
        with pytest.raises(grpc.aio.AioRpcError):
            await assemble(running, long)


async def test_a_broken_database_and_a_directory_that_vanishes_fail_no_request(
    model_directory: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "cache"
    (directory / "entries-1").mkdir(parents=True)
    (directory / "entries-1" / "cache.db").write_bytes(os.urandom(50_000))
    prompt = conversation(1, 2)
    async with serving(model_directory, directory) as running:
        first = await assemble(running, prompt)
        assert (await stats(running)).disk_troubles > 0
        shutil.rmtree(directory)
        for turns in range(1, 6):
            answer = await assemble(running, conversation(3, turns))
            assert answer.token_ids
        assert (await assemble(running, prompt)).token_ids == first.token_ids
        async with asyncio.timeout(SECONDS):
            while not (directory / "entries-1" / "cache.db").exists():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.1)
    assert any("somebody has removed its database" in line for line in running.lines)
    assert not any("Traceback" in line for line in running.lines)


async def keep_asking(running: Running, expected: dict[tuple[int, int], list[int]], seconds: float, seed: int) -> int:
    chance, asked = random.Random(seed), 0
    keys = list(expected)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        key = chance.choice(keys)
        answer = await assemble(running, conversation(*key))
        assert list(answer.token_ids) == expected[key]
        asked += 1
    return asked


async def test_two_processes_on_one_directory_give_no_wrong_answer_and_have_no_trouble(
    model_directory: Path, tmp_path: Path, files: ModelFiles
) -> None:
    plain = Assembler(files)
    expected = {
        (seed, turns): list((await plain.assemble(Order(conversation(seed, turns), None))).ids)
        for seed in range(8)
        for turns in range(1, 7)
    }
    small = ("--cache-memory-bytes", "100KiB", "--cache-disk-bytes", "16MiB")
    async with serving(model_directory, tmp_path, *small) as one, serving(model_directory, tmp_path, *small) as two:
        asked = await asyncio.gather(
            *(keep_asking(running, expected, 3.0, seed) for seed, running in enumerate((one, two, one, two)))
        )
        assert min(asked) > 0
        for running in (one, two):
            counted = await stats(running)
            assert counted.disk_hits > 0
            assert (counted.disk_troubles, counted.damaged, counted.dropped_writes) == (0, 0, 0)
        # What one flushes is gone from the other's memory when the answer is there.
        await assemble(one, conversation(1, 1), cache=types_pb2.CachePolicy(namespace="a"))
        await assemble(two, conversation(1, 1), cache=types_pb2.CachePolicy(namespace="a"))
        await admin(one).FlushAssemblyCache(assembler_pb2.FlushAssemblyCacheRequest(namespace="a"))
        again = await assemble(two, conversation(1, 1), cache=types_pb2.CachePolicy(namespace="a"))
        assert again.info.cached_tokens == 0


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as response:
        lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@contextlib.asynccontextmanager
async def together(model: Path, count: int, *settings: str) -> AsyncIterator[tuple[Running, int, dict[int, int]]]:
    """Several workers on one port: how to ask them, the port of their metrics, and their process ids by number."""
    head: list[str] = []
    async with process(model, NOWHERE, "--workers", str(count), *settings, head=head) as running:
        log = "".join(head)
        port = re.search(r"metrics on http://127.0.0.1:(\d+)/", log)
        assert port is not None, log
        told = re.findall(r"worker (\d+) serves \(no TLS, process (\d+)", log)
        pids = {int(number): int(pid) for number, pid in told}
        assert len(pids) == count
        yield running, int(port[1]), pids


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def ask_anew(running: Running, prompt: assembler_pb2.Prompt) -> assembler_pb2.AssembleResponse:
    """Over a connection of its own, which may come to any of the workers."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(running.address, options=options) as channel:
        stub: Any = assembler_pb2_grpc.AssemblerStub(channel)
        answer = await stub.Assemble(assembler_pb2.AssembleRequest(prompt=prompt), timeout=SECONDS, wait_for_ready=True)
        assert answer.token_ids
        return answer


@pytest.mark.parametrize("disk", ["1GiB", "0"])
async def test_workers_share_a_port_their_counts_and_a_flush(model_directory: Path, tmp_path: Path, disk: str) -> None:
    settings = ("--cache-directory", str(tmp_path), "--cache-disk-bytes", disk)
    async with together(model_directory, 2, *settings) as (running, port, _):
        for _ in range(40):
            await ask_anew(running, conversation(1, 1))
        counted = await stats(running)
        assert counted.lookups == 40
        # Each worker's first look-up may be a miss.
        assert counted.memory_hits + counted.disk_hits >= 38
        assert counted.tokens > 0
        shown = metrics(port)
        lookups = {
            name: value for name, value in shown.items() if name.startswith("hermes_assembly_cache_lookups_total")
        }
        assert sum(lookups.values()) == 40
        assert any(name.startswith("hermes_assembly_stage_seconds_bucket") for name in shown)
        await admin(running).FlushAssemblyCache(assembler_pb2.FlushAssemblyCacheRequest())
        before = await stats(running)
        await ask_anew(running, conversation(1, 1))
        after = await stats(running)
        assert after.memory_hits + after.disk_hits == before.memory_hits + before.disk_hits


async def test_a_worker_that_dies_is_replaced_and_all_are_drained_together(
    model_directory: Path, tmp_path: Path
) -> None:
    async with together(model_directory, 2, "--cache-directory", str(tmp_path)) as (running, _, pids):
        await ask_anew(running, conversation(1, 1))
        os.kill(pids[1], signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            while sum("worker 1 serves" in line for line in running.lines) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for _ in range(10):
            await ask_anew(running, conversation(1, 1))
        assert (await stats(running)).lookups >= 11  # a dead worker's counts stay
        running.process.terminate()
        assert await asyncio.wait_for(running.process.wait(), SECONDS) == 0
    assert any("worker 1 ended with exit code -9; another takes its place" in line for line in running.lines)
    assert not any(map(is_alive, pids.values()))


async def test_workers_end_with_their_parent(model_directory: Path, tmp_path: Path) -> None:
    async with together(model_directory, 2, "--cache-directory", str(tmp_path)) as (running, _, pids):
        running.process.kill()
        await running.process.wait()
        async with asyncio.timeout(SECONDS):
            while any(map(is_alive, pids.values())):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_a_worker_that_cannot_start_ends_all_with_its_sentence(tmp_path: Path) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "assembler", "--port", "0", "--metrics-port", "0",
        "--workers", "2", "--model", str(tmp_path),
        stderr=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    _, said = await asyncio.wait_for(child.communicate(), SECONDS)
    assert child.returncode == 2
    assert b"is not a model directory" in said
    assert b"Traceback" not in said
