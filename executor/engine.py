"""The step loop: takes calls, plans a step, runs it on the model, tells what came out. On a thread of its own.

Everything that changes goes through here: the scheduler, the cache and the sequences belong to the engine's thread.
Other threads put calls into its inbox, and read its load, which is replaced as a whole after each step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from typing import Final, TypeVar

from torch import Tensor

from executor.batch import Work, pack
from executor.choice import choose
from executor.events import Deliver, FinishReason
from executor.jobs import Jobs
from executor.kv.cache import KVCache
from executor.model import Model
from executor.native.kernel import AttentionKernel
from executor.requests import Job, Request, Sequence
from executor.scheduler import Scheduler, SchedulerLimits
from shared.errors import HermesError, internal, invalid_argument, resource_exhausted, unavailable
from shared.metrics import ExecutorMetrics, Load

_LONGEST_SLEEP_SECONDS: Final = 3600.0  # a pin may be for longer than a lock can wait
_PIN_RETRY_SECONDS: Final = 60.0

T = TypeVar("T")
log = logging.getLogger(__name__)


class Engine:
    """Runs requests in a continuous batch. Other threads submit, cancel and stop, and ask by `call`."""

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
        self.cache = cache
        """The engine's own, as the scheduler and the jobs are: others reach them by `call`."""
        self.scheduler = Scheduler(cache, limits)
        self.jobs = Jobs(
            self.scheduler,
            cache,
            metrics,
            context_length=model.context_length,
            retry_after_seconds=retry_after_seconds,
        )
        self.kernel: AttentionKernel | None = None
        """What attends, where it is not torch; changes between two steps."""
        self._model = model
        self._flush = flush
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._ended: HermesError | None = None
        self._gate = threading.Lock()  # nothing slips in behind the end
        self._stepping_since: float | None = None
        self._load = self._measure()

    @property
    def load(self) -> Load:
        """Occupancy after the last step."""
        return self._load

    @property
    def busy_seconds(self) -> float:
        """How long the step takes that runs now; 0 while the engine sleeps."""
        since = self._stepping_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that runs; requests that are left fail with UNAVAILABLE. Waits for it."""
        self._inbox.put(self._stop)
        if self._thread.ident is None:  # never started: there is nobody to end what was submitted
            self._run()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def submit(self, request: Request, deliver: Deliver) -> Job:
        """Queues a request, whose events go to `deliver` on the engine's thread. Returns the handle to cancel it by.

        Raises INVALID_ARGUMENT for a prompt that the pool can never hold, and what the engine ended with, if it has.
        A queue without room is told as an event.
        """
        if len(request.prompt) > self.cache.capacity:
            raise invalid_argument(
                "PROMPT_TOO_LONG",
                f"The prompt has {len(request.prompt)} tokens, but the KV pool holds {self.cache.capacity};"
                " shorten the prompt, or give the executor more kv_memory.",
                prompt_tokens=str(len(request.prompt)),
                limit=str(self.cache.capacity),
            )
        job = Job(request, deliver)
        self._put(lambda: self.jobs.add(job))
        return job

    def cancel(self, job: Job) -> None:
        """Ends a request whose caller went away, before the next step; nothing more is delivered. Idempotent."""
        self._inbox.put(lambda: self.jobs.leave(job))

    def stop_sample(self, job: Job, index: int) -> None:
        """Ends one sample as if a stop token had come; the others go on. Idempotent."""
        self._inbox.put(lambda: self.jobs.stop_sample(job, index))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Runs something on the engine's thread between two steps. Raises what the engine ended with, if it has."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._put(run)
        return future

    def adopt(self, change: Callable[[], None]) -> None:
        """Changes how steps are computed, before the next one. Raises what the engine ended with, if it has."""
        self._put(change)

    def step(self) -> bool:
        """Takes what is in the inbox and runs one step. Returns whether requests are left."""
        self._stepping_since = time.monotonic()
        while not self._inbox.empty():
            self._inbox.get()()
        works = self.scheduler.schedule()
        self.jobs.announce(works)
        self._flush()
        for sequence in self.scheduler.starved:
            self.jobs.conclude(sequence, FinishReason.LENGTH)
        self.jobs.fail({sequence.job for sequence in self.scheduler.shut_out}, _pinned_full())
        if works:
            self._execute(works)
        self.jobs.drop_deserted()
        self.cache.pins.expire(time.monotonic())
        self.cache.reclaim()
        self._load = self._measure()
        self._flush()
        self._stepping_since = None
        return bool(self.jobs)

    def _execute(self, works: Rows[Work]) -> None:
        """Runs a step on the model. One that fails publishes nothing; its halves run anew, down to the one at fault."""
        pool, model = self.cache.pool, self._model
        try:
            batch = pack(works, pool.block_size, model.device, model.dtype, self.kernel)
            logits = model.forward(batch, pool.keys, pool.values)
            # A key that is no number makes every later logit that, so a chunk is judged by its last token.
            sound = logits.amax(-1).isfinite().tolist()
        except Exception:
            log.exception("a step over %d sequences failed", len(works))
            self._isolate(works)
            return
        self.jobs.fail({work.sequence.job for work, good in zip(works, sound, strict=True) if not good}, _no_number())
        for work in works:
            if work.sequence.job in self.jobs:
                self._advance(work)
        self._choose(logits, works)

    def _isolate(self, works: Rows[Work]) -> None:
        """After a step that failed: ends the request at fault, and runs the others."""
        if len(works) == 1:
            self.jobs.fail([works[0].sequence.job], _step_failed())
            return
        middle = len(works) // 2
        for half in (works[:middle], works[middle:]):
            left = [work for work in half if work.sequence.job in self.jobs]  # samples of one request fail together
            if left:
                self._execute(left)

    def _advance(self, work: Work) -> None:
        """Takes in what a step computed of a sequence: its full blocks enter the tree."""
        sequence = work.sequence
        sequence.computed = work.end
        sequence.held.publish(sequence.tokens, work.end)
        if work.samples and not sequence.request.generates:
            self.jobs.conclude(sequence, FinishReason.LENGTH)

    def _choose(self, logits: Tensor, works: Rows[Work]) -> None:
        """Chooses the next token of each sequence that is due; the samples of a new answer share a row of logits."""
        rows: list[int] = []
        sequences: list[Sequence] = []
        for row, work in enumerate(works):
            if work.samples and work.sequence.job in self.jobs:
                due = self.jobs.due(work.sequence)
                rows += [row] * len(due)
                sequences += due
        if not rows:
            return
        try:
            chosen = choose(logits if rows == list(range(len(works))) else logits[rows], sequences)
        except Exception:
            log.exception("choosing tokens for %d sequences failed", len(sequences))
            self.jobs.fail({sequence.job for sequence in sequences}, _step_failed())
            return
        for sequence, choice in zip(sequences, chosen, strict=True):
            self.jobs.extend(sequence, choice)

    def _measure(self) -> Load:
        stats = self.cache.stats
        return Load(
            running=self.scheduler.running_requests,
            waiting=self.scheduler.waiting_requests,
            blocks_total=stats.blocks_total,
            blocks_free=stats.blocks_free,
            blocks_active=stats.blocks_active,
            blocks_cached=stats.blocks_cached,
            blocks_pinned=stats.blocks_pinned,
            preemptions=self.scheduler.preemptions,
            evicted_blocks=stats.evicted_blocks,
        )

    def _put(self, call: Callable[[], None]) -> None:
        with self._gate:
            if self._ended is not None:
                raise self._ended
            self._inbox.put(call)

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self.step() and not self._stopping:
                    self._sleep()
            self._end(unavailable("DRAINING", "The executor is shutting down; try another one."))
        except Exception:
            log.exception("the engine ended")
            try:
                self._end(internal("ENGINE_ENDED", "The executor's engine has ended; see its log, and restart it."))
            finally:
                self._on_death()

    def _sleep(self) -> None:
        """Waits for a call, or for a pin to end."""
        end = self.cache.pins.next_end
        seconds = None if end is None else min(max(end - time.monotonic(), 0.0), _LONGEST_SLEEP_SECONDS)
        try:
            call = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        self._stepping_since = time.monotonic()
        call()

    def _stop(self) -> None:
        self._stopping = True

    def _end(self, error: HermesError) -> None:
        """Fails all that is left, and closes the inbox."""
        self._stepping_since = None
        with self._gate:
            self._ended = error
        while not self._inbox.empty():
            self._inbox.get()()
        try:
            self.jobs.end(error)
        finally:
            self._flush()


def _step_failed() -> HermesError:
    return internal("STEP_FAILED", "The executor failed on this request; see its log.")


def _no_number() -> HermesError:
    return internal("NOT_A_NUMBER", "The model computed no numbers for this request.")


def _pinned_full() -> HermesError:
    return resource_exhausted(
        "POOL_PINNED",
        "Pins hold the blocks that this prompt needs; unpin something, or try again when a pin has ended.",
        retry_after=_PIN_RETRY_SECONDS,
    )
