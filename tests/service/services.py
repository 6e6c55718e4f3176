"""The project's services as processes of their own, and what their errors say."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

ROOT = Path(__file__).parents[2]
START_SECONDS = 120
STOP_SECONDS = 30


# Else two of them on one machine want the same port.
OWN_PORTS = ("--metrics-port", "0")

# For an executor whose tokens are compared with transformers' own.
EXACT = ("--cpu-linear", "dense")


class ServiceProcess:
    """`python -m assembler` or `executor` with its log read; on loopback and a free port unless told otherwise."""

    def __init__(self, module: str, *flags: str, port: int = 0) -> None:
        self.log: list[str] = []
        self._ready = threading.Event()
        self._address = ""
        command = [sys.executable, "-m", module, "--port", str(port), *OWN_PORTS, *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> str:
        """Where it listens, once it says so."""
        assert self._ready.wait(START_SECONDS), "".join(self.log)
        assert self._address, "".join(self.log)
        return self._address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address)

    def kill(self) -> None:
        """Ends it at once; does nothing once it has ended."""
        self.process.kill()
        self._settle()

    def stop(self) -> int:
        """Ends it as an operator would; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self._settle()

    def _settle(self) -> int:
        code = self.process.wait(STOP_SECONDS)
        self._reader.join(STOP_SECONDS)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"ready on (\S+) \(", line):
                self._address = match[1]
                self._ready.set()
        self._ready.set()


class Told(NamedTuple):
    """What an error tells its caller."""

    code: grpc.StatusCode
    reason: str
    message: str


def told(error: grpc.RpcError) -> Told:
    """The code, the sentence, and the reason in the one ErrorInfo that every error carries."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    infos = [detail for detail in status.details if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    assert len(infos) == 1, status
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    assert info.domain == "hermes"
    return Told(error.code(), info.reason, error.details() or "")


def executor_process(model_directory, port: int = 0) -> ServiceProcess:
    return ServiceProcess("executor", "--model", str(model_directory), "--kv-memory", "256MiB", *EXACT, port=port)


def assembler_process(model_directory, executor: ServiceProcess) -> ServiceProcess:
    process = ServiceProcess("assembler", "--model", str(model_directory), "--executor", executor.address)
    becomes_healthy(process)
    return process


def becomes_healthy(assembler: ServiceProcess) -> None:
    """Returns when answers can be had."""
    with assembler.channel() as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="hermes.v1.Assembler.Generate"), timeout=60
        )
        for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                watch.cancel()
                return
