"""The step loop: takes calls, plans a step, runs it on the model, tells what came out. On a thread of its own.

Everything that changes goes through here: the scheduler, the cache and the sequences belong to the engine's thread.
Other threads put calls into its inbox, and read its load, which is replaced as a whole after each step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from torch import Tensor

from executor.batch import Work, pack
from executor.choice import choose
from executor.kv.cache import KVCache
from executor.model import Model
from executor.requests import Choice, Deliver, Event, Failed, FinishReason, Generated, Job, Request, Sequence, Started
from executor.scheduler import Scheduler, SchedulerLimits
from shared.errors import HermesError, internal, invalid_argument, resource_exhausted, unavailable
from shared.metrics import ExecutorMetrics, Load

T = TypeVar("T")
log = logging.getLogger(__name__)


class Admissions(NamedTuple):
    """Requests admitted since the start, each once."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


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
        """The engine's own: others reach it by `call`."""
        self.admissions = Admissions()
        self.scheduler = Scheduler(cache, limits)
        """The engine's own, too."""
        self._model = model
        self._metrics = metrics
        self._retry_after_seconds = retry_after_seconds
        self._flush = flush
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: set[Job] = set()
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
        self._put(lambda: self._enqueue(job))
        return job

    def cancel(self, job: Job) -> None:
        """Ends a request whose caller went away, before the next step; nothing more is delivered. Idempotent."""
        self._inbox.put(lambda: self._leave(job))

    def stop_sample(self, job: Job, index: int) -> None:
        """Ends one sample as if a stop token had come; the others go on. Idempotent."""
        self._inbox.put(lambda: self._stop_sample(job, index))

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

    def step(self) -> bool:
        """Takes what is in the inbox and runs one step. Returns whether requests are left."""
        self._stepping_since = time.monotonic()
        while not self._inbox.empty():
            self._inbox.get()()
        works = self.scheduler.schedule()
        self._announce(works)
        self._flush()
        for sequence in self.scheduler.starved:
            self._conclude(sequence, FinishReason.LENGTH)
        if works:
            self._execute(works)
        self.cache.reclaim()
        self._load = self._measure()
        self._flush()
        self._stepping_since = None
        return bool(self._live)

    def _execute(self, works: Rows[Work]) -> None:
        """Runs a step on the model. One that fails ends its own requests, publishes nothing, and harms no others."""
        try:
            pool = self.cache.pool
            logits = self._model.forward(
                pack(works, pool.block_size, self._model.device, self._model.dtype), pool.keys, pool.values
            )
            # A key that is no number makes every later logit that, so a chunk is judged by its last token.
            sound = logits.amax(-1).isfinite().tolist()
        except Exception:
            log.exception("a step over %d sequences failed", len(works))
            self._fail({work.sequence.job for work in works}, _step_failed())
            return
        self._fail({work.sequence.job for work, good in zip(works, sound, strict=True) if not good}, _no_number())
        for work in works:
            if work.sequence.job in self._live:
                self._advance(work)
        rows = [row for row, work in enumerate(works) if work.samples and work.sequence.job in self._live]
        self._choose(logits, {row: works[row].sequence for row in rows})

    def _advance(self, work: Work) -> None:
        """Takes in what a step computed of a sequence: its full blocks enter the tree."""
        sequence = work.sequence
        sequence.computed = work.end
        sequence.held.publish(sequence.tokens, work.end)
        if work.samples and sequence.request.stopping.max_tokens == 0:
            self._conclude(sequence, FinishReason.LENGTH)

    def _choose(self, logits: Tensor, sampling: Mapping[int, Sequence]) -> None:
        """Chooses the next token of each sequence from its row of logits; the samples of a new answer share one."""
        rows: list[int] = []
        sequences: list[Sequence] = []
        for row, sequence in sampling.items():
            begun = [sequence] if sequence.job.complete else [sequence, *self._begin_others(sequence)]
            running = [each for each in begun if each.blocks is not None]
            rows += [row] * len(running)
            sequences += running
        if not rows:
            return
        try:
            chosen = choose(logits[rows], sequences)
        except Exception:
            log.exception("choosing tokens for %d sequences failed", len(sequences))
            self._fail({sequence.job for sequence in sequences}, _step_failed())
            return
        for sequence, choice in zip(sequences, chosen, strict=True):
            self._extend(sequence, choice)

    def _begin_others(self, first: Sequence) -> list[Sequence]:
        """Begins the other samples where the first one is: they share its blocks until their own first token."""
        others = first.job.begin_others()
        for sequence in others:
            if sequence.index in first.job.stopped:
                self._conclude(sequence, FinishReason.STOP)
            elif first.blocks is not None:
                self.scheduler.fork(first, sequence)
            else:
                self.scheduler.add(sequence)
        return [sequence for sequence in others if sequence.index not in first.job.stopped]

    def _extend(self, sequence: Sequence, choice: Choice) -> None:
        """Adds a chosen token, and ends the answer where it ends."""
        seconds = sequence.since_last_token()
        if sequence.generated:
            self._metrics.next_token(seconds)
        else:
            self._metrics.first_token(seconds)
        sequence.extend(choice.token_id)
        self._tell(sequence.job, Generated(sequence.index, choice))
        stopping = sequence.request.stopping
        if choice.token_id in stopping.stop_token_ids:
            self._conclude(sequence, FinishReason.STOP, choice.token_id)
        elif sequence.generated == stopping.max_tokens or len(sequence.tokens) >= self._model.context_length:
            self._conclude(sequence, FinishReason.LENGTH)

    def _enqueue(self, job: Job) -> None:
        if self.scheduler.full:
            self._refuse(job, self._queue_full())
        else:
            self._live.add(job)
            self.scheduler.add(job.samples[0])

    def _announce(self, works: Rows[Work]) -> None:
        """Tells the requests that run for the first time that they were admitted, and counts their hits, once."""
        for sequence in (work.sequence for work in works if work.sequence.job.cached_tokens is None):
            prompt, cached = len(sequence.request.prompt), sequence.held.cached_tokens
            sequence.job.cached_tokens = cached
            before = self.admissions
            self.admissions = Admissions(
                before.requests + 1, before.prompt_tokens + prompt, before.cached_tokens + cached
            )
            self._metrics.admitted(prompt, cached)
            self._tell(sequence.job, Started(prompt, cached))

    def _conclude(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """Ends a sample: its blocks are released before it is told. The last one ends the request."""
        job = sequence.job
        self._release(sequence)
        job.unfinished -= 1
        sequence.ended = True
        if not job.unfinished:
            self._live.discard(job)
        self._metrics.finished(reason.name.lower())
        if job.cached_tokens is None:  # stopped while it waited
            job.cached_tokens = 0
            self._tell(job, Started(len(job.request.prompt), 0))
        self._tell(job, sequence.finished(reason, stop_token_id))
        if job in self._live and not job.complete:  # the first one ended before the others could begin
            self._begin_others(sequence)

    def _stop_sample(self, job: Job, index: int) -> None:
        if job not in self._live:
            return
        job.stopped.add(index)
        if index < len(job.samples) and not job.samples[index].ended:
            self._conclude(job.samples[index], FinishReason.STOP)

    def _release(self, sequence: Sequence) -> None:
        """Takes a sequence out of everything. What it computed stays in the tree."""
        self.scheduler.remove(sequence)
        if sequence.blocks is not None:
            sequence.blocks.finish(sequence.tokens, sequence.computed)
            sequence.blocks = None

    def _leave(self, job: Job) -> None:
        """Takes a request out whose caller went away. What it computed stays in the tree."""
        if job in self._live:
            self._live.discard(job)
            for sequence in job.samples:
                self._release(sequence)

    def _fail(self, jobs: Iterable[Job], error: HermesError) -> None:
        """Ends requests with an error. What their last step wrote is not trusted."""
        for job in jobs:
            self._live.discard(job)
            self._refuse(job, error)
            for sequence in job.samples:
                if sequence.blocks is not None:
                    sequence.blocks.abandon()
                self._release(sequence)

    def _refuse(self, job: Job, error: HermesError) -> None:
        self._metrics.failed(error.reason)
        self._tell(job, Failed(error))

    def _tell(self, job: Job, event: Event) -> None:
        """Delivers an event. A receiver that fails costs its own request alone."""
        try:
            job.deliver(event)
        except Exception:
            log.exception("the receiver of a request's events failed; the request ends")
            self._inbox.put(lambda: self._leave(job))

    def _queue_full(self) -> HermesError:
        return resource_exhausted(
            "QUEUE_FULL",
            f"The executor's queue is full ({len(self.scheduler.waiting)} requests wait); try again later.",
            retry_after=self._retry_after_seconds,
        )

    def _measure(self) -> Load:
        stats = self.cache.stats
        return Load(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
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
                    self._inbox.get()()  # sleeps until a call comes
            self._end(unavailable("DRAINING", "The executor is shutting down; try another one."))
        except Exception:
            log.exception("the engine ended")
            try:
                self._end(internal("ENGINE_ENDED", "The executor's engine has ended; see its log, and restart it."))
            finally:
                self._on_death()

    def _stop(self) -> None:
        self._stopping = True

    def _end(self, error: HermesError) -> None:
        """Fails all that is left, and closes the inbox."""
        with self._gate:
            self._ended = error
        while not self._inbox.empty():
            self._inbox.get()()
        for job in self._live:  # told first: after a fault of its own the engine may not even release
            self._refuse(job, error)
        self._flush()
        for job in self._live:
            for sequence in job.samples:
                self._release(sequence)
        self._live.clear()


def _step_failed() -> HermesError:
    return internal("STEP_FAILED", "The executor failed on this request; see its log.")


def _no_number() -> HermesError:
    return internal("NOT_A_NUMBER", "The model computed no numbers for this request.")
