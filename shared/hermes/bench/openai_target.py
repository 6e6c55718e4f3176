"""A server that speaks OpenAI's chat completions, as a target: vLLM, SGLang, llama.cpp and others."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2

from hermes.bench.loads import Caches
from hermes.bench.targets import Call, Reply, TargetError

_END: Final = "[DONE]"
_CARE_SECONDS: Final = 30.0  # for what is asked between runs
_ERROR_CHARACTERS: Final = 300  # of what a server says that is no JSON


class OpenAITarget:
    """Sends chats to `/v1/chat/completions` and reads them as server-sent events.

    It has no way to keep a request out of a server's cache, so runs with the caches off are refused; whether they are
    on is the server's own setting, and runs do not find each other's prompts only because their seeds differ.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        extra: Mapping[str, Any],
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Opens no connection yet.

        url: up to and without `/v1`.
        model: its name there; None takes the first that the server lists.
        extra: fields for every request's body.
        transport: what carries the requests, where that is not the network.
        """
        self.name = f"openai:{url}"
        self._model = model
        self._extra = dict(extra)
        self._http = httpx2.AsyncClient(
            base_url=url,
            transport=transport,
            timeout=None,  # who runs the load limits the whole request
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy on the way would be measured too
        )

    async def begin(self) -> None:
        """Learns the model's name, where none was given."""
        if self._model is None:
            self._model = str((await self._models())[0]["id"])

    async def answer(self, call: Call, heard: Callable[[], None]) -> Reply:
        """As Target says."""
        if call.caches is Caches.OFF:
            raise TargetError("CACHES_OFF", "A request of this kind cannot be kept out of the server's cache.")
        reading = _Reading(heard)
        request = self._http.stream("POST", "/v1/chat/completions", json=self._body(call))
        async with self._speaking(), request as response:
            if response.is_error:
                await response.aread()
                raise _refusal(response)
            async for event in httpx2.EventSource(response):
                if event.data == _END:
                    break
                reading.add(_json(event.data))
        return reading.reply()

    async def end(self) -> None:
        """Nothing: there is no standard way to tell such a server to forget."""

    async def facts(self) -> Mapping[str, str | int]:
        """The model as the server lists it."""
        listed = await self._models()
        found = next((each for each in listed if each.get("id") == self._model), listed[0])
        return {name: value for name, value in found.items() if isinstance(value, str | int)}

    async def close(self) -> None:
        """Ends its connections."""
        await self._http.aclose()

    def _body(self, call: Call) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": message.role, "content": message.content} for message in call.messages],
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if call.ignore_eos:
            body["ignore_eos"] = True  # no field of OpenAI's, but vLLM, SGLang and llama.cpp know it
        return body | self._extra

    async def _models(self) -> list[dict[str, Any]]:
        async with self._speaking():
            response = await self._http.get("/v1/models", timeout=_CARE_SECONDS)
        if response.is_error:
            raise _refusal(response)
        listed = _json(response.text).get("data")
        if not listed:
            raise TargetError("NO_MODEL", "The server lists no model under /v1/models.")
        return list(listed)

    @asynccontextmanager
    async def _speaking(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx2.HTTPError as error:
            raise TargetError(type(error).__name__, str(error) or "the connection failed") from None


class _Reading:
    """An answer as far as it has come."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._text: list[str] = []
        self._usage: dict[str, Any] | None = None
        self._finished = False

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Takes the next event. Raises TargetError for one that tells of a failure."""
        if chunk.get("error"):
            raise _told(chunk["error"])
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                self._heard()
            self._text.append(delta.get("content") or "")
            self._finished = self._finished or choice.get("finish_reason") is not None

    def reply(self) -> Reply:
        """The whole answer. Raises TargetError where it has no end or no usage."""
        if not self._finished:
            raise TargetError("BROKEN_STREAM", "The server ended the stream before the answer.")
        if self._usage is None:
            raise TargetError("NO_USAGE", "The server counts no tokens in its stream (stream_options.include_usage).")
        details = self._usage.get("prompt_tokens_details") or {}
        return Reply(
            text="".join(self._text),
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(self._usage.get("completion_tokens") or 0),
        )


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TargetError("BAD_JSON", f"The server sent what is no JSON object: {text[:_ERROR_CHARACTERS]!r}")
    return found


def _refusal(response: httpx2.Response) -> TargetError:
    try:
        found = response.json()
    except ValueError:
        found = None
    error = found.get("error", found) if isinstance(found, dict) else response.text
    return _told(error, f"HTTP_{response.status_code}")


def _told(error: object, reason: str = "STREAM_ERROR") -> TargetError:
    message = error.get("message") if isinstance(error, dict) else error
    return TargetError(reason, str(message)[:_ERROR_CHARACTERS])
