"""The step loop: takes calls, plans a step, runs it on the model, tells what came out. On a thread of its own.

Everything that changes goes through here: the scheduler, the cache and the sequences belong to the engine's thread.
Other threads put calls into its inbox, and read its load, which is replaced as a whole after each step.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Rows

from executor.batch import Work, pack
from executor.kv.cache import KVCache
from executor.model import Model
from executor.requests import Deliver, Failed, FinishReason, Request, Sequence
from executor.sampler import SampleRow, TokenHistory, sample
from executor.scheduler import Scheduler, SchedulerLimits
from shared.errors import HermesError, internal, invalid_argument, resource_exhausted, unavailable
from shared.metrics import ExecutorMetrics, Load

log = logging.getLogger(__name__)


class Engine:
    """Runs requests in a continuous batch. `submit`, `cancel` and `stop_sample` may be called from any thread."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        limits: SchedulerLimits,
        *,
        metrics: ExecutorMetrics,
        retry_after_seconds: float = 1.0,
        flush: Callable[[], None] = lambda: None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        """Both callbacks run on the engine's thread.

        flush: after all events of a step were delivered.
        on_death: when the engine ends by a fault of its own.
        """
        self._model = model
        self._cache = cache
        self._scheduler = Scheduler(cache, limits)
        self._metrics = metrics
        self._retry_after_seconds = retry_after_seconds
        self._flush = flush
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: set[Sequence] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._ended: HermesError | None = None
        self._gate = threading.Lock()  # no request slips in behind the end
        self._load = self._measure()

    @property
    def load(self) -> Load:
        """Occupancy after the last step."""
        return self._load

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that runs; requests that are left fail with UNAVAILABLE. Waits for it."""
        self._inbox.put(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request, deliver: Deliver) -> Sequence:
        """Queues a request, whose events go to `deliver` on the engine's thread. Returns the handle to cancel it by.

        Raises INVALID_ARGUMENT for a prompt that the pool can never hold, and what the engine ended with, if it has.
        A queue without room is told as an event.
        """
        if len(request.prompt) > self._cache.capacity:
            raise invalid_argument(
                "PROMPT_TOO_LONG",
                f"The prompt has {len(request.prompt)} tokens, but the KV pool holds {self._cache.capacity};"
                " shorten the prompt, or give the executor more kv_memory.",
                prompt_tokens=str(len(request.prompt)),
                limit=str(self._cache.capacity),
            )
        sequence = Sequence(request, deliver)
        with self._gate:
            if self._ended is not None:
                raise self._ended
            self._inbox.put(lambda: self._enqueue(sequence))
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Ends a request whose caller went away, before the next step; nothing more is delivered. Idempotent."""
        self._inbox.put(lambda: self._leave(sequence))

    def stop_sample(self, sequence: Sequence) -> None:
        """Ends an answer as if a stop token had come. Idempotent."""
        self._inbox.put(lambda: self._conclude(sequence, FinishReason.STOP) if sequence in self._live else None)

    def step(self) -> bool:
        """Takes what is in the inbox and runs one step. Returns whether requests are left."""
        while not self._inbox.empty():
            self._inbox.get()()
        works = self._scheduler.schedule()
        self._announce(works)
        self._flush()
        for sequence in self._scheduler.starved:
            self._conclude(sequence, FinishReason.LENGTH)
        if works:
            self._execute(works)
        self._cache.reclaim()
        self._load = self._measure()
        self._flush()
        return bool(self._live)

    def _execute(self, works: Rows[Work]) -> None:
        """Runs a step on the model. One that fails ends its own requests, publishes nothing, and harms no others."""
        sampling = [work.sequence for work in works if work.samples]
        try:
            pool = self._cache.pool
            batch = pack(works, pool.block_size, self._model.device, self._model.dtype)
            logits = self._model.forward(batch, pool.keys, pool.values)
            broken = logits[:, 0].isnan().tolist()  # a hidden state that is no number makes all its logits that
            tokens = sample(logits, [self._row(sequence) for sequence in sampling]) if sampling else []
        except Exception:
            log.exception("a step over %d sequences failed", len(works))
            for work in works:
                self._fail(work.sequence, internal("STEP_FAILED", "The executor failed on this request; see its log."))
            return
        for sequence in itertools.compress(sampling, broken):
            log.error("the model's logits are not numbers after %d tokens", len(sequence.tokens))
            self._fail(sequence, internal("NOT_A_NUMBER", "The model computed no numbers for this request."))
        for work in works:
            if work.sequence in self._live:
                work.sequence.computed = work.end
                work.sequence.held.publish(work.sequence.tokens, work.end)
        for sequence, token in zip(sampling, tokens, strict=True):
            if sequence in self._live:
                self._extend(sequence, token)

    def _extend(self, sequence: Sequence, token: int) -> None:
        """Adds a chosen token, and ends the answer where it ends."""
        seconds = sequence.since_last_token()
        if sequence.generated:
            self._metrics.next_token(seconds)
        else:
            self._metrics.first_token(seconds)
        sequence.deliver(sequence.extend(token))
        stopping = sequence.request.stopping
        if token in stopping.stop_token_ids:
            self._conclude(sequence, FinishReason.STOP, token)
        elif sequence.generated == stopping.max_tokens or len(sequence.tokens) >= self._model.context_length:
            self._conclude(sequence, FinishReason.LENGTH)

    def _row(self, sequence: Sequence) -> SampleRow:
        request = sequence.request
        if sequence.history is None and TokenHistory.needed(request.sampling):
            generated = sequence.tokens[sequence.prompt_tokens :]
            sequence.history = TokenHistory(request.prompt, generated, self._model.vocab_size, self._model.device)
        early = sequence.generated < request.stopping.min_tokens
        forbidden = tuple(request.stopping.stop_token_ids) if early else ()
        return SampleRow(request.sampling, sequence.generated, sequence.history, forbidden)

    def _enqueue(self, sequence: Sequence) -> None:
        if self._scheduler.full:
            self._tell_failure(sequence, self._queue_full())
        else:
            self._live.add(sequence)
            self._scheduler.add(sequence)

    def _announce(self, works: Rows[Work]) -> None:
        """Tells the sequences that run for the first time that they were admitted, and counts their hits, once."""
        for sequence in (work.sequence for work in works if work.sequence.cached_tokens is None):
            started = sequence.admit()
            self._metrics.admitted(started.prompt_tokens, started.cached_tokens)
            sequence.deliver(started)

    def _conclude(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """Ends an answer: its blocks are released before it is told."""
        self._leave(sequence)
        self._metrics.finished(reason.name.lower())
        sequence.deliver(sequence.finished(reason, stop_token_id))

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of everything. What it computed stays in the tree."""
        if sequence not in self._live:
            return
        self._live.discard(sequence)
        self._scheduler.remove(sequence)
        if sequence.blocks is not None:
            sequence.blocks.finish(sequence.tokens, sequence.computed)

    def _fail(self, sequence: Sequence, error: HermesError) -> None:
        """Ends a request with an error. What its last step wrote is not trusted."""
        self._live.discard(sequence)
        self._scheduler.remove(sequence)
        if sequence.blocks is not None:
            sequence.blocks.abandon()
        self._tell_failure(sequence, error)

    def _tell_failure(self, sequence: Sequence, error: HermesError) -> None:
        self._metrics.failed(error.reason)
        sequence.deliver(Failed(error))

    def _queue_full(self) -> HermesError:
        return resource_exhausted(
            "QUEUE_FULL",
            f"The executor's queue is full ({len(self._scheduler.waiting)} requests wait); try again later.",
            retry_after=self._retry_after_seconds,
        )

    def _measure(self) -> Load:
        stats = self._cache.stats
        return Load(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks_free=stats.blocks_free,
            blocks_active=stats.blocks_active,
            blocks_cached=stats.blocks_cached,
            preemptions=self._scheduler.preemptions,
            evicted_blocks=stats.evicted_blocks,
        )

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step() and not self._stopping:
                    self._inbox.get()()  # sleeps until a call comes
            self._end(unavailable("DRAINING", "The executor is shutting down; try another one."))
        except Exception:
            log.exception("the engine ended")
            self._end(internal("ENGINE_ENDED", "The executor's engine has ended; see its log, and restart it."))
            self._on_death()

    def _stop(self) -> None:
        self._stopping = True

    def _end(self, error: HermesError) -> None:
        """Fails all that is left, and closes the inbox."""
        with self._gate:
            self._ended = error
        while not self._inbox.empty():
            self._inbox.get()()
        for sequence in list(self._live):
            self._fail(sequence, error)
        self._flush()
