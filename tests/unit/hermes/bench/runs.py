"""Runs as a benchmark would have brought them."""

from dataclasses import replace

from hermes.bench.loads import Caches, Load, Workload
from hermes.bench.machine import Machine
from hermes.bench.records import Exchange, Run
from hermes.bench.report import SCHEMA, Report

LOAD = Load(Workload.SERVICE, users=2, rounds=2, concurrency=2, words=450, question=90, max_tokens=8)
MACHINE = Machine("a processor", 2, 2**34, "Linux", "3.11", "0.1.0", 0.5)


def exchange(user: int = 0, place: int = 0, **fields: object) -> Exchange:
    known = Exchange(
        user=user,
        round=place,
        begin=float(place),
        seconds=1.0,
        pieces=(0.4, 0.6, 1.0),
        prompt_tokens=100 * (place + 1),
        cached_tokens=90 * place,
        assembly_cached_tokens=80 * place,
        completion_tokens=4,
        engine_seconds=0.35,
    )
    return replace(known, **fields)


def run(caches: Caches = Caches.ON, seed: int = 1, target: str = "hermes:a:1", **fields: object) -> Run:
    exchanges = tuple(exchange(user, place) for place in range(2) for user in range(2))
    known = Run(
        target=target,
        load=LOAD,
        caches=caches,
        seed=seed,
        series="",
        started="2026-01-01T00:00:00+00:00",
        seconds=2.0,
        client_cpu_seconds=0.1,
        warm_up=2,
        warm_up_failures=0,
        exchanges=exchanges,
    )
    return replace(known, **fields)


def report(*runs: Run) -> Report:
    targets = {each.target: {"model": "m", "context_length": 8192} for each in runs}
    return Report(SCHEMA, ("bench", "run"), MACHINE, targets, runs)
