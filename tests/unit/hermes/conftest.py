import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from hermes.v1 import assembler_pb2_grpc, executor_pb2_grpc
from tests.unit.hermes.fake_admin import FakeAdmin
from tests.unit.hermes.fake_assembler import FakeAssembler


@pytest.fixture
def assembler() -> Iterator[FakeAssembler]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool)
        fake = FakeAssembler()
        assembler_pb2_grpc.add_AssemblerServicer_to_server(fake, server)
        assembler_pb2_grpc.add_AssemblerAdminServicer_to_server(fake, server)
        health_pb2_grpc.add_HealthServicer_to_server(fake.states, server)
        fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield fake
        fake.gone.set()
        server.stop(grace=None).wait()


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        server = grpc.server(pool)
        fake = FakeAdmin()
        executor_pb2_grpc.add_ExecutorAdminServicer_to_server(fake, server)
        fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield fake
        server.stop(grace=None).wait()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A PEM file with a certificate that no server here has."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    names = "-keyout ca.key -out ca.pem -subj /CN=ca -days 2 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    subprocess.run(["openssl", "req", "-x509", "-nodes", *names.split()], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "ca.pem"
