"""The cache against a naive dictionary: any order of requests, on tiny pools, with every row read back."""

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from executor.kv.node import Scope
from executor.kv.pins import PinLimitError, UnknownPinError
from executor.kv.pool import OutOfBlocks
from executor.kv.private import PrivateRoots

MakeRunner = Callable[..., Any]

TOKEN = st.integers(0, 2)
PROMPT = st.lists(TOKEN, min_size=1, max_size=14)
NAMESPACE = st.sampled_from("ab")


class Secretive:
    """A request that publishes to nobody else, and what its own samples may find."""

    def __init__(self, roots: PrivateRoots, namespace: str) -> None:
        self.roots = roots
        self.namespace = namespace
        self.published: set[tuple[int, ...]] = set()


class Running:
    """A sequence as the model knows it. `write` ends with a flush: nobody finds what it publishes then."""

    def __init__(
        self,
        blocks: Any,
        tokens: list[int],
        namespace: str,
        computed: int,
        *,
        write: bool,
        secretive: Secretive | None = None,
    ) -> None:
        self.blocks = blocks
        self.tokens = tokens
        self.namespace = namespace
        self.computed = computed
        self.write = write
        self.secretive = secretive


class Pinned(NamedTuple):
    """A pin as the model knows it: what was found when it was made, found ever since."""

    id: str
    namespace: str
    tokens: list[int]
    covered: int
    until: int


