"""What an assembler counts, under the names that Prometheus and the cache's statistics have.

Assembly hit rate, in requests and in tokens:

    rate(hermes_assembly_cache_lookups_total{result!="miss"}) / rate(hermes_assembly_cache_lookups_total)
    rate(hermes_assembly_cache_hit_tokens_total) / rate(hermes_assembly_cache_prompt_tokens_total)
"""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from assembler.cache.disk import Sizes
from assembler.findings import CODES, Finding
from assembler.splice import Outcome
from shared.metrics import of_processes

Stage = Literal["lookup", "render", "tokenize", "truncate"]
Result = Literal["memory", "disk", "miss"]
Kind = Literal["exact", "beginning"]
Mode = Literal["livesum", "livemostrecent"]

_STAGES: Final = ("lookup", "render", "tokenize", "truncate")
_RESULTS: Final = ("memory", "disk", "miss")
_KINDS: Final = ("exact", "beginning")
_STAGE_SECONDS: Final = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
_MODEL: Final = ("model_name",)


# What is in memory adds up over the processes; what is on disk is the same for all of them.
_TIERS: Final[tuple[tuple[str, str, Mode], ...]] = (
    ("memory", "in memory", "livesum"),
    ("disk", "on disk", "livemostrecent"),
)


class _Sizes(NamedTuple):
    entries: Gauge
    bytes: Gauge


class AssemblerMetrics:
    """Each method may be called from any thread.

    registry: what the endpoint of this process shows. processes: the directory in which several processes keep their
    counts, which `PROMETHEUS_MULTIPROC_DIR` names to each of them; None where this process is alone.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry, processes: Path | None = None) -> None:
        self._registry = registry
        self._processes = processes
        name = model_name

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hermes_assembly_cache_{name}", text, (*_MODEL, *labels), registry=registry)

        lookups = counter("lookups", "Look-ups of whole prompts.", "result")
        self._lookups = {result: lookups.labels(name, result) for result in _RESULTS}
        beginnings = counter("beginnings", "Look-ups of beginnings of prompts that were rendered.", "result")
        self._beginnings = {result: beginnings.labels(name, result) for result in _RESULTS}
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were looked up.").labels(name)
        hits = counter("hit_tokens", "Those of them that came from the cache.", "kind")
        self._hit_tokens = {kind: hits.labels(name, kind) for kind in _KINDS}
        answers = counter(
            "answers", "Answers that ended, and whether their own ids are kept for the next turn.", "result"
        )
        self._answers = {outcome: answers.labels(name, outcome.value) for outcome in Outcome}
        evicted = counter("evicted_entries", "Entries that had to go, for their age or for room.", "tier")
        self._evicted = {tier: evicted.labels(name, tier) for tier in ("memory", "disk")}
        self._damaged = counter("damaged_entries", "Entries that were found damaged on disk, and dropped.").labels(name)
        self._dropped = counter("dropped_writes", "Entries that the disk did not take.").labels(name)
        self._troubles = counter("disk_troubles", "Times that the disk would not; each costs hits.").labels(name)

        warnings = Counter(
            "hermes_assembly_warnings", "Prompts by what they were warned of.", (*_MODEL, "code"), registry=registry
        )
        lost = Counter(
            "hermes_assembly_warning_tokens",
            "Tokens of them that had to be computed again because of it.",
            (*_MODEL, "code"),
            registry=registry,
        )
        self._warnings = {code: warnings.labels(name, code) for code in CODES}
        self._warning_tokens = {code: lost.labels(name, code) for code in CODES}

        def gauge(name: str, text: str, mode: Mode) -> Gauge:
            full = f"hermes_assembly_cache_{name}"
            return Gauge(full, text, _MODEL, registry=registry, multiprocess_mode=mode).labels(model_name)

        self._sizes = [
            _Sizes(
                gauge(f"{tier}_entries", f"Entries {place} now.", mode),
                gauge(f"{tier}_bytes", f"Bytes {place} now.", mode),
            )
            for tier, place, mode in _TIERS
        ]
        stages = Histogram(
            "hermes_assembly_stage_seconds", "Time of an assembly's stages.", (*_MODEL, "stage"), registry=registry,
            buckets=_STAGE_SECONDS,
        )  # fmt: skip
        self._stages = {stage: stages.labels(name, stage) for stage in _STAGES}

    def looked_up(self, result: Result) -> None:
        """A whole prompt was looked up."""
        self._lookups[result].inc()

    def looked_for_beginning(self, result: Result) -> None:
        """A prompt's beginning was looked up."""
        self._beginnings[result].inc()

    def prompt(self, tokens: int, hit_tokens: int, kind: Kind) -> None:
        """A prompt that was looked up is done. hit_tokens: of the kind named."""
        self._prompt_tokens.inc(tokens)
        if hit_tokens:
            self._hit_tokens[kind].inc(hit_tokens)

    def answered(self, outcome: Outcome) -> None:
        """An answer ended that could come back in a next turn."""
        self._answers[outcome].inc()

    def warned(self, findings: Iterable[Finding]) -> None:
        """A prompt is done; what was found."""
        tokens: dict[str, int] = {}
        for each in findings:
            tokens[each.code] = tokens.get(each.code, 0) + each.tokens
        for code, count in tokens.items():
            self._warnings[code].inc()
            self._warning_tokens[code].inc(count)

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        """Times what is done inside."""
        return _Timed(self._stages[stage])

    def evicted(self, count: int) -> None:
        """Entries went from the disk."""
        self._evicted["disk"].inc(count)

    def forgotten(self, count: int) -> None:
        """Entries went from memory."""
        self._evicted["memory"].inc(count)

    def damaged(self) -> None:
        """An entry was damaged."""
        self._damaged.inc()

    def disk_trouble(self) -> None:
        """The disk would not."""
        self._troubles.inc()

    def writes_dropped(self, count: int) -> None:
        """Entries could not be written."""
        self._dropped.inc(count)

    def sizes(self, memory: Sizes, disk: Sizes) -> None:
        """How much there is now."""
        for gauges, sizes in zip(self._sizes, (memory, disk), strict=True):
            gauges.entries.set(sizes.entries)
            gauges.bytes.set(sizes.bytes)

    def read(self) -> "Counts":
        """What all processes together have counted; reads files where there are several, which takes milliseconds."""
        registry = self._registry if self._processes is None else of_processes(self._processes)
        return Counts([sample for metric in registry.collect() for sample in metric.samples])


class Uncounted(AssemblerMetrics):
    """Where what an assembly does counts for nothing, because somebody only looks."""

    def __init__(self) -> None:
        """Makes none of the metrics."""

    def looked_up(self, result: Result) -> None:
        """Nothing."""

    def looked_for_beginning(self, result: Result) -> None:
        """Nothing."""

    def prompt(self, tokens: int, hit_tokens: int, kind: Kind) -> None:
        """Nothing."""

    def warned(self, findings: Iterable[Finding]) -> None:
        """Nothing."""

    def stage(self, stage: Stage) -> AbstractContextManager[None]:  # noqa: ARG002 - none is timed
        """Nothing."""
        return nullcontext()


class _Timed(AbstractContextManager[None]):
    """Observes how long what is done inside takes."""

    __slots__ = ("_histogram", "_started")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._histogram.observe(time.perf_counter() - self._started)


class Counts:
    """Counts as they were at one time."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)

    def of(self, name: str, **labels: str) -> int:
        """A metric of the cache, summed over the labels that are not named."""
        full = f"hermes_assembly_cache_{name}"
        found = (each for each in self._samples if each.name == full and labels.items() <= each.labels.items())
        return int(sum(each.value for each in found))
