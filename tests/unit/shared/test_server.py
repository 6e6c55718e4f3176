"""A server's life, in processes of its own: ready, told to stop, drained, forced, refused to start."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any, ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared import errors

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "hermes.v1.Executor"
PATIENCE = 60.0  # seconds after which a test that waits has failed
ROOT = Path(__file__).parents[3]

# GetLoad runs until the application is told to drain; GetModelInfo for good. START and DRAIN say how those go.
APPLICATION = """
import asyncio, sys, time
from hermes.v1 import executor_pb2, executor_pb2_grpc
from shared import errors, server
from shared.settings import ExecutorSettings

START, DRAIN = sys.argv.pop(1), sys.argv.pop(1)
if START == "sticky":
    server._STOP_SECONDS = 0.1

class Tiny(executor_pb2_grpc.ExecutorServicer):
    name, services = "executor", ("hermes.v1.Executor",)

    def __init__(self, settings):
        self.drained = asyncio.Event()
        if START == "unusable":
            raise errors.StartupError("These settings cannot be used.")

    async def start(self, grpc_server, health):
        print("starting", flush=True)
        if START == "refused":
            raise errors.StartupError("The model nowhere is not here; run `hermes model prepare`.")
        if START == "broken":
            raise ZeroDivisionError
        if START == "slow":
            await asyncio.to_thread(time.sleep, 3600)
        executor_pb2_grpc.add_ExecutorServicer_to_server(self, grpc_server)
        await health.set("hermes.v1.Executor", True)
        await health.set("hermes.v1.Executor.Other", False)

    async def drain(self):
        print("draining", flush=True)
        if DRAIN == "broken":
            raise ZeroDivisionError
        if DRAIN == "never":
            await asyncio.Event().wait()
        self.drained.set()

    async def stop(self):
        print("stopping", flush=True)
        if START == "sticky":
            await asyncio.Event().wait()

    async def GetLoad(self, request, context):
        print("called", flush=True)
        await self.drained.wait()
        return executor_pb2.GetLoadResponse()

    async def GetModelInfo(self, request, context):
        print("called", flush=True)
        await asyncio.Event().wait()

