"""The closed loop: a fixed number of users at a time, each of whom waits for an answer before sending the next."""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

from hermes.bench.loads import Caches, Load
from hermes.bench.prose import Prose
from hermes.bench.records import Exchange, Run
from hermes.bench.targets import Call, Target, TargetError
from hermes.bench.workloads import Script, scripts
from hermes.messages import Message

_WARM_UP_WORDS: Final = 20
_WARM_UP_TOKENS: Final = 8
_NOBODY: Final = (-1, -1)  # user and round of a request that no run keeps


class Driver:
    """Sends loads to one server."""

    def __init__(self, target: Target, request_seconds: float | None, tick: Callable[[], None]) -> None:
        """request_seconds: after which a request counts as failed; None waits for ever.

        tick: is called when a request of a run has ended, warm-up not counted.
        """
        self.target = target
        self._request_seconds = request_seconds
        self._tick = tick

    async def run(self, load: Load, caches: Caches, seed: int, series: str = "") -> Run:
        """Warms up, then sends the whole load; what fails is in the run.

        Raises TargetError where the server cannot be used at all: no request of the warm-up was answered.
        """
        await self.target.begin()
        written = scripts(load, seed)
        failures = await self._warm_up(load, caches, seed)
        exchanges: list[Exchange] = []
        users = iter(enumerate(written))
        started, cpu, begin = datetime.now(UTC), time.process_time(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(load.concurrency, load.users)):
                group.create_task(self._take_users(users, load, caches, begin, exchanges))
        return Run(
            target=self.target.name,
            load=load,
            caches=caches,
            seed=seed,
            series=series,
            started=started.isoformat(timespec="seconds"),
            seconds=time.perf_counter() - begin,
            client_cpu_seconds=time.process_time() - cpu,
            warm_up=load.concurrency,
            warm_up_failures=failures,
            exchanges=tuple(exchanges),
        )

    async def _warm_up(self, load: Load, caches: Caches, seed: int) -> int:
        """As many short requests at once as the run will have, which share nothing with it; how many failed."""

        async def ask(place: int) -> str | None:
            messages = [Message("user", Prose(seed, place, "warm-up").text(_WARM_UP_WORDS))]
            call = Call(messages, _WARM_UP_TOKENS, load.ignore_eos, caches)
            exchange, _ = await self._ask(_NOBODY, call, time.perf_counter())
            return exchange.failure

        said = await asyncio.gather(*(ask(place) for place in range(load.concurrency)))
        failures = [failure for failure in said if failure is not None]
        if len(failures) == load.concurrency:
            reason, _, message = failures[0].partition(": ")
            raise TargetError(reason, message)
        return len(failures)

    async def _take_users(
        self, users: Iterator[tuple[int, Script]], load: Load, caches: Caches, begin: float, found: list[Exchange]
    ) -> None:
        for user, script in users:
            history: list[Message] = []
            for place, question in enumerate(script.questions):
                asked = Message("user", question)
                call = Call([script.opening(place), *history, asked], load.max_tokens, load.ignore_eos, caches)
                exchange, text = await self._ask((user, place), call, begin)
                found.append(exchange)
                self._tick()
                if script.grows and exchange.failure is None:
                    history += [asked, Message("assistant", text)]

    async def _ask(self, who: tuple[int, int], call: Call, begin: float) -> tuple[Exchange, str]:
        """Sends one request of a user's round; returns its figures and the text of its answer.

        begin: of the run, on the clock of perf_counter.
        """
        pieces: list[float] = []
        user, place = who
        sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._request_seconds):
                reply = await self.target.answer(call, lambda: pieces.append(time.perf_counter() - sent))
        except TimeoutError:
            failure = f"TIMEOUT: No whole answer came within {self._request_seconds:g} s."
        except TargetError as error:
            failure = str(error)
        else:
            seconds = time.perf_counter() - sent
            return Exchange(
                user=user,
                round=place,
                begin=sent - begin,
                seconds=seconds,
                pieces=tuple(pieces),
                prompt_tokens=reply.prompt_tokens,
                cached_tokens=reply.cached_tokens,
                assembly_cached_tokens=reply.assembly_cached_tokens,
                completion_tokens=reply.completion_tokens,
                engine_seconds=reply.engine_seconds,
            ), reply.text
        return Exchange(user, place, sent - begin, time.perf_counter() - sent, tuple(pieces), failure=failure), ""
