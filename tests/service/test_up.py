"""`make up`, as a newcomer types it: both services in the background, one real answer on the screen."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PORTS = (
    "HERMES_ASSEMBLER_PORT",
    "HERMES_EXECUTOR_PORT",
    "HERMES_EXECUTOR_METRICS_PORT",
    "HERMES_ASSEMBLER_METRICS_PORT",
)

pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here"),
    pytest.mark.skipif(not (ROOT / ".venv" / ".installed").exists(), reason="make setup has not run here"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Ports and a run directory of the test's own, beside whatever runs here already."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    ports = {name: str(each.getsockname()[1]) for name, each in zip(PORTS, sockets, strict=True)}
    for each in sockets:
        each.close()
    run_directory = str(tmp_path_factory.mktemp("run"))
    environment = {**os.environ, **ports, "HERMES_RUN_DIR": run_directory, "HERMES_EXECUTOR_KV_MEMORY": "128MiB"}
    yield environment
    make("down", environment)


def make(target: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Without the make that may run these tests leaking into it."""
    clean = {name: value for name, value in environment.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(
        ["make", target], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=170, check=False
    )


def test_one_command_ends_with_an_answer_and_again_is_harmless(environment):
    first = make("up", environment)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Paris" in first.stdout
    again = make("up", environment)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "Paris" in again.stdout
    down = make("down", environment)
    assert down.returncode == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(environment["HERMES_ASSEMBLER_PORT"])), timeout=5)


def test_a_service_that_cannot_start_says_why_and_stops_the_other(environment):
    failed = make("up", environment | {"HERMES_EXECUTOR_KV_MEMORY": "1KiB"})
    assert failed.returncode != 0
    assert "kv_memory" in failed.stdout + failed.stderr
    assert "Traceback" not in failed.stdout + failed.stderr
