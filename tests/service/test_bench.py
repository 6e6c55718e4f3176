"""`hermes bench` against the pair: what it sends, and that its figures are the services' own."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from hermes.bench.figures import figures_of
from hermes.bench.report import read
from hermes.v1 import executor_pb2, executor_pb2_grpc
from tests.service.services import ROOT


def test_a_small_load_hits_with_the_caches_on_computes_all_with_them_off_and_leaves_nothing(
    assembler, executor, tmp_path
):
    size = ["-u", "2", "-r", "2", "-c", "1", "-o", "4", "--words", "60", "--question", "20", "--seed", "3"]
    file = tmp_path / "report.json"
    command = [sys.executable, "-c", "from hermes.cli import main; main()", "bench", "run", "service", *size]
    where = ["--address", assembler.address, "--executor", executor.address, "--out", str(file)]
    told = subprocess.run([*command, *where], capture_output=True, text=True, timeout=200, check=False)
    assert told.returncode == 0, told.stderr
    assert "from the prefix cache" in told.stdout
    report = read(file)
    (facts,) = report.targets.values()
    assert facts["model"] == "SmolLM2-135M-Instruct"
    on, off = report.runs
    assert (on.caches, off.caches) == ("on", "off")
    figures = figures_of(on)
    assert (figures.requests, figures.errors) == (4, 0)
    assert all(each.pieces and each.completion_tokens <= 4 for each in on.exchanges)
    first, *later = sorted(on.exchanges, key=lambda each: each.begin)
    assert first.cached_tokens < 10, "another run's namespace is never found"
    assert all(each.cached_tokens > 60 for each in later), "the system text at least"
    assert all((each.assembly_cached_tokens or 0) > 60 for each in later)
    assert sum(each.cached_tokens + (each.assembly_cached_tokens or 0) for each in off.exchanges) == 0
    assert figures_of(off).computed_tokens == figures_of(off).prompt_tokens > figures.computed_tokens
    with executor.channel() as channel:
        tree = executor_pb2_grpc.ExecutorAdminStub(channel).DescribeTree(executor_pb2.DescribeTreeRequest())
    assert tree.tokens == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.skipif(not (ROOT / ".venv" / ".bench-installed").exists(), reason="make test has not installed the extra")
def test_one_command_measures_a_pair_of_its_own_and_stops_it(tmp_path):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    port, executor_port = (each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    own = [f"BENCH_DIR={tmp_path}", f"BENCH_PORT={port}", f"BENCH_EXECUTOR_PORT={executor_port}"]
    load = "ARGS=service -u 1 -r 2 -c 1 -o 2 --words 20 --question 5"
    # without the make that may run these tests leaking into it
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "bench", *own, "BENCH_KV_MEMORY=128MiB", load]
    told = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=250, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "caches off" in told.stdout
    assert len(read(tmp_path / "report.json").runs) == 2
    assert (tmp_path / "plots" / "ttft-by-round-service.svg").exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5)