class CacheMachine(RuleBasedStateMachine):
    """Requests come, grow, fork, fail and end, under pins and flushes; the model knows each prefix that succeeded."""

    def __init__(self, make_runner: MakeRunner) -> None:
        super().__init__()
        self.make_runner = make_runner
        self.running: list[Running] = []
        self.pinned: list[Pinned] = []
        self.secretive: list[Secretive] = []
        self.now = 0
        self.published: dict[str, set[tuple[int, ...]]] = {"a": set(), "b": set()}

    @initialize(
        blocks=st.sampled_from([6, 9, 200]),
        block_size=st.integers(2, 4),
        min_copy_tokens=st.integers(1, 2),
        max_children=st.sampled_from([2, 256]),
        max_roots=st.sampled_from([1, 1024]),
        eviction=st.sampled_from(["lru", "lfu_aged"]),
        namespace_share=st.sampled_from([0.4, 1.0]),
        max_nodes=st.sampled_from([None, 5]),
        max_pinned=st.sampled_from([0.3, 0.9]),
    )
    def build(self, **options: Any) -> None:
        self.runner = self.make_runner(**options)
        self.cache = self.runner.cache
        self.min_copy_tokens = options["min_copy_tokens"]
        self.max_roots = options["max_roots"]
        self.flushed = False

    def remember(self, sequence: Running, computed: int, *, tail: bool) -> None:
        if sequence.write or sequence.secretive:
            size = self.cache.block_size
            kept = computed
            if not tail or computed % size < self.min_copy_tokens:
                kept -= computed % size
            published = sequence.secretive.published if sequence.secretive else self.published[sequence.namespace]
            for length in range(1, kept + 1):
                published.add(tuple(sequence.tokens[:length]))

    def judge(self, namespace: str, prompt: list[int], cached: int, secretive: Secretive | None = None) -> None:
        published = self.published[namespace] | (secretive.published if secretive else set())
        lengths = range(len(prompt) - 1, 0, -1)
        known = next((n for n in lengths if tuple(prompt[:n]) in published), 0)
        assert cached <= known, "found what nobody published"
        if self.cache.stats.evicted_blocks == 0 and self.max_roots > 1 and not (secretive and self.flushed):
            rest = known % self.cache.block_size
            assert cached == (known if rest >= self.min_copy_tokens else known - rest), "missed what is there"

    @rule(prompt=PROMPT, namespace=NAMESPACE, read=st.integers(0, 4), write=st.integers(0, 4))
    def open(self, prompt: list[int], namespace: str, read: int, write: int) -> None:
        full = self.cache.available_blocks < 2
        blocks = self.runner.open(prompt, namespace=namespace, read=bool(read), write=bool(write))
        if read and not full:
            self.judge(namespace, prompt, blocks.cached_tokens)
        assert read or not blocks.cached_tokens
        self.running.append(Running(blocks, list(prompt), namespace, blocks.cached_tokens, write=bool(write)))

    @rule(prompt=PROMPT, namespace=NAMESPACE, data=st.data())
    def open_a_sample_of_a_secretive_request(self, prompt: list[int], namespace: str, data: Any) -> None:
        request = data.draw(st.sampled_from([*self.secretive, None]))
        if request is None:
            roots = self.cache.private_roots(Scope(namespace, "model", "full"))
            request = Secretive(roots, namespace)
            self.secretive.append(request)
        known = sorted(request.published | self.published[request.namespace])
        if known and data.draw(st.booleans()):
            prompt = [*data.draw(st.sampled_from(known)), *prompt[:3]]
        found = self.runner.find(prompt, namespace=request.namespace)
        found = request.roots.extend(found, prompt, len(prompt) - 1)
        full = self.cache.available_blocks < 2
        blocks = self.runner.enter(prompt, found, request.roots, namespace=request.namespace)
        if not full:
            self.judge(request.namespace, prompt, blocks.cached_tokens, request)
        sequence = Running(
            blocks, list(prompt), request.namespace, blocks.cached_tokens, write=False, secretive=request
        )
        self.running.append(sequence)

    @precondition(lambda self: self.secretive)
    @rule(data=st.data())
    def end_a_secretive_request(self, data: Any) -> None:
        request = data.draw(st.sampled_from(self.secretive))
        self.secretive.remove(request)
        request.roots.leave()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunk=st.integers(1, 6), fails=st.integers(0, 9))
    def step(self, data: Any, chunk: int, fails: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if sequence.computed == len(sequence.tokens):
            sequence.tokens.append(data.draw(TOKEN))
        end = min(sequence.computed + chunk, len(sequence.tokens))
        if self.compute(sequence, end):
            if fails:
                self.publish(sequence, end)
            else:
                sequence.blocks.release()
                self.running.remove(sequence)

    def compute(self, sequence: Running, end: int) -> bool:
        """A step's forward, if there are blocks for it."""
        before = list(sequence.blocks.table)
        missing = self.cache.blocks_for(end) - len(before)
        available = self.cache.available_blocks
        try:
            sequence.blocks.reserve(end)
        except OutOfBlocks:
            assert missing > available
            assert sequence.blocks.table == before
            assert self.cache.available_blocks == available
            return False
        assert missing <= available
        self.runner.compute(sequence.blocks, sequence.tokens, sequence.computed, end)
        return True

    def publish(self, sequence: Running, end: int) -> None:
        sequence.computed = end
        sequence.blocks.publish(sequence.tokens, end)
        self.remember(sequence, end, tail=False)

    def end(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self.remember(sequence, sequence.computed, tail=True)
        for _ in range(2):
            sequence.blocks.finish(sequence.tokens, sequence.computed)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        self.end(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_on_from(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.open([*sequence.tokens, data.draw(TOKEN)], sequence.namespace, 1, 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        source = data.draw(st.sampled_from(self.running))
        before = self.cache.stats
        try:
            blocks = self.runner.fork(source.blocks, source.tokens, source.computed)
        except OutOfBlocks:
            assert self.cache.available_blocks == 0
            assert self.cache.stats == before
            return
        assert blocks.cached_tokens == blocks.copied_tokens == 0
        assert self.cache.stats.copied_tokens == before.copied_tokens
        fork = Running(
            blocks,
            list(source.tokens),
            source.namespace,
            source.computed,
            write=source.write,
            secretive=source.secretive,
        )
        self.running.append(fork)

    def draw_published(self, data: Any) -> tuple[str, list[int]]:
        """A namespace, and tokens that were published in it, if they were not evicted since."""
        namespace = data.draw(st.sampled_from([name for name, known in self.published.items() if known]))
        return namespace, list(data.draw(st.sampled_from(sorted(self.published[namespace]))))

    @precondition(lambda self: any(self.published.values()))
    @rule(data=st.data(), seconds=st.integers(1, 9))
    def pin(self, data: Any, seconds: int) -> None:
        namespace, tokens = self.draw_published(data)
        scope = Scope(namespace, "model", "full")
        covered = self.cache.covers(scope, tokens)
        before = self.cache.stats
        try:
            pin = self.cache.pins.pin(scope, tokens, self.now + seconds)
        except PinLimitError:
            assert before.blocks_pinned + self.cache.blocks_for(covered) > self.cache.pins.limit
            assert self.cache.stats == before
            return
        assert pin.blocks == self.cache.blocks_for(covered)
        self.pinned.append(Pinned(pin.id, namespace, tokens, covered, self.now + seconds))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        pin = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(pin)
        self.cache.pins.unpin(pin.id)
        try:
            self.cache.pins.unpin(pin.id)
        except UnknownPinError:
            return
        raise AssertionError("a pin ended twice")

    @precondition(lambda self: self.pinned)
    @rule(seconds=st.integers(0, 2))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        ended = [pin for pin in self.pinned if pin.until <= self.now]
        assert self.cache.pins.expire(self.now) == len(ended)
        self.pinned = [pin for pin in self.pinned if pin not in ended]

    @rule(blocks=st.integers(1, 9))
    def press(self, blocks: int) -> None:
        other = self.runner.open([9, 9], namespace="c", write=False)
        other.reserve(min(blocks, self.cache.available_blocks) * self.cache.block_size)
        other.release()

    @precondition(lambda self: any(self.published.values()))
    @rule(data=st.data(), last=TOKEN)
    def run_on_what_was_published(self, data: Any, last: int) -> None:
        namespace, tokens = self.draw_published(data)
        self.run([*tokens, last], namespace)

    @rule(prompt=PROMPT, namespace=NAMESPACE)
    def run(self, prompt: list[int], namespace: str) -> None:
        self.open(prompt, namespace, 1, 1)
        sequence = self.running[-1]
        if self.compute(sequence, len(sequence.tokens)):
            self.publish(sequence, len(sequence.tokens))
        self.end(sequence)

    @rule(namespace=st.sampled_from(["a", "b", None]), chance=st.sampled_from(range(8)))
    def flush(self, namespace: str | None, chance: int) -> None:
        if chance < 7:  # or no example would get far
            return
        available, nodes = self.cache.available_blocks, self.cache.stats.nodes
        freed = self.cache.flush(namespace)
        assert self.cache.stats.nodes == nodes - freed
        assert self.cache.available_blocks >= available
        self.flushed = True
        for name in self.published if namespace is None else [namespace]:
            self.published[name].clear()
            self.pinned = [pin for pin in self.pinned if pin.namespace != name]
            for sequence in self.running:
                sequence.write = sequence.write and sequence.namespace != name
                assert self.cache.covers(Scope(name, "model", "full"), sequence.tokens) == 0

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abandon(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        sequence.blocks.release()

    @rule()
    def reclaim(self) -> None:
        self.cache.reclaim()
        stats = self.cache.stats
        in_use = stats.blocks_total - stats.blocks_free
        assert in_use <= 0.9 * stats.blocks_total or stats.blocks_cached == 0

    @rule(prompt=PROMPT, namespace=NAMESPACE)
    def match(self, prompt: list[int], namespace: str) -> None:
        self.judge(namespace, prompt, self.cache.match(Scope(namespace, "model", "full"), prompt))

    @invariant()
    def rows_are_what_their_tokens_demand(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            for sequence in self.running:
                self.runner.verify(sequence.blocks, sequence.tokens, sequence.computed)
            for pin in self.pinned:
                assert self.cache.covers((pin.namespace, "model", "full"), pin.tokens) >= pin.covered
            stats = self.cache.stats
            parts = stats.blocks_free + stats.blocks_active + stats.blocks_cached + stats.blocks_pinned_idle
            assert parts == stats.blocks_total

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for sequence in self.running:
                sequence.blocks.release()
            self.cache.check()
            for request in self.secretive:
                request.roots.leave()
            self.cache.check()
            assert not any(root.anonymous for root in self.cache.tree.roots)
            self.cache.pins.drop(None)
            self.cache.check()
            stats = self.cache.stats
            assert (stats.blocks_active, stats.blocks_private) == (0, 0)
            self.runner.open([9] * self.cache.capacity).reserve(self.cache.capacity)
            assert self.cache.stats.nodes == 0, "an idle block could not be evicted"


def test_any_order_of_requests_agrees_with_a_dictionary_of_prefixes(make_runner: MakeRunner):
    run_state_machine_as_test(
        lambda: CacheMachine(make_runner),
        settings=settings(
            max_examples=250,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
