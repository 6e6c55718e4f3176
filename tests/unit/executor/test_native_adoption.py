"""When an engine gets the kernel, and what is said where it does not."""

import logging
import threading
from pathlib import Path

import pytest
import torch

from executor.kv.pool import KVLayout
from executor.native import adoption, library
from executor.native.adoption import Adoption
from executor.native.kernel import NoKernelError
from shared.errors import StartupError, unavailable

LAYOUT = KVLayout(2, 3, 64, torch.float32, torch.device("cpu"))


class Machine:
    """What the kernel's library and the engine are told, without either."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.built = tmp_path / "attention_test.so"
        self.told: list[str] = []
        self.engine: list[object] = []
        self.may_end = threading.Event()
        self.fails: str | None = None
        self.adopted = threading.Event()
        monkeypatch.setattr(library, "place", lambda: self.built)
        monkeypatch.setattr(library, "require_tools", lambda: None)
        monkeypatch.setattr(library, "is_there", Path.exists)
        monkeypatch.setattr(library, "build", self.build)
        monkeypatch.setattr(adoption, "NativeKernel", lambda place: place.read_text())
        monkeypatch.setattr(adoption, "prove", lambda kernel, head_dim: self.told.append(f"{kernel} at {head_dim}"))

    def build(self, place: Path, stopped: threading.Event) -> None:
        self.may_end.wait(10)
        if stopped.is_set():
            raise NoKernelError("its build was stopped")
        if self.fails:
            raise NoKernelError(self.fails)
        place.write_text("kernel")

    def adopt(self, kernel: object) -> None:
        self.engine.append(kernel)
        self.adopted.set()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def finished(adopting: Adoption) -> None:
    assert adopting._builder is not None
    adopting._builder.join(10)
    assert not adopting._builder.is_alive()


@pytest.mark.parametrize("setting", ["auto", "native"])
def test_what_is_compiled_already_is_there_before_the_first_step(machine: Machine, setting: str) -> None:
    machine.built.write_text("kernel")
    Adoption(setting, LAYOUT, machine.adopt).begin()  # type: ignore[arg-type]
    assert machine.engine == ["kernel"]
    assert machine.told == ["kernel at 64"], "proven for the model's own width"


def test_what_is_not_is_compiled_while_the_engine_serves(machine: Machine) -> None:
    adopting = Adoption("auto", LAYOUT, machine.adopt)
    adopting.begin()
    assert machine.engine == []
    machine.may_end.set()
    assert machine.adopted.wait(10)
    assert machine.engine == ["kernel"]
    adopting.close()


def test_who_asks_for_it_by_name_waits_for_it(machine: Machine) -> None:
    machine.may_end.set()
    Adoption("native", LAYOUT, machine.adopt).begin()
    assert machine.engine == ["kernel"]


def test_torchs_own_is_all_that_is_wanted(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.built.write_text("kernel")
    Adoption("torch", LAYOUT, machine.adopt).begin()
    assert machine.engine == machine.told == caplog.records == []


def test_a_failure_is_told_once_and_harms_nobody(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.fails = "its build failed: no room"
    machine.may_end.set()
    adopting = Adoption("auto", LAYOUT, machine.adopt)
    adopting.begin()
    finished(adopting)
    assert machine.engine == []
    assert warnings(caplog) == [
        "attention of decoding sequences: torch's own, since there is no native kernel: its build failed: no room"
    ]


def test_a_failure_that_nobody_thought_of_is_told_too(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "build", lambda *_: 1 / 0)
    adopting = Adoption("auto", LAYOUT, machine.adopt)
    adopting.begin()
    finished(adopting)
    assert warnings(caplog) == ["building the native attention kernel failed; torch's own serves"]


def test_a_kernel_that_computes_something_else_is_left_out(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: object) -> None:
        raise NoKernelError("its results differ")

    machine.built.write_text("kernel")
    monkeypatch.setattr(adoption, "prove", differs)
    Adoption("auto", LAYOUT, machine.adopt).begin()
    assert machine.engine == []
    assert warnings(caplog)[0].endswith("no native kernel: its results differ")


def test_without_a_compiler_nothing_is_begun(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise NoKernelError("there is no C++ compiler to build it with (c++)")

    monkeypatch.setattr(library, "require_tools", none)
    adopting = Adoption("auto", LAYOUT, machine.adopt)
    adopting.begin()
    assert adopting._builder is None
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("fails", ["its build failed: no room", None])
def test_where_it_must_be_there_and_is_not_there_is_no_start(machine: Machine, fails: str | None) -> None:
    machine.fails = fails
    machine.may_end.set()
    layout = LAYOUT if fails else KVLayout(2, 3, 64, torch.bfloat16, LAYOUT.device)
    why = fails or "the pool holds bfloat16"
    with pytest.raises(StartupError, match=f"no native attention kernel: .*{why}; set cpu_attention = auto"):
        Adoption("native", layout, machine.adopt).begin()


def test_a_gpu_is_no_reason_for_a_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    layout = KVLayout(2, 3, 64, torch.bfloat16, torch.device("cuda"))
    Adoption("auto", layout, machine.adopt).begin()
    assert caplog.records == []
    with pytest.raises(StartupError, match="the model runs on cuda"):
        Adoption("native", layout, machine.adopt).begin()


def test_an_executor_that_stops_stops_the_build(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    adopting = Adoption("auto", LAYOUT, machine.adopt)
    adopting.begin()
    threading.Timer(0.2, machine.may_end.set).start()
    adopting.close()
    assert machine.engine == warnings(caplog) == []


def test_an_engine_that_ended_needs_no_kernel(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    def ended(kernel: object) -> None:
        raise unavailable("DRAINING", "The executor is shutting down; try another one.")

    machine.may_end.set()
    adopting = Adoption("auto", LAYOUT, ended)
    adopting.begin()
    finished(adopting)
    assert warnings(caplog) == []
