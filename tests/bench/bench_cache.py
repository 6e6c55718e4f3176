"""What the assembly cache saves, beside transformers' own apply_chat_template and a gRPC server that only echoes.

    python -m tests.bench.bench_cache [MODEL DIRECTORY]

Prints one JSON object. Conversations have 40 rounds; each is asked for once before it is measured: `memory_hit` and
`disk_hit` of the whole prompt, `new_turn` of a conversation that has grown by an answer and a question, all in this
process; `assemble` and `echo` over gRPC, from one caller to a server of one process, with the same requests and
responses of the same size. Works take turns, some calls each, as a server has them that is asked all the time;
times are medians, and ratios are medians of the turns' ratios.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import uvloop
from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from assembler import model_files
from assembler.application import COLLECT_AT, SWITCH_SECONDS, Model, assembler_of
from assembler.cache.build import build
from assembler.cache.disk import DiskLimits, DiskTier
from assembler.cache.entry import Entry
from assembler.cache.store import Store
from assembler.metrics import AssemblerMetrics
from assembler.orders import Order
from assembler.recall import COMMON
from hermes.v1 import assembler_pb2, assembler_pb2_grpc
from shared import models
from shared.settings import DEFAULT_MODEL, AssemblerSettings
from tests.bench.bench_assembler import ROUNDS, WORDS, as_prompt, conversation
from tests.service.services import ServiceProcess

# Of each work; in turns of so many.
REPEATS = 60
CALLS = 600
CALLS_A_TURN = 5
LOOK_UPS = 500
TURN_WORDS = 60
READY_SECONDS = 60
POLL_SECONDS = 0.1
LARGEST = (("grpc.max_receive_message_length", 2**26), ("grpc.max_send_message_length", 2**26))


class Remembering:
    """An assembler with a cache in a directory, on an event loop of its own."""

    def __init__(self, model: Path, directory: Path, memory_bytes: int) -> None:
        settings = AssemblerSettings(cache_directory=directory, cache_memory_bytes=memory_bytes)  # type: ignore[arg-type]
        metrics = AssemblerMetrics("bench", CollectorRegistry())
        self._loop = uvloop.new_event_loop()
        self._cache = build(settings, metrics, None)
        self._assembler = assembler_of(settings, Model("bench", "", model_files.load(model)), self._cache, metrics)
        self._loop.run_until_complete(self._cache.start(READY_SECONDS))

    def assemble(self, prompt: assembler_pb2.Prompt) -> int:
        """Tokens that came from the cache."""
        order = Order(prompt, None, cache=COMMON)
        return self._loop.run_until_complete(self._assembler.assemble(order)).cached_tokens

    def close(self) -> None:
        self._loop.run_until_complete(self._cache.close())
        self._assembler.close()
        self._loop.close()


def grown(told: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    chosen = random.Random(seed)
    answer, question = (" ".join(chosen.choices(WORDS, k=TURN_WORDS)) for _ in range(2))
    return [*told, {"role": "assistant", "content": answer}, {"role": "user", "content": question}]


class Found:
    """Times in milliseconds of works that took turns, by work and turn."""

    def __init__(self, turns: dict[str, list[list[float]]]) -> None:
        self._turns = turns

    @property
    def medians(self) -> dict[str, float]:
        """The median of each work."""
        return {name: round(statistics.median(chain(*turns)), 3) for name, turns in self._turns.items()}

    def ratio(self, work: str, other: str) -> float:
        """How many times as long a work took as another: the median of turns, as a machine's speed goes up and down."""
        pairs = zip(self._turns[work], self._turns[other], strict=True)
        return statistics.median(statistics.median(one) / statistics.median(two) for one, two in pairs)


def measured(works: dict[str, Callable[[int], Any]], repeats: int) -> Found:
    """The works, which take turns of some calls each."""
    turns: dict[str, list[list[float]]] = {name: [] for name in works}
    for start in range(0, repeats, CALLS_A_TURN):
        for name, work in works.items():
            times = []
            for place in range(start, start + CALLS_A_TURN):
                started = time.perf_counter()
                work(place)
                times.append(1000 * (time.perf_counter() - started))
            turns[name].append(times)
    return Found(turns)


