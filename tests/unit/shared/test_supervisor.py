import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from shared.errors import StartupError
from shared.supervisor.commands import down, environment, logs, next_steps, up
from shared.supervisor.rundir import Process, RunDirectory, Running, State
from shared.supervisor.services import Service, services_of

FAKE = Path(__file__).with_name("fake_service.py")
WAIT = 60.0

# what `up` starts outlives it by intent
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def service(name: str, *how: str, port: int | None = None, drain_seconds: float = 20.0) -> Service:
    port = port or free_port()
    health = f"fake.{name}"
    command = [sys.executable, str(FAKE), str(port), health, *how]
    return Service(name, command, {}, "127.0.0.1", port, health, None, drain_seconds)


class Rig:
    """A run directory, two fake services, and the command that supervises them."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path / "run")
        self.services = [service("executor"), service("assembler")]
        self._script = path / "supervise.py"

    def supervisor(self) -> list[str]:
        self._script.write_text(
            textwrap.dedent(f"""
                import sys
                from pathlib import Path
                from shared.supervisor.children import run
                from shared.supervisor.rundir import RunDirectory
                from shared.supervisor.services import Service
                services = [Service(*fields) for fields in {[tuple(each) for each in self.services]!r}]
                sys.exit(run(RunDirectory(Path({str(self.directory.path)!r})), services))
            """)
        )
        return [sys.executable, str(self._script)]

    def up(self) -> int:
        return up(self.directory, self.services, self.supervisor(), WAIT)

    def state(self) -> State:
        state = self.directory.read()
        assert state is not None
        return state

    def pid(self, name: str) -> int:
        return next(each.process.pid for each in self.state().services if each.name == name)


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    if rig.directory.read() is not None:
        down(rig.directory, WAIT)


def ended(state: State) -> bool:
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        if not state.alive() and not any(each.process.alive() for each in state.services):
            return True
        time.sleep(0.05)
    return False


def test_up_starts_both_and_down_stops_both(rig, capsys):
    assert rig.up() == 0
    state = rig.state()
    assert [each.name for each in state.services] == ["executor", "assembler"]
    assert environment(rig.directory) == 0
    assert next_steps(rig.directory) == 0
    assert down(rig.directory, WAIT) == 0
    assert ended(state)
    out = capsys.readouterr().out
    assert f"assembler is ready on {rig.services[1].address}" in out
    assert f"\nexport HERMES_ADDRESS={rig.services[1].address}\n" in out
    assert f"\nexport HERMES_EXECUTOR_ADDRESS={rig.services[0].address}\n" in out
    assert f"chat --address {rig.services[1].address} " in out
    assert f"cache tree --executor {rig.services[0].address} " in out
    assert f"HERMES_RUN_DIR={rig.directory.path} make logs" in out
    assert environment(rig.directory) == next_steps(rig.directory) == 1


def test_up_again_changes_nothing(rig, capsys):
    assert rig.up() == 0
    before = rig.state()
    assert rig.up() == 0
    assert rig.state() == before
    assert "already runs" in capsys.readouterr().out


def test_down_when_nothing_runs_is_harmless(rig, capsys):
    assert down(rig.directory, WAIT) == 0
    assert f"not running with its state in {rig.directory.path}" in capsys.readouterr().out


def test_the_assembler_stops_before_the_executor(rig):
    assert rig.up() == 0
    down(rig.directory, WAIT)
    lines = rig.directory.log.read_text().splitlines()
    leaving = [line for line in lines if "leaving" in line]
    assert leaving == ["assembler | leaving after SIGTERM", "executor  | leaving after SIGTERM"]
    assert "leaving" in rig.directory.service_log("executor").read_text()


def test_one_that_dies_stops_the_other_and_says_why(rig):
    assert rig.up() == 0
    state = rig.state()
    os.kill(rig.pid("executor"), signal.SIGUSR1)
    assert ended(state)
    failure = rig.state().failure
    assert failure is not None
    assert failure.startswith("The executor ended with exit code 3.")
    assert "leaving after SIGUSR1" in failure
    assert "hermes    | The executor ended" in rig.directory.log.read_text()


def test_a_killed_service_is_told_by_its_signal(rig):
    assert rig.up() == 0
    state = rig.state()
    os.kill(rig.pid("assembler"), signal.SIGKILL)
    assert ended(state)
    assert "The assembler was ended by SIGKILL" in (rig.state().failure or "")


def test_a_service_that_cannot_start_gives_its_sentence(rig, capsys):
    rig.services[0] = service("executor", "refuse")
    assert rig.up() == 1
    assert capsys.readouterr().err == "The executor cannot start: The model is not there: prepare it.\n"
    assert ended(rig.state())


def test_a_port_in_use_is_told_before_anything_starts(rig, capsys):
    with socket.create_server(("127.0.0.1", rig.services[1].port)):
        assert rig.up() == 1
    err = capsys.readouterr().err
    assert f"127.0.0.1:{rig.services[1].port}" in err
    assert "HERMES_ASSEMBLER_PORT" in err
    assert rig.state().services == ()


def test_the_metrics_port_is_looked_at_too(rig, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        rig.services[0] = rig.services[0]._replace(metrics_port=taken.getsockname()[1])
        assert rig.up() == 1
    assert "HERMES_EXECUTOR_METRICS_PORT" in capsys.readouterr().err
    assert rig.state().services == ()


def test_usual_addresses_need_no_options(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(Path(".run"))
    directory.prepare()
    me = Process.of(os.getpid())
    usual = (("executor", "127.0.0.1:50052"), ("assembler", "127.0.0.1:50051"))
    directory.write(State(me, tuple(Running(name, address, "", None, me) for name, address in usual)))
    assert next_steps(directory) == 0
    out = capsys.readouterr().out
    assert "  make logs " in out
    assert "--" not in out


def test_with_tls_the_next_steps_trust_the_certificate(tmp_path, capsys):
    directory, me = RunDirectory(tmp_path), Process.of(os.getpid())
    names = ("executor", "assembler")
    directory.write(State(me, tuple(Running(name, "h:1", "", "my ca.pem", me) for name in names)))
    assert next_steps(directory) == environment(directory) == 0
    out = capsys.readouterr().out
    assert "chat --address h:1 --tls-ca 'my ca.pem' " in out
    assert "export HERMES_TLS_CA='my ca.pem'\n" in out


def supervise(*arguments, **how):
    command = [sys.executable, "-m", "shared.supervisor", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=WAIT, **how)


@pytest.mark.parametrize("command", ["up", "run", "down", "logs", "environment", "next"])
def test_a_run_directory_that_is_a_file_is_a_sentence(tmp_path, command):
    (tmp_path / "file").touch()
    done = supervise(command, "--run-dir", str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"The run directory {tmp_path / 'file'} cannot be used (")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "run"])
def test_a_run_directory_that_cannot_be_made_is_a_sentence(command):
    done = supervise(command, env={**os.environ, "HERMES_RUN_DIR": "/proc/hermes"})
    assert done.returncode == 2
    assert "set HERMES_RUN_DIR to a directory" in done.stderr


def test_a_reader_of_the_log_who_has_enough_is_no_failure(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.prepare()
    directory.log.write_text("assembler | a line\n" * 50)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = supervise("logs", "--run-dir", str(tmp_path), stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_who_leaves_while_nothing_is_said_ends_the_following(rig):
    assert rig.up() == 0
    command = [sys.executable, "-m", "shared.supervisor", "logs", "--run-dir", str(rig.directory.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        following.stdout.readline()
        following.stdout.close()
        assert following.wait(WAIT) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_log_that_cannot_be_printed_is_a_sentence(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.prepare()
    directory.log.write_text("assembler | a line\n")
    with open("/dev/full", "w") as full:
        done = supervise("logs", "--run-dir", str(tmp_path), stdout=full)
    assert (done.returncode, done.stderr) == (1, "The output cannot be used: No space left on device.\n")


@pytest.mark.parametrize("variable", ["HERMES_EXECUTOR_PORT", "HERMES_EXECUTOR_METRICS_PORT"])
def test_one_port_for_two_is_refused(monkeypatch, variable):
    monkeypatch.setenv(variable, "50051")
    with pytest.raises(StartupError, match="are both 50051"):
        services_of()


def test_a_service_that_does_not_drain_is_killed(rig):
    rig.services[1] = service("assembler", "stubborn")
    assert rig.up() == 0
    state = rig.state()
    state.supervisor.signal(signal.SIGTERM)
    state.supervisor.signal(signal.SIGTERM)  # the second asks for no more patience
    while state.alive():
        state.supervisor.signal(signal.SIGTERM)
        time.sleep(0.05)
    assert ended(state)


def test_services_of_a_killed_supervisor_are_ended_by_the_next(rig):
    assert rig.up() == 0
    old = rig.state()
    old.supervisor.signal(signal.SIGKILL)
    while old.alive():
        time.sleep(0.05)
    assert rig.up() == 0
    assert not any(each.process.alive() for each in old.services)
    assert rig.state().supervisor != old.supervisor


def test_a_recycled_process_id_is_left_alone(rig):
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        rig.directory.logs.mkdir(parents=True)
        rig.directory.write(State(Process(bystander.pid, "long ago")))
        assert down(rig.directory, WAIT) == 0
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n")


def test_a_second_supervisor_in_the_same_directory_refuses(rig):
    assert rig.up() == 0
    before = rig.state()
    second = subprocess.run(rig.supervisor(), capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert "already runs" in second.stderr
    assert rig.state() == before


def test_in_the_foreground_lines_have_prefixes_and_an_interrupt_stops(rig):
    process = subprocess.Popen(rig.supervisor(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = set()
    for line in process.stdout:
        seen.add(line.rstrip("\n"))
        if {"assembler | ready", "executor  | ready"} <= seen:
            process.send_signal(signal.SIGINT)
            break
    assert "assembler | leaving after SIGTERM" in process.communicate(timeout=WAIT)[0]
    assert process.returncode == 0


def test_logs_show_the_last_lines_and_end_when_all_has_stopped(rig, capsys):
    assert logs(rig.directory, 10) == 1
    assert rig.up() == 0
    down(rig.directory, WAIT)
    capsys.readouterr()
    assert logs(rig.directory, 2) == 0
    assert capsys.readouterr().out == "assembler | leaving after SIGTERM\nexecutor  | leaving after SIGTERM\n"


def test_services_listen_where_their_settings_say(monkeypatch):
    monkeypatch.setenv("HERMES_EXECUTOR_PORT", "6002")
    executor, assembler = services_of(["--port", "6001"])
    assert (assembler.address, executor.address) == ("127.0.0.1:6001", "127.0.0.1:6002")
    assert assembler.command[-2:] == ["--port", "6001"]
    assert assembler.environment["HERMES_ASSEMBLER_EXECUTOR"] == "127.0.0.1:6002"


def test_an_executor_that_was_named_is_kept(monkeypatch):
    monkeypatch.setenv("HERMES_ASSEMBLER_EXECUTOR", "gpu-box:50052")
    _, assembler = services_of()
    assert "HERMES_ASSEMBLER_EXECUTOR" not in assembler.environment


def test_port_0_is_refused():
    with pytest.raises(StartupError, match="port 0"):
        services_of(["--port", "0"])


def test_addresses_of_wildcard_and_ipv6_hosts():
    base = service("executor", port=7)
    assert base._replace(host="0.0.0.0").address == "127.0.0.1:7"  # noqa: S104 - nothing listens
    assert base._replace(host="::").address == "[::1]:7"
