"""The requests that are under way, and what becomes of each: admitted, extended, ended, stopped, failed or left."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Rows
from typing import NamedTuple

from executor.batch import Work
from executor.events import Choice, Event, Failed, FinishReason, Generated, Started
from executor.kv.cache import KVCache
from executor.requests import Job, Sequence
from executor.scheduler import Scheduler
from shared.errors import HermesError, resource_exhausted
from shared.metrics import ExecutorMetrics

log = logging.getLogger(__name__)


class Admissions(NamedTuple):
    """Requests admitted since the start, each once; those that only warm a prefix do not count."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Jobs:
    """Owns the live requests; tells their receivers and the metrics. Belongs to the engine's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        metrics: ExecutorMetrics,
        *,
        context_length: int,
        retry_after_seconds: float,
    ) -> None:
        """context_length: prompt and answer together, in tokens. retry_after_seconds: what a refused caller is told."""
        self.admissions = Admissions()
        self._scheduler = scheduler
        self._cache = cache
        self._metrics = metrics
        self._context_length = context_length
        self._retry_after_seconds = retry_after_seconds
        self._live: dict[Job, None] = {}
        self._deserted: list[Job] = []
        """Whose receivers failed."""

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, job: Job) -> bool:
        return job in self._live

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._live))

    def add(self, job: Job) -> None:
        """Queues a request, or refuses it where the queue has no room."""
        if self._scheduler.full:
            self._refuse(job, self._queue_full())
        else:
            request = job.request
            if not (request.write_cache and self._cache.publishes(request.scope, len(request.prompt))):
                job.own = self._cache.private_roots(request.scope)
            self._live[job] = None
            self._scheduler.add(job.samples[0])

    def announce(self, works: Rows[Work]) -> None:
        """Tells the requests that run for the first time that they were admitted, and counts their hits, once."""
        for sequence in (work.sequence for work in works if work.sequence.job.cached_tokens is None):
            job, prompt, cached = sequence.job, len(sequence.request.prompt), sequence.held.cached_tokens
            job.cached_tokens = cached
            self._cache.count(sequence.held)
            if job.request.generates:
                before = self.admissions
                self.admissions = Admissions(
                    before.requests + 1, before.prompt_tokens + prompt, before.cached_tokens + cached
                )
                self._metrics.admitted(prompt, cached)
            self._tell(job, Started(prompt, cached))

    def due(self, sequence: Sequence) -> list[Sequence]:
        """The samples that choose a token now that all tokens of this one have run.

        With its prompt computed a request's other samples begin where the first one is, and share its blocks until
        their own first token; those that find no place wait for one. Samples that were stopped before end here.
        """
        job = sequence.job
        if job.complete:
            return [sequence]
        others = job.begin_others()
        for other in others:
            if other.index not in job.stopped:
                self._scheduler.fork(sequence, other)
        self._end_stopped(job)
        return [sample for sample in job.samples if sample.blocks is not None]

    def extend(self, sequence: Sequence, choice: Choice) -> None:
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
            self.conclude(sequence, FinishReason.STOP, choice.token_id)
        elif sequence.generated == stopping.max_tokens or len(sequence.tokens) >= self._context_length:
            self.conclude(sequence, FinishReason.LENGTH)

    def conclude(self, sequence: Sequence, reason: FinishReason, stop_token_id: int | None = None) -> None:
        """Ends a sample: its blocks are released before it is told. The last one ends the request."""
        job = sequence.job
        self._release(sequence)
        job.unfinished -= 1
        sequence.ended = True
        if not job.unfinished:
            self._forget(job)
        if job.request.generates:
            self._metrics.finished(reason.name.lower())
        if job.cached_tokens is None:  # stopped while it waited
            job.cached_tokens = 0
            self._tell(job, Started(len(job.request.prompt), 0))
        self._tell(job, sequence.finished(reason, stop_token_id))

    def stop_sample(self, job: Job, index: int) -> None:
        """Ends a sample as if a stop token had come: now, or when the prompt is computed that the others need too."""
        if job not in self._live:
            return
        job.stopped.add(index)
        if len(job.stopped) == job.request.sampling.samples and not job.complete:
            job.begin_others()
        if job.complete:
            self._end_stopped(job)

    def leave(self, job: Job) -> None:
        """Takes a request out whose caller went away. What it computed stays in the tree."""
        if job in self._live:
            self._forget(job)
            for sequence in job.samples:
                self._release(sequence)

    def fail(self, jobs: Iterable[Job], error: HermesError) -> None:
        """Ends requests with an error. What their last step wrote is not trusted."""
        for job in jobs:
            self._forget(job)
            for sequence in job.samples:
                if sequence.blocks is not None:
                    sequence.blocks.release()
                self._release(sequence)
            self._refuse(job, error)

    def end(self, error: HermesError) -> None:
        """Fails all. They are told first: after a fault of its own the engine may not even release their blocks."""
        for job in self._live:
            self._refuse(job, error)
        for job in self:
            self.leave(job)

    def drop_deserted(self) -> None:
        """Takes the requests out whose receivers failed."""
        while self._deserted:
            self.leave(self._deserted.pop())

    def _end_stopped(self, job: Job) -> None:
        for index in sorted(job.stopped):
            if not job.samples[index].ended:
                self.conclude(job.samples[index], FinishReason.STOP)

    def _release(self, sequence: Sequence) -> None:
        """Takes a sequence out of everything. What it computed stays in the tree."""
        self._scheduler.remove(sequence)
        if sequence.blocks is not None:
            sequence.leave()

    def _forget(self, job: Job) -> None:
        """The request is live no more."""
        del self._live[job]
        if job.own is not None:
            job.own.leave()

    def _refuse(self, job: Job, error: HermesError) -> None:
        self._metrics.failed(error.reason)
        self._tell(job, Failed(error))

    def _tell(self, job: Job, event: Event) -> None:
        """Delivers an event. A receiver that fails costs its own request alone."""
        try:
            job.deliver(event)
        except Exception:
            log.exception("the receiver of a request's events failed; the request ends")
            self._deserted.append(job)

    def _queue_full(self) -> HermesError:
        return resource_exhausted(
            "QUEUE_FULL",
            f"The executor's queue is full ({self._scheduler.waiting_requests} requests wait); try again later.",
            retry_after=self._retry_after_seconds,
        )
