"""Proves on a GPU what the unit tests prove on a CPU, and prints how long steps take there. Takes under three minutes.

    python -m tests.gpu.check [--device cuda] [--model DIRECTORY]

Exactness runs in float32 on small models with random weights, against transformers' own greedy generate on the same
device: cold prompts, hits of whole blocks and parts of one, forks, chunks, eviction, preemption. With a model
directory, the figures are for that model in the device's own dtype; else for a random one of a billion weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from executor.engine import Engine
from executor.events import Event, Finished, Generated, Started
from executor.kv.cache import KVCache
from executor.kv.node import Scope
from executor.kv.pool import BlockPool, auto_block_size
from executor.model import GenerationDefaults, Model, choose_device, choose_dtype
from executor.requests import Request, Sampling, Stopping
from executor.scheduler import SchedulerLimits
from shared.metrics import ExecutorMetrics

VOCAB = 211
FAMILIES = {
    "Llama, grouped heads": (transformers.LlamaConfig, {"num_key_value_heads": 2}),
    "Qwen3, normalized heads": (transformers.Qwen3Config, {"num_key_value_heads": 2, "head_dim": 16}),
    "GPT-NeoX, all heads": (transformers.GPTNeoXConfig, {}),
}


def network_of(config_class: type, **options: Any) -> Any:
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return transformers.AutoModelForCausalLM.from_config(config_class(**sizes | options)).eval()


class Driver:
    """An engine that is stepped by hand."""

    def __init__(self, model: Model, *, tokens: int, batch_tokens: int = 512) -> None:
        size = auto_block_size(model.layout)
        self.cache = KVCache(BlockPool(model.layout, tokens // size + 1, size))
        limits = SchedulerLimits(batch_tokens, max_running=32, max_waiting=256)
        self.engine = Engine(model, self.cache, limits, metrics=ExecutorMetrics("check"))

    def submit(self, prompt: Sequence[int], tokens: int) -> list[Event]:
        events: list[Event] = []
        stopping = Stopping(max_tokens=tokens)
        request = Request(tuple(prompt), Sampling(temperature=0.0), stopping, Scope("", "check", "full"))
        self.engine.submit(request, events.append)
        return events

    def run(self, *prompts: Sequence[int], tokens: int = 12) -> list[list[Event]]:
        events = [self.submit(prompt, tokens) for prompt in prompts]
        while self.engine.step():
            self.cache.check()
        for each in events:
            expect_finished(each[-1])
        return events


def words(count: int, seed: int, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, vocab, (count,), generator=generator)]


def ids(events: list[Event]) -> list[int]:
    return [event.choice.token_id for event in events if isinstance(event, Generated)]


def cached(events: list[Event]) -> int:
    return next(event.cached_tokens for event in events if isinstance(event, Started))


def expect_finished(event: Event) -> None:
    if not isinstance(event, Finished):
        raise SystemExit(f"  FAIL {event}")


def expect(what: str, good: bool) -> None:
    print(f"  {'ok  ' if good else 'FAIL'} {what}", flush=True)
    if not good:
        raise SystemExit(1)


def check_exactness(name: str, config_class: type, options: dict[str, Any], device: torch.device) -> None:
    print(name)
    peer = network_of(config_class, **options).to(device)
    model = Model(network_of(config_class, **options).to(device), GenerationDefaults(), frozenset())

    def reference(prompt: Sequence[int], tokens: int = 12) -> list[int]:
        tensor = torch.tensor([list(prompt)], device=device)
        output = peer.generate(
            tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return [int(token) for token in output[0, len(prompt) :]]

    def same(events: list[list[Event]], prompts: Sequence[Sequence[int]], tokens: int = 12) -> bool:
        return [ids(each) for each in events] == [reference(prompt, tokens) for prompt in prompts]

    prompts = [words(count, seed=count) for count in (1, 15, 16, 17, 300, 513)]
    expect("cold prompts", same(Driver(model, tokens=8192).run(*prompts), prompts))
    expect("chunks of 33 tokens", same(Driver(model, tokens=8192, batch_tokens=33).run(*prompts), prompts))
    driver, head = Driver(model, tokens=8192), words(1003, seed=0)
    driver.run([*head, 1, *words(30, seed=1)])
    second = [*head, 2, *words(30, seed=2)]
    events = driver.run(second)
    expect("a hit of 1,003 tokens", cached(events[0]) == len(head) and same(events, [second]))
    forks = [head + words(5 + index, seed=10 + index) for index in range(12)]
    expect("twelve forks in one batch", same(driver.run(*forks, tokens=20), forks, 20))
    tight = Driver(model, tokens=256)
    crowd = [words(50, seed=index) for index in range(6)]
    expect("preemption and eviction", same(tight.run(*crowd, tokens=40), crowd, 40))


def measure(model: Model, device: torch.device) -> None:
    driver = Driver(model, tokens=32 * 700 + 4096)

    def timed(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    cold = [timed(lambda seed=seed: driver.run(words(600, seed, model.vocab_size), tokens=1)) for seed in range(4)]
    print(f"  prefill of 600 tokens, cold            {statistics.median(cold[1:]):8.1f} ms")
    head = words(500, 99, model.vocab_size)
    driver.run(head, tokens=1)
    warm = [
        timed(lambda seed=seed: driver.run(head + words(100, seed, model.vocab_size), tokens=1)) for seed in range(4)
    ]
    print(f"  prefill of 600 tokens, 500 cached      {statistics.median(warm[1:]):8.1f} ms")
    for batch in (1, 8, 32):
        events = [driver.submit(head + words(150, seed, model.vocab_size), 60) for seed in range(batch)]
        while not all(any(isinstance(event, Generated) for event in each) for each in events):
            driver.engine.step()
        steps = [timed(driver.engine.step) for _ in range(20)]
        while driver.engine.step():
            pass
        print(f"  decode, batch {batch:2}, 500 shared + 150 own {statistics.median(steps):8.1f} ms a step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--model", type=Path, help="directory of a model to time; else a random one")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}")
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, (config_class, options) in FAMILIES.items():
        check_exactness(name, config_class, options, device)
    dtype = choose_dtype("auto", device)
    if arguments.model is not None:
        model = Model.load(arguments.model, device, dtype)
    else:
        sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
        network = network_of(
            transformers.LlamaConfig, **sizes, num_key_value_heads=4, vocab_size=32000, initializer_range=0.02
        )
        model = Model(network.to(device, dtype), GenerationDefaults(), frozenset())
    print(f"Timings in {str(dtype).removeprefix('torch.')}")
    measure(model, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
