"""What a run brought: every request's figures, as the client's own clock saw them."""

from dataclasses import dataclass

from hermes.bench.loads import Caches, Load


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer. Times are seconds."""

    user: int
    round: int
    """Of this user, counted from 0."""
    begin: float
    """When it was sent, from the beginning of the run."""
    seconds: float
    """Until the answer, or the failure, had come whole."""
    pieces: tuple[float, ...] = ()
    """When each piece of text came, from when the request was sent."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's, those that the server says it did not compute."""
    assembly_cached_tokens: int | None = None
    """Of the prompt's, those that needed no tokenizing; None where the server does not tell."""
    completion_tokens: int = 0
    engine_seconds: float | None = None
    """From when the engine had the request to its first token, by its own clock; None where it does not tell."""
    failure: str | None = None
    """Why there is no answer: a reason and a sentence. Such a request counts as an error and in no time."""

    @property
    def ttft(self) -> float | None:
        """Time to the first text; None where none came."""
        return self.pieces[0] if self.pieces else None

    @property
    def seconds_per_token(self) -> float | None:
        """Time from the first text to the end for each token after the first; None for answers of fewer than two."""
        if not self.pieces or self.completion_tokens < 2:  # noqa: PLR2004 - one token has no pace
            return None
        return (self.seconds - self.pieces[0]) / (self.completion_tokens - 1)

    @property
    def seconds_outside_engine(self) -> float | None:
        """What the time to the first text has besides the engine's; None where either is not known."""
        if not self.pieces or self.engine_seconds is None:
            return None
        return self.pieces[0] - self.engine_seconds

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the server had to compute."""
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one server, from the first request to the last answer; warm-up is not in it."""

    target: str
    load: Load
    caches: Caches
    seed: int
    series: str
    """The series of growing loads that it belongs to; empty for one that stands alone."""
    started: str
    """UTC, ISO 8601."""
    seconds: float
    client_cpu_seconds: float
    """What the client itself took of the processor: close to `seconds`, the client was what was measured."""
    warm_up: int
    """Requests before the run, of which nothing is kept but the failures."""
    warm_up_failures: int
    exchanges: tuple[Exchange, ...]
