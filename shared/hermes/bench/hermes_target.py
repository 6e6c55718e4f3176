"""A Hermes assembler, with the executor behind it, as a target."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import grpc

from hermes.bench.loads import Caches
from hermes.bench.targets import Call, Reply, TargetError
from hermes.channels import open_aio_channel, unreachable
from hermes.client import AsyncClient
from hermes.v1 import assembler_pb2, assembler_pb2_grpc, executor_pb2, executor_pb2_grpc
from shared.errors import HermesError, from_rpc_error

_CARE_SECONDS: Final = 30.0  # for what is asked between runs


class HermesTarget:
    """Sends chats to an assembler, each run in a namespace of its own, so that no run finds what another cached.

    With the caches off a request neither looks in them nor adds to them: its prompt is rendered and tokenized whole by
    the assembler, and computed whole by the executor.
    """

    def __init__(self, address: str, executor: str, tls_ca: Path | None, namespace: str | None) -> None:
        """Opens no connection yet.

        executor: where its executor is; asked for its model, and told to forget what a run cached.
        namespace: one to use for all runs, and to leave as it is; None makes one for each and empties it.
        """
        self.name = f"hermes:{address}"
        self._address, self._executor = address, executor
        self._client = AsyncClient(address, tls_ca=tls_ca)
        self._admin = open_aio_channel(address, tls_ca)
        self._executor_channel = open_aio_channel(executor, tls_ca)
        self._given = namespace
        self._namespace = namespace or ""

    async def begin(self) -> None:
        """Takes a new namespace, where none was given."""
        self._namespace = self._given or f"bench-{secrets.token_hex(8)}"

    async def answer(self, call: Call, heard: Callable[[], None]) -> Reply:
        """As Target says. Reasoning is text that its reader sees, too."""
        on = call.caches is Caches.ON
        try:
            async with self._client.stream(
                call.messages,
                max_tokens=call.max_tokens,
                ignore_eos=call.ignore_eos,
                temperature=0.0,
                cache_read=on,
                cache_write=on,
                namespace=self._namespace,
            ) as stream:
                async for delta in stream.deltas():
                    if delta.text or delta.reasoning:
                        heard()
                answer = stream.answer
        except HermesError as error:
            raise TargetError(error.reason, error.message) from None
        prompt, completion, cached = answer.usage
        engine = answer.timings.queue + answer.timings.prefill
        return Reply(answer.text, prompt, cached, completion, answer.info.cached_tokens, engine)

    async def end(self) -> None:
        """Empties the run's own namespace in both caches."""
        if self._given is not None:
            return
        prompts = assembler_pb2.FlushAssemblyCacheRequest(namespace=self._namespace)
        tree = executor_pb2.FlushTreeRequest(namespace=self._namespace)
        try:
            await assembler_pb2_grpc.AssemblerAdminStub(self._admin).FlushAssemblyCache(prompts, timeout=_CARE_SECONDS)
        except grpc.RpcError as error:
            raise _said(error, "assembler", self._address) from None
        try:
            await executor_pb2_grpc.ExecutorAdminStub(self._executor_channel).FlushTree(tree, timeout=_CARE_SECONDS)
        except grpc.RpcError as error:
            raise _said(error, "executor", self._executor) from None

    async def facts(self) -> Mapping[str, str | int]:
        """The executor's model."""
        stub = executor_pb2_grpc.ExecutorStub(self._executor_channel)
        try:
            told = await stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=_CARE_SECONDS)
        except grpc.RpcError as error:
            raise _said(error, "executor", self._executor) from None
        return {
            "model": told.model,
            "model_version": told.model_version,
            "context_length": told.context_length,
            "block_size": told.block_size,
            "device": told.device,
            "dtype": told.dtype,
        }

    async def close(self) -> None:
        """Ends all three connections."""
        await self._client.close()
        await self._admin.close()
        await self._executor_channel.close()


def _said(error: grpc.RpcError, service: str, address: str) -> TargetError:
    told = unreachable(from_rpc_error(error), service, address)
    return TargetError(told.reason, told.message)
