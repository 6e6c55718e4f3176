"""What an executor refuses before it loads anything."""

import asyncio
import importlib.util
import socket
import subprocess
import sys
import threading

import grpc
import pytest

from executor import __main__ as executor_main
from executor.__main__ import ExecutorApplication
from shared.errors import StartupError
from shared.server import Health
from shared.settings import ExecutorSettings


def test_the_program_starts_without_the_heavy_packages():
    code = "import sys, executor.__main__; print({'torch', 'transformers', 'safetensors'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


async def test_the_thread_that_loads_the_model_ends_with_that():
    loading = []

    def build():
        loading.append(threading.current_thread())
        return "executor"

    assert await executor_main._in_thread_that_ends(build) == "executor"
    loading[0].join(10)
    assert not loading[0].is_alive(), "what helped it to compute would stand in the engine's way"


def test_a_package_that_is_not_installed_is_told(monkeypatch, capsys):
    monkeypatch.setattr("shared.extras.find_spec", lambda name: None if name == "torch" else importlib.util)
    assert executor_main.main([]) == 2
    assert capsys.readouterr().err == (
        "hermes-executor: The package of torch is not installed: run `pip install 'hermes-serving[executor]'`.\n"
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"max_running": 9, "max_batch_tokens": 8}, "max_running 9"), ({"block_size": 1024}, "block_size 1024 is above")],
)
def test_settings_that_no_model_can_run_with_are_refused_at_once(settings, sentence):
    with pytest.raises(StartupError, match=sentence):
        ExecutorApplication(ExecutorSettings(**settings))


async def test_a_metrics_port_in_use_is_told_before_the_model_loads(monkeypatch):
    monkeypatch.setattr(executor_main, "_build", lambda *_: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        application = ExecutorApplication(ExecutorSettings(metrics_port=taken.getsockname()[1]))
        with pytest.raises(StartupError, match=r"metrics port .* is in use"):
            await application.start(grpc.aio.server(), Health())


async def test_a_start_that_fails_gives_the_metrics_port_back(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def fail(*_):
        raise StartupError("There is no such model.")

    monkeypatch.setattr(executor_main, "_build", fail)
    with pytest.raises(StartupError, match="no such model"):
        await ExecutorApplication(ExecutorSettings(metrics_port=port)).start(grpc.aio.server(), Health())
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    server.close()
