"""How long the engine's steps take, beside transformers' own on the same model in the same run.

    make bench-engine

Decode: one token for each of 1, 8 and 32 sequences that share 500 tokens and have 150 of their own, and of 8 that have
650 of their own. On a CPU with the native attention kernel, and without it.
Prefill: a prompt of 600 tokens, cold, and with 500 of them in the prefix tree.
Stall: the time from token to token of 8 answers while a prompt of 2,000 tokens is computed beside them.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from executor.additions import additions
from executor.engine import Engine
from executor.kv.node import Scope
from executor.memory import build_cache
from executor.model import Model, choose_device, choose_dtype
from executor.native.adoption import obtain
from executor.native.operators import NoKernelError
from executor.pace import step_tokens
from executor.requests import Job, Request, Sampling, Stopping
from executor.scheduler import SchedulerLimits
from shared.metrics import ExecutorMetrics
from shared.models import prepare
from shared.settings import DEFAULT_MODEL, ExecutorSettings

PROMPT, CACHED = 600, 500
SHARED, OWN = 500, 150
ANSWERS, LONG = 8, 2000
DECODES = ((1, SHARED, OWN), (8, SHARED, OWN), (32, SHARED, OWN), (8, 0, SHARED + OWN))
"""How many sequences, tokens that they share, tokens of each one's own."""


