from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from hermes.v1 import assembler_pb2_grpc
from tests.unit.hermes.fake_assembler import FakeAssembler


@pytest.fixture
def assembler() -> Iterator[FakeAssembler]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool)
        fake = FakeAssembler()
        assembler_pb2_grpc.add_AssemblerServicer_to_server(fake, server)
        health_pb2_grpc.add_HealthServicer_to_server(fake.states, server)
        fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield fake
        fake.gone.set()
        server.stop(grace=None).wait()
