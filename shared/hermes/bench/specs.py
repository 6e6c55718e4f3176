"""Servers as callers name them: `hermes:HOST:PORT` or `openai:URL`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from hermes.bench.hermes_target import HermesTarget
from hermes.bench.targets import Target
from shared.extras import require

EXTRA: Final = "bench"
"""The extra with the packages that only benchmarks need."""


class Kind(StrEnum):
    """What a server speaks."""

    HERMES = "hermes"
    OPENAI = "openai"


class Spec(NamedTuple):
    """One server."""

    kind: Kind
    address: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, with what would be right."""
        kind, colon, address = text.partition(":")
        if not colon or kind not in list(Kind):
            raise ValueError(f"{text!r} names no server: give hermes:HOST:PORT or openai:http://HOST:PORT")
        if kind == Kind.OPENAI:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ValueError(f"{address!r} is no URL: give one such as openai:http://127.0.0.1:8000")
            address = address.rstrip("/").removesuffix("/v1")
        return cls(Kind(kind), address)

    @property
    def switches_caches(self) -> bool:
        """Whether a request can be kept out of its caches."""
        return self.kind is Kind.HERMES


@dataclass(frozen=True, slots=True)
class Access:
    """What it takes to use the servers, besides where they are."""

    executor: str
    """Of the Hermes server."""
    tls_ca: Path | None = None
    namespace: str | None = None
    """One for all runs on Hermes; None makes one for each."""
    model: str | None = None
    """Its name on the OpenAI server; None takes the first."""
    extra: Mapping[str, Any] | None = None
    """Fields for the OpenAI server's requests."""

    def open(self, spec: Spec) -> Target:
        """The server; call it in a running event loop, and close what comes back. Nothing is connected yet.

        Raises HermesError for an address that can be none, StartupError where a package is missing.
        """
        if spec.kind is Kind.HERMES:
            return HermesTarget(spec.address, self.executor, self.tls_ca, self.namespace)
        require(EXTRA, "httpx2")
        from hermes.bench.openai_target import OpenAITarget  # noqa: PLC0415 - an optional package

        return OpenAITarget(spec.address, self.model, self.extra or {})