class Bench:
    """An engine that is stepped by hand, and the same weights under transformers' own attention and cache."""

    def __init__(self, directory: Path, settings: ExecutorSettings) -> None:
        device = choose_device(settings.device)
        dtype = choose_dtype(settings.dtype, device)
        self.model = Model.load(directory, device, dtype, settings.cpu_linear)
        self.cache = build_cache(self.model.layout, settings)
        limits = SchedulerLimits(
            settings.max_batch_tokens,
            settings.max_running,
            settings.max_waiting,
            max_stall=settings.max_stall,
            step_tokens=step_tokens(self.model),
        )
        self.engine = Engine(self.model, self.cache, limits, metrics=ExecutorMetrics("bench"))
        self.peer = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
        for each in additions("auto", self.model, self.engine):
            try:
                obtain(each, threading.Event())
            except NoKernelError as reason:
                each.leave_out(reason)
        self.engine.step()
        self.kernels = [None] if self.engine.kernel is None else [None, self.engine.kernel]
        """torch's own, then what there is besides."""
        self.random = random.Random(1)

    def words(self, count: int) -> list[int]:
        return [self.random.randrange(self.model.vocab_size) for _ in range(count)]

    def submit(self, prompt: Sequence[int], tokens: int) -> Job:
        request = Request(
            tuple(prompt), Sampling(temperature=0.0), Stopping(max_tokens=tokens), Scope("", "bench", "full")
        )
        return self.engine.submit(request, lambda _: None)

    def drain(self) -> None:
        while self.engine.step():
            pass

    def decode(self, batch: int, shared: int, own: int, steps: int) -> list[float]:
        """Median seconds of a decode step of the engine, with each of the kernels in turn."""
        self._answer(batch, shared, own, len(self.kernels) * steps + 50)
        times: list[list[float]] = [[] for _ in self.kernels]
        for _ in range(steps):
            for kernel, taken in zip(self.kernels, times, strict=True):
                self.engine.kernel = kernel
                taken.append(self._timed(self.engine.step))
        self._leave()
        return [statistics.median(taken) for taken in times]

    def stall(self, steps: int) -> list[float]:
        """95th percentiles of the seconds from token to token of ANSWERS answers: alone, and while a prompt runs."""
        self.engine.kernel = self.kernels[-1]
        self._answer(ANSWERS, SHARED, OWN, 4000)
        alone = [self._timed(self.engine.step) for _ in range(steps)]
        prompt = self.submit(self.words(LONG), 1)
        beside = [self._timed(self.engine.step)]
        while prompt in self.engine.jobs:
            beside.append(self._timed(self.engine.step))
        self._leave()
        return [statistics.quantiles(times, n=20, method="inclusive")[-1] for times in (alone, beside)]

    def _answer(self, batch: int, shared: int, own: int, tokens: int) -> None:
        """So many requests, all of which decode from now on."""
        head = self.words(shared)
        if head:
            self.submit(head, 1)
            self.drain()
        for _ in range(batch):
            self.submit(head + self.words(own), tokens)
        self.engine.step()
        while any(job.samples[0].remaining > 1 or job.samples[0].blocks is None for job in self.engine.jobs):
            self.engine.step()

    def _leave(self) -> None:
        for job in self.engine.jobs:
            self.engine.cancel(job)
        self.drain()

    @torch.inference_mode()
    def peer_decode(self, batch: int, tokens: int, steps: int) -> float:
        """Median seconds of a decode step of transformers with as many tokens of each sequence in its cache."""
        ids = torch.tensor([self.words(tokens) for _ in range(batch)], device=self.model.device)
        output = self.peer(ids, use_cache=True, logits_to_keep=1)

        def step() -> None:
            nonlocal output
            chosen = output.logits[:, -1:].argmax(-1)
            output = self.peer(chosen, cache=output.cache, use_cache=True)

        step()
        return statistics.median(self._timed(step) for _ in range(steps))

    def prefill(self, cached: int, repeats: int) -> float:
        """Median seconds from submit to the first token of a prompt of PROMPT tokens."""
        times = []
        for _ in range(repeats):
            head = self.words(cached)
            if cached:
                self.submit(head, 1)
                self.drain()
            prompt = head + self.words(PROMPT - cached)
            times.append(self._timed(lambda prompt=prompt: (self.submit(prompt, 1), self.drain())))
        return statistics.median(times)

    @torch.inference_mode()
    def peer_prefill(self, repeats: int) -> float:
        """The same, cold, of transformers."""
        ids = torch.tensor([self.words(PROMPT)], device=self.model.device)
        return statistics.median(self._timed(lambda: self.peer(ids, logits_to_keep=1)) for _ in range(repeats))

    def _timed(self, work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--cpu-linear", choices=("auto", "dense", "fp16"), default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = ExecutorSettings(kv_memory="2GiB", cpu_linear=arguments.cpu_linear)
    bench = Bench(prepare(arguments.model, print), settings)
    bench.prefill(0, 1)
    rows: list[tuple[str, float, float]] = []
    for batch, shared, own in DECODES:
        ours = bench.decode(batch, shared, own, arguments.steps)
        theirs = bench.peer_decode(batch, shared + own, arguments.steps)
        for attention, seconds in zip(("torch", "native"), ours, strict=False):
            rows.append((f"decode {batch} x {shared} + {own}, {attention}", seconds, theirs))
    cold = bench.peer_prefill(arguments.repeats)
    rows.append((f"prefill {PROMPT}, cold", bench.prefill(0, arguments.repeats), cold))
    rows.append((f"prefill {PROMPT}, {CACHED} cached", bench.prefill(CACHED, arguments.repeats), cold))
    print(f"\n{'':32}{'engine ms':>12}{'transformers ms':>18}{'ratio':>8}")
    for name, ours, theirs in rows:
        print(f"{name:32}{ours * 1e3:12.1f}{theirs * 1e3:18.1f}{ours / theirs:8.2f}")
    alone, beside = bench.stall(3 * arguments.steps)
    print(
        f"\n95th percentile from token to token of {ANSWERS} answers: {alone * 1e3:.1f} ms;"
        f" beside a prompt of {LONG} tokens {beside * 1e3:.1f} ms, {beside / alone:.2f} times that"
    )
    if arguments.json:
        figures = {name: {"engine_seconds": ours, "transformers_seconds": theirs} for name, ours, theirs in rows}
        figures["stall"] = {"alone_seconds": alone, "beside_seconds": beside}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
