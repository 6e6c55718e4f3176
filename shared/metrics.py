"""Prometheus metrics: their names, and the endpoint that shows them.

The two caches are told apart, because they fail for different reasons. What matters of the prefix cache together:

    hit rate          rate(hermes_prefix_cache_hit_tokens_total) / rate(hermes_prefix_cache_prompt_tokens_total)
    mean hit length   rate(hermes_prefix_cache_hit_length_tokens_sum)
                          / rate(hermes_prefix_cache_hit_length_tokens_count)
"""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, multiprocess, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.errors import StartupError

_LENGTHS: Final = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_FIRST_TOKEN_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NEXT_TOKEN_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0)
_MODEL: Final = ("model_name",)


class Load(NamedTuple):
    """How busy an executor is now, and what it had to give up since its start."""

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_active: int
    """Held by running requests, shared or their own."""
    blocks_cached: int
    """Held by the prefix tree alone, free to evict."""
    blocks_pinned: int
    """Held by pins; those that running requests read count as active."""
    preemptions: int
    evicted_blocks: int


class ExecutorMetrics:
    """What an executor counts. Each method may be called from any thread."""

    def __init__(self, model_name: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._model_name = model_name
        self._prompt_tokens = self._counter(
            "hermes_prefix_cache_prompt_tokens", "Prompt tokens of admitted requests, each request once."
        )
        self._hit_tokens = self._counter(
            "hermes_prefix_cache_hit_tokens", "Those of them whose keys and values came from the prefix tree."
        )
        self._hit_length = self._histogram(
            "hermes_prefix_cache_hit_length_tokens", "Length of a hit, for requests that had one.", _LENGTHS
        )
        self._first_token = self._histogram(
            "hermes_time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._next_token = self._histogram(
            "hermes_inter_token_latency_seconds", "From one token of an answer to the next.", _NEXT_TOKEN_SECONDS
        )
        self._success = Counter(
            "hermes_request_success", "Answers that ended well.", (*_MODEL, "finish_reason"), registry=self.registry
        )
        self._failures = Counter(
            "hermes_request_failure", "Requests that ended with an error.", (*_MODEL, "reason"), registry=self.registry
        )

    def admitted(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was admitted for the first time."""
        self._prompt_tokens.inc(prompt_tokens)
        self._hit_tokens.inc(cached_tokens)
        if cached_tokens:
            self._hit_length.observe(cached_tokens)

    def first_token(self, seconds: float) -> None:
        """A request got its first token, so long after it arrived."""
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A request got another token, so long after the one before."""
        self._next_token.observe(seconds)

    def finished(self, finish_reason: str) -> None:
        """An answer ended."""
        self._success.labels(self._model_name, finish_reason).inc()

    def failed(self, reason: str) -> None:
        """A request ended with an error."""
        self._failures.labels(self._model_name, reason).inc()

    def watch(self, load: Callable[[], Load]) -> None:
        """Reports what `load` returns whenever the metrics are asked for; it may be called from any thread."""
        self.registry.register(_LoadCollector(self._model_name, load))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _MODEL, registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _MODEL, registry=self.registry, buckets=buckets).labels(self._model_name)


class _LoadCollector(Collector):
    """Shows a load as gauges and counters, read when they are asked for."""

    def __init__(self, model_name: str, load: Callable[[], Load]) -> None:
        self._labels = [model_name]
        self._load = load

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        for name, text, value in (
            ("hermes_requests_running", "Requests in the batch.", load.running),
            ("hermes_requests_waiting", "Requests that wait to be admitted.", load.waiting),
        ):
            gauge = GaugeMetricFamily(name, text, labels=_MODEL)
            gauge.add_metric(self._labels, value)
            yield gauge
        blocks = GaugeMetricFamily("hermes_kv_blocks", "Blocks of keys and values by state.", labels=(*_MODEL, "state"))
        blocks.add_metric([*self._labels, "free"], load.blocks_free)
        blocks.add_metric([*self._labels, "active"], load.blocks_active)
        blocks.add_metric([*self._labels, "cached"], load.blocks_cached)
        blocks.add_metric([*self._labels, "pinned"], load.blocks_pinned)
        yield blocks
        for name, text, value in (
            ("hermes_preemptions", "Times that a running request had to give way.", load.preemptions),
            ("hermes_evicted_blocks", "Blocks that the prefix tree gave up.", load.evicted_blocks),
        ):
            counter = CounterMetricFamily(name, text, labels=_MODEL)
            counter.add_metric(self._labels, value)
            yield counter


# Names the directory in which prometheus_client keeps a process's counts, from its import on.
PROCESSES_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


def of_processes(directory: Path) -> CollectorRegistry:
    """What several processes have counted together, which keep their counts in a directory."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(directory))  # type: ignore[no-untyped-call]
    return registry


def process_ended(directory: Path, pid: int) -> None:
    """Leaves out what an ended process had at that time; what it has counted stays."""
    multiprocess.mark_process_dead(pid, path=str(directory))  # type: ignore[no-untyped-call]


class Endpoint:
    """The HTTP server that Prometheus asks, on a thread of its own."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Starts to serve; port 0 takes a free one. Raises StartupError for a port that is in use."""
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be served ({error.strerror})"
            raise StartupError(f"The metrics port {host}:{port} {why}; set another metrics_port.") from error

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
