"""An executor's ExecutorAdmin that answers what a test tells it to, behind a real gRPC server."""

from dataclasses import dataclass, field

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from grpc_status import rpc_status

from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared.errors import HermesError

BRANCH = executor_pb2.Branch(
    id=7, namespace="team-a", tokens=64, children=2, hits=3, idle=Duration(seconds=90), pinned=True, head_token_ids=[1]
)


@dataclass
class FakeAdmin(executor_pb2_grpc.ExecutorAdminServicer):
    """Keeps each request; fails with `error` where there is one."""

    tree: executor_pb2.DescribeTreeResponse = field(
        default_factory=lambda: executor_pb2.DescribeTreeResponse(
            nodes=4, tokens=64, prompt_tokens=200, cached_tokens=50, branches=[BRANCH]
        )
    )
    error: HermesError | None = None
    requests: list[Message] = field(default_factory=list)
    address: str = ""

    def WarmPrefix(  # noqa: N802 - the contract's name
        self, request: executor_pb2.WarmPrefixRequest, context: grpc.ServicerContext
    ) -> executor_pb2.WarmPrefixResponse:
        self._take(request, context)
        pin_id = "pin-1" if request.HasField("pin") else ""
        return executor_pb2.WarmPrefixResponse(cached_tokens=1, computed_tokens=2, pin_id=pin_id)

    def UnpinPrefix(  # noqa: N802 - the contract's name
        self, request: executor_pb2.UnpinPrefixRequest, context: grpc.ServicerContext
    ) -> executor_pb2.UnpinPrefixResponse:
        self._take(request, context)
        return executor_pb2.UnpinPrefixResponse()

    def DescribeTree(  # noqa: N802 - the contract's name
        self, request: executor_pb2.DescribeTreeRequest, context: grpc.ServicerContext
    ) -> executor_pb2.DescribeTreeResponse:
        self._take(request, context)
        return self.tree

    def FlushTree(  # noqa: N802 - the contract's name
        self, request: executor_pb2.FlushTreeRequest, context: grpc.ServicerContext
    ) -> executor_pb2.FlushTreeResponse:
        self._take(request, context)
        return executor_pb2.FlushTreeResponse(freed_blocks=12)

    def _take(self, request: Message, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(self.error.status()))