sys.exit(server.main(ExecutorSettings, lambda settings: server.run(Tiny(settings), settings)))
"""


class Process:
    """The application above, with what it prints line by line."""

    def __init__(self, start: str, drain: str, *flags: str) -> None:
        arguments = [sys.executable, "-c", APPLICATION, start, drain, "--port", "0", *flags]
        # Away from a hermes.toml of whoever runs the tests, and without their variables.
        surroundings = {name: value for name, value in os.environ.items() if not name.startswith("HERMES_")}
        self._popen = subprocess.Popen(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=surroundings,
            cwd=ROOT / "tests",
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.error = ""
        self._lines: Queue[str] = Queue()
        self._threads = [
            threading.Thread(target=self._read, args=(pipe,)) for pipe in (self._popen.stdout, self._popen.stderr)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe: Any) -> None:
        for line in pipe:
            if pipe is self._popen.stderr:
                self.error += line
            self._lines.put(line)

    def until(self, pattern: str) -> re.Match[str]:
        """Waits for a line of stdout or stderr."""
        while True:
            if match := re.search(pattern, self._lines.get(timeout=PATIENCE)):
                return match

    def ready(self) -> str:
        """Waits until the server is ready; its address."""
        return self.until(r"executor ready on (\S+) \(")[1]

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self) -> int:
        """The exit code, after all output has been read."""
        code = self._popen.wait(PATIENCE)
        for thread in self._threads:
            thread.join()
        return code

    def close(self) -> None:
        self._popen.kill()
        self.wait()
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()


Launch = Callable[..., Process]


@pytest.fixture
def launch() -> Iterator[Launch]:
    processes: list[Process] = []

    def start(*flags: str, start: str = "quick", drain: str = "quick") -> Process:
        processes.append(Process(start, drain, *flags))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def load(channel: grpc.Channel) -> "grpc.Future[Any]":
    return executor_pb2_grpc.ExecutorStub(channel).GetLoad.future(executor_pb2.GetLoadRequest(), timeout=PATIENCE)


def check(channel: grpc.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE).status


def failure(call: Any) -> errors.HermesError:
    with pytest.raises(grpc.RpcError) as caught:
        call.result()
    return errors.from_rpc_error(caught.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_calls_end_before_the_process(launch: Launch, number: int) -> None:
    process = launch(drain="quick")
    with grpc.insecure_channel(process.ready()) as channel:
        running = load(channel)
        process.until("called")
        process.signal(number)
        running.result()
    assert process.wait() == 0
    assert "Traceback" not in process.error
    assert process.error.rstrip().endswith("executor stopped")


def test_during_a_drain_calls_are_refused_and_health_says_not_serving(launch: Launch) -> None:
    process = launch(drain="never")
    with grpc.insecure_channel(process.ready()) as channel:
        names = ("", SERVICE, f"{SERVICE}.Other")
        assert [check(channel, name) for name in names] == [SERVING, SERVING, NOT_SERVING]
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watch).status == SERVING
        process.signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        process.until("draining")
        assert [check(channel, name) for name in names] == [NOT_SERVING] * 3
        error = failure(load(channel))
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def test_a_watch_of_health_does_not_hold_up_the_end(launch: Launch) -> None:
    process = launch("--drain-seconds", "3600")
    with grpc.insecure_channel(process.ready()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(watch).status == SERVING
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_calls_that_outlast_the_drain_are_cut_off_with_a_reason(launch: Launch) -> None:
    process = launch("--drain-seconds", "0.2")
    with grpc.insecure_channel(process.ready()) as channel:
        stub = executor_pb2_grpc.ExecutorStub(channel)
        running = stub.GetModelInfo.future(executor_pb2.GetModelInfoRequest(), timeout=PATIENCE)
        process.until("called")
        process.signal(signal.SIGTERM)
        error = failure(running)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    process.until("stopping")
    assert process.wait() == 0
    assert "1 calls did not end within drain_seconds=0.2" in process.error


def test_a_second_interrupt_forces_the_exit(launch: Launch) -> None:
    process = launch("--drain-seconds", "3600", drain="never")
    process.ready()
    process.signal(signal.SIGINT)
    process.until("draining")
    process.signal(signal.SIGINT)
    assert process.wait() == 130
    assert "Traceback" not in process.error


def test_a_drain_that_breaks_still_stops_the_application(launch: Launch) -> None:
    process = launch(drain="broken")
    process.ready()
    process.signal(signal.SIGTERM)
    process.until("stopping")
    assert process.wait() == 0
    assert "ZeroDivisionError" in process.error


def test_an_application_that_does_not_stop_is_left_behind(launch: Launch) -> None:
    process = launch(start="sticky")
    process.ready()
    process.signal(signal.SIGTERM)
    assert process.wait() == 1
    assert "did not free what it holds" in process.error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_long_start_ends_the_process(launch: Launch, number: int) -> None:
    process = launch(start="slow")
    process.until("starting")
    process.signal(number)
    assert process.wait() == 0
    assert "executor stopped before it was ready" in process.error
    assert "Traceback" not in process.error


def test_a_start_that_is_refused_is_one_sentence_and_exit_code_two(launch: Launch) -> None:
    process = launch(start="refused")
    assert process.wait() == 2
    assert process.error == "hermes-executor: The model nowhere is not here; run `hermes model prepare`.\n"


def test_settings_that_the_application_cannot_use_are_one_sentence_and_exit_code_two(launch: Launch) -> None:
    process = launch(start="unusable")
    assert process.wait() == 2
    assert process.error == "hermes-executor: These settings cannot be used.\n"


def test_a_start_that_breaks_is_a_crash_with_a_traceback(launch: Launch) -> None:
    process = launch(start="broken")
    assert process.wait() == 1
    assert "ZeroDivisionError" in process.error


def test_a_port_in_use_is_one_sentence_and_exit_code_two(launch: Launch) -> None:
    port = launch().ready().rpartition(":")[2]
    process = launch("--port", port)
    assert process.wait() == 2
    assert process.error == (
        f"hermes-executor: Port {port} is already in use; stop the process that has it, or set --port to another one.\n"
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "x"], "--port: 'x' cannot be used: input should be a valid integer"),
        (["--host", "192.0.2.1", "--insecure"], "192.0.2.1 is not an address of this machine; set --host to one that"),
        (["--host", "no.such.invalid", "--insecure"], "no.such.invalid is not an address of this machine"),
        (["--tls-cert", "no.pem", "--tls-key", "no.key"], "tls_cert no.pem cannot be read: No such file or directory."),
        (
            ["--tls-cert", __file__, "--tls-key", __file__],
            f"tls_cert {__file__} and tls_key {__file__} are not a PEM certificate and its unencrypted key.",
        ),
    ],
)
def test_a_bad_setting_is_one_sentence_and_exit_code_two(launch: Launch, flags: list[str], sentence: str) -> None:
    process = launch(*flags)
    assert process.wait() == 2
    assert process.error.startswith(f"hermes-executor: {sentence}")
    assert process.error.count("\n") == 1


def test_an_ipv6_address_is_served(launch: Launch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with grpc.insecure_channel(launch("--host", "::1").ready()) as channel:
        assert check(channel, "") == SERVING


def listed(channel: grpc.Channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE)
    return [service.name for service in answer.list_services_response.service]


def test_reflection_lists_the_services_unless_it_is_off(launch: Launch) -> None:
    with grpc.insecure_channel(launch().ready()) as channel:
        assert {SERVICE, "grpc.health.v1.Health"} <= set(listed(channel))
    with grpc.insecure_channel(launch("--no-reflection").ready()) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            listed(channel)
        assert errors.from_rpc_error(caught.value).code is grpc.StatusCode.UNIMPLEMENTED


class Authority:
    """A certificate authority, and certificates that it signed, as files."""

    names: ClassVar = ("server", "client")

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        self._openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
        (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        for name in self.names:
            self._openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
            self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)

    def _openssl(self, *arguments: str) -> None:
        command = ["openssl", *arguments]
        subprocess.run(command, cwd=self.directory, check=True, capture_output=True)

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def read(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    try:
        return Authority(tmp_path_factory.mktemp("authority"))
    except FileNotFoundError:
        pytest.skip("openssl is not installed")


def test_tls_serves_those_who_trust_the_certificate(launch: Launch, authority: Authority) -> None:
    address = launch("--tls-cert", authority.path("server.pem"), "--tls-key", authority.path("server.key")).ready()
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.read("ca.pem"))) as channel:
        assert check(channel, "") == SERVING


def test_mutual_tls_refuses_callers_without_a_certificate(launch: Launch, authority: Authority) -> None:
    own = ("--tls-cert", authority.path("server.pem"), "--tls-key", authority.path("server.key"))
    address = launch(*own, "--tls-client-ca", authority.path("ca.pem")).ready()
    with_certificate = grpc.ssl_channel_credentials(
        authority.read("ca.pem"), authority.read("client.key"), authority.read("client.pem")
    )
    with grpc.secure_channel(address, with_certificate) as channel:
        assert check(channel, "") == SERVING
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.read("ca.pem"))) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            check(channel, "")
        assert errors.from_rpc_error(caught.value).code is grpc.StatusCode.UNAVAILABLE


def test_a_client_ca_that_holds_no_certificate_is_named(launch: Launch, authority: Authority) -> None:
    own = ("--tls-cert", authority.path("server.pem"), "--tls-key", authority.path("server.key"))
    process = launch(*own, "--tls-client-ca", authority.path("ca.key"))
    assert process.wait() == 2
    assert process.error == f"hermes-executor: tls_client_ca {authority.path('ca.key')} holds no PEM certificate.\n"
