"""A small model with random weights, an engine over it that is stepped by hand, and what transformers makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from executor.batch import Batch
from executor.engine import Engine
from executor.events import Event, Failed, Finished, Generated, Started
from executor.kv.cache import KVCache
from executor.kv.eviction import KVLimits
from executor.kv.node import Scope
from executor.kv.pool import BlockPool
from executor.model import GenerationDefaults, Model
from executor.requests import Job, Request, Sampling, Stopping
from executor.scheduler import SchedulerLimits
from shared.metrics import ExecutorMetrics

VOCAB = 211
CONTEXT = 4096


@pytest.fixture(scope="session")
def network() -> Any:
    """Weights are large enough for attention to matter: a wrong key changes the tokens that follow."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def model(network: Any) -> Model:
    return Model(network, GenerationDefaults(), frozenset())


@dataclass
class Answer:
    """What one request was told."""

    events: list[Event] = field(default_factory=list)
    job: Job | None = None

    @property
    def ids(self) -> list[int]:
        return self.ids_of(0)

    def ids_of(self, index: int) -> list[int]:
        return [event.choice.token_id for event in self.events if isinstance(event, Generated) and event.index == index]

    @property
    def started(self) -> Started:
        (event,) = [event for event in self.events if isinstance(event, Started)]
        return event

    @property
    def cached(self) -> int:
        return self.started.cached_tokens

    @property
    def end(self) -> Event | None:
        return self.events[-1] if self.events and isinstance(self.events[-1], Finished | Failed) else None

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end


class Bench:
    """An engine whose steps the test takes, each followed by a proof of the bookkeeping."""

    def __init__(
        self,
        model: Model,
        *,
        tokens: int = 8192,
        block_size: int = 16,
        limits: KVLimits | None = None,
        batch_tokens: int = 512,
        running: int = 32,
        waiting: int = 256,
    ) -> None:
        self.cache = KVCache(BlockPool(model.layout, tokens // block_size + 1, block_size), limits or KVLimits())
        self.metrics = ExecutorMetrics("tiny")
        self.engine = Engine(model, self.cache, SchedulerLimits(batch_tokens, running, waiting), metrics=self.metrics)
        self.steps = 0

    def submit(
        self,
        prompt: Sequence[int],
        *,
        tokens: int | None = 12,
        namespace: str = "",
        stops: Sequence[int] = (),
        min_tokens: int = 0,
        read: bool = True,
        write: bool = True,
        **sampling: Any,
    ) -> Answer:
        answer = Answer()
        request = Request(
            prompt=tuple(prompt),
            sampling=Sampling(**{"temperature": 0.0} | sampling),
            stopping=Stopping(frozenset(stops), tokens, min_tokens),
            scope=Scope(namespace, "model", "full"),
            read_cache=read,
            write_cache=write,
        )
        answer.job = self.engine.submit(request, answer.events.append)
        return answer

    def step(self) -> bool:
        self.steps += 1
        ran = self.engine.step()
        self.cache.check()
        return ran

    def finish(self, at_most: int = 5000) -> None:
        """Steps until nothing is left to run, which must come."""
        for _ in range(at_most):
            if not self.step():
                assert self.cache.stats.blocks_private == 0
                assert self.cache.stats.blocks_active == 0
                return
        pytest.fail(f"still running after {at_most} steps")

    def run(self, *prompts: Sequence[int], **options: Any) -> list[Answer]:
        answers = [self.submit(prompt, **options) for prompt in prompts]
        self.finish()
        return answers


@pytest.fixture
def bench(model: Model) -> Callable[..., Bench]:
    def build(**options: Any) -> Bench:
        return Bench(model, **options)

    return build


@pytest.fixture
def tokens_run(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each step ran on the model, appended as it runs."""
    counts: list[int] = []
    forward = model.forward

    def count(batch: Batch, *pool: Any) -> torch.Tensor:
        counts.append(batch.token_ids.shape[1])
        return forward(batch, *pool)

    monkeypatch.setattr(model, "forward", count)
    return counts


@pytest.fixture(scope="session")
def reference(network: Any) -> Callable[..., list[int]]:
    """transformers' own greedy generate, with eager attention and its own cache."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(prompt: Sequence[int], tokens: int = 12) -> list[int]:
        key = tuple(prompt), tokens
        if key not in known:
            own = network.config._attn_implementation
            network.set_attn_implementation("eager")
            try:
                ids = torch.tensor([list(prompt)])
                output = network.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=True
                )
            finally:
                network.set_attn_implementation(own)
            known[key] = output[0, len(prompt) :].tolist()
        return known[key]

    return generate


@pytest.fixture(scope="session")
def words() -> Callable[..., list[int]]:
    """Random token ids, the same for the same seed."""

    def draw(count: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    return draw


@pytest.fixture
def fresh_seeds() -> Callable[[], int]:
    return itertools.count(1000).__next__