def in_process(model: Path, directory: Path) -> dict[str, Any]:
    near, far = Remembering(model, directory, 2**28), Remembering(model, directory, 0)
    reference = AutoTokenizer.from_pretrained(model, model_max_length=1_000_000)
    told = [conversation(ROUNDS, seed) for seed in range(REPEATS)]
    prompts = [as_prompt(each) for each in told]
    turns = [as_prompt(grown(each, seed)) for seed, each in enumerate(told)]
    fresh = [conversation(ROUNDS, 1000 + seed) for seed in range(REPEATS)]
    for prompt in prompts:
        near.assemble(prompt)
    while any(far.assemble(prompt) == 0 for prompt in prompts):  # until all are on disk
        time.sleep(POLL_SECONDS)
    gc.collect()
    gc.freeze()
    saved = {"memory_hit": 0, "disk_hit": 0, "new_turn": 0}

    def hit(name: str, kept: Remembering, asked: list[assembler_pb2.Prompt]) -> Callable[[int], None]:
        def work(place: int) -> None:
            saved[name] += kept.assemble(asked[place])

        return work

    found = measured(
        {
            "transformers": lambda place: reference.apply_chat_template(fresh[place], add_generation_prompt=True),
            "memory_hit": hit("memory_hit", near, prompts),
            "disk_hit": hit("disk_hit", far, prompts),
            "new_turn": hit("new_turn", near, turns),
        },
        REPEATS,
    )
    near.close()
    far.close()
    return {
        "milliseconds": found.medians,
        "times_as_fast": {name: round(found.ratio("transformers", name), 1) for name in saved},
        "cached_tokens": {name: count // REPEATS for name, count in saved.items()},
    }


def look_ups(directory: Path) -> dict[str, float]:
    """Microseconds of a look-up of 31 KB on disk, and of one that finds nothing: here, and on the cache's thread."""
    metrics = AssemblerMetrics("bench", CollectorRegistry())
    tier = DiskTier(DiskLimits(directory, 2**28, 3600.0), metrics)
    tier.wait_until_open(READY_SECONDS)
    there = [place.to_bytes(32, "big") for place in range(LOOK_UPS)]
    absent = [place.to_bytes(32, "little") for place in range(1, LOOK_UPS + 1)]
    for key in there:
        tier.put(key, Entry(array("I", range(7700)), time.time()), "")
    loop = uvloop.new_event_loop()
    store = Store.open(directory, 2**28, 3600.0)
    while store.get(there[-1]) is None:
        time.sleep(POLL_SECONDS)
    found = measured(
        {
            "here": lambda place: store.get(there[place]),
            "here_nothing": lambda place: store.get(absent[place]),
            "on_thread": lambda place: loop.run_until_complete(tier.get([there[place]])),
            "on_thread_nothing": lambda place: loop.run_until_complete(tier.get([absent[place]])),
        },
        LOOK_UPS,
    )
    store.close()
    tier.close()
    loop.close()
    return {name: round(1000 * milliseconds, 1) for name, milliseconds in found.medians.items()}


class Echo(assembler_pb2_grpc.AssemblerServicer):
    """Sends the response that the request brings, as bytes of the same size."""

    def __init__(self, response: assembler_pb2.AssembleResponse) -> None:
        self._response = response

    async def Assemble(  # noqa: N802 - the contract's name
        self, request: assembler_pb2.AssembleRequest, context: Any
    ) -> assembler_pb2.AssembleResponse:
        return self._response


def serve_echo(response: bytes, port: Connection) -> None:
    async def serve() -> None:
        server = grpc.aio.server(options=LARGEST)
        echo = Echo(assembler_pb2.AssembleResponse.FromString(response))
        assembler_pb2_grpc.add_AssemblerServicer_to_server(echo, server)
        port.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


@contextmanager
def echo(response: assembler_pb2.AssembleResponse) -> Iterator[str]:
    """Where the echo listens."""
    here, there = multiprocessing.Pipe(duplex=False)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve_echo, args=(response.SerializeToString(), there))
    process.start()
    try:
        yield f"127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


def over_grpc(model: Path, directory: Path) -> dict[str, Any]:
    request = assembler_pb2.AssembleRequest(prompt=as_prompt(conversation(ROUNDS, 1)))
    assembler = ServiceProcess("assembler", "--model", str(model), "--cache-directory", str(directory))
    with ExitStack() as opened:
        opened.callback(assembler.stop)
        channel = opened.enter_context(grpc.insecure_channel(assembler.address, options=LARGEST))
        stub = assembler_pb2_grpc.AssemblerStub(channel)
        stub.Assemble(request)
        response = stub.Assemble(request)
        other = opened.enter_context(grpc.insecure_channel(opened.enter_context(echo(response)), options=LARGEST))
        plain = assembler_pb2_grpc.AssemblerStub(other)
        plain.Assemble(request)
        found = measured(
            {"echo": lambda _: plain.Assemble(request), "assemble": lambda _: stub.Assemble(request)}, CALLS
        )
    return {
        "request_bytes": request.ByteSize(),
        "response_bytes": response.ByteSize(),
        "milliseconds": found.medians,
        "assemble_to_echo": round(found.ratio("assemble", "echo"), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or models.prepare(DEFAULT_MODEL, lambda line: print(line, file=sys.stderr))
    sys.setswitchinterval(SWITCH_SECONDS)  # both as in the assembler's own process
    gc.set_threshold(*COLLECT_AT)
    with TemporaryDirectory() as directory:
        found = {
            "in_process": in_process(model, Path(directory) / "here"),
            "look_up_microseconds": look_ups(Path(directory) / "looked up"),
            "over_grpc": over_grpc(model, Path(directory) / "there"),
        }
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
