"""When an engine gets native code, and what is said where it does not."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor import additions
from executor.additions import NativeAttention, TiledLinears
from executor.kv.pool import KVLayout
from executor.native import kernel, library, tiles
from executor.native.adoption import Adoption
from executor.native.operators import NoKernelError
from shared.errors import StartupError, unavailable

LAYOUT = KVLayout(2, 3, 64, torch.float32, torch.device("cpu"))


class Machine:
    """What the kernel's library and the engine are told, without either."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.built = tmp_path / "attention_test.so"
        self.told: list[str] = []
        self.kernel: object = None
        self.may_end = threading.Event()
        self.fails: str | None = None
        self.adopted = threading.Event()
        monkeypatch.setattr(library, "place", lambda source: self.built)
        monkeypatch.setattr(library, "require_tools", lambda: None)
        monkeypatch.setattr(library, "is_there", Path.exists)
        monkeypatch.setattr(library, "build", self.build)
        monkeypatch.setattr(additions, "NativeKernel", lambda place: place.read_text())
        monkeypatch.setattr(kernel, "prove", lambda kernel, head_dim: self.told.append(f"{kernel} at {head_dim}"))

    def build(self, source: library.Source, place: Path, stopped: threading.Event) -> None:
        self.may_end.wait(10)
        if stopped.is_set():
            raise NoKernelError("its build was stopped")
        if self.fails:
            raise NoKernelError(self.fails)
        place.write_text("kernel")

    def adopt(self, change: Callable[[], None]) -> None:
        change()
        self.adopted.set()

    def adopting(self, setting: Any, layout: KVLayout = LAYOUT) -> Adoption:
        model: Any = SimpleNamespace(layout=layout, device=layout.device, packed_rows=0)
        engine: Any = self
        return Adoption(additions.additions(setting, model, engine))


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
    machine.adopting(setting).begin()
    assert machine.kernel == "kernel"
    assert machine.told == ["kernel at 64"], "proven for the model's own width"


def test_what_is_not_is_compiled_while_the_engine_serves(machine: Machine) -> None:
    adopting = machine.adopting("auto")
    adopting.begin()
    assert machine.kernel is None
    machine.may_end.set()
    assert machine.adopted.wait(10)
    assert machine.kernel == "kernel"
    adopting.close()


def test_who_asks_for_it_by_name_waits_for_it(machine: Machine) -> None:
    machine.may_end.set()
    machine.adopting("native").begin()
    assert machine.kernel == "kernel"


def test_torchs_own_is_all_that_is_wanted(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.built.write_text("kernel")
    machine.adopting("torch").begin()
    assert machine.kernel is None
    assert machine.told == caplog.records == []


def test_a_failure_is_told_once_and_harms_nobody(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.fails = "its build failed: no room"
    machine.may_end.set()
    adopting = machine.adopting("auto")
    adopting.begin()
    finished(adopting)
    assert machine.kernel is None
    assert warnings(caplog) == ["attention: torch's own, since there is no native kernel: its build failed: no room"]


def test_a_failure_that_nobody_thought_of_is_told_too(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "build", lambda *_: 1 / 0)
    adopting = machine.adopting("auto")
    adopting.begin()
    finished(adopting)
    assert warnings(caplog) == ["building the native attention kernel failed; torch's own code serves"]


def test_a_kernel_that_computes_something_else_is_left_out(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(*_: object) -> None:
        raise NoKernelError("its results differ")

    machine.built.write_text("kernel")
    monkeypatch.setattr(kernel, "prove", differs)
    machine.adopting("auto").begin()
    assert machine.kernel is None
    assert warnings(caplog)[0].endswith("no native kernel: its results differ")


def test_without_a_compiler_nothing_is_begun(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise NoKernelError("there is no C++ compiler to build it with (c++)")

    monkeypatch.setattr(library, "require_tools", none)
    adopting = machine.adopting("auto")
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
        machine.adopting("native", layout).begin()


def test_a_gpu_is_no_reason_for_a_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    layout = KVLayout(2, 3, 64, torch.bfloat16, torch.device("cuda"))
    machine.adopting("auto", layout).begin()
    assert caplog.records == []
    with pytest.raises(StartupError, match="the model runs on cuda"):
        machine.adopting("native", layout).begin()


def test_an_executor_that_stops_stops_the_build(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    adopting = machine.adopting("auto")
    adopting.begin()
    threading.Timer(0.2, machine.may_end.set).start()
    adopting.close()
    assert machine.kernel is None
    assert warnings(caplog) == []


def test_an_engine_that_ended_needs_no_kernel(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    def ended(change: object) -> None:
        raise unavailable("DRAINING", "The executor is shutting down; try another one.")

    machine.may_end.set()
    machine.adopt = ended  # type: ignore[method-assign]
    adopting = machine.adopting("auto")
    adopting.begin()
    finished(adopting)
    assert warnings(caplog) == []


class TestLinears:
    """Beside attention: linears of many rows, where linears are packed and the CPU has AMX."""

    def test_they_are_had_where_linears_are_packed_alone(self) -> None:
        def kinds(setting: Any, packed_rows: int, device: str) -> list[type]:
            model: Any = SimpleNamespace(layout=LAYOUT, device=torch.device(device), packed_rows=packed_rows)
            engine: Any = None
            return [type(each) for each in additions.additions(setting, model, engine)]

        assert kinds("auto", 8, "cpu") == [NativeAttention, TiledLinears]
        assert kinds("torch", 8, "cpu") == [TiledLinears]
        assert kinds("auto", 0, "cpu") == [NativeAttention]
        assert kinds("auto", 0, "cuda") == []

    def test_what_cannot_be_compiled_keeps_nothing_else_from_it(
        self, machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.INFO)

        def build(source: library.Source, place: Path, stopped: threading.Event) -> None:
            if source.path.stem == "attention":
                raise NoKernelError("its build failed: no room")
            place.write_text("tiles")

        def fails(place: Path) -> None:
            raise NoKernelError("Linux does not let this process use AMX")

        monkeypatch.setattr(library, "build", build)
        monkeypatch.setattr(tiles, "require_fit", lambda: None)
        monkeypatch.setattr(additions, "Tiles", fails)
        model: Any = SimpleNamespace(layout=LAYOUT, device=LAYOUT.device, packed_rows=8)
        engine: Any = machine
        adopting = Adoption(additions.additions("auto", model, engine))
        adopting.begin()
        finished(adopting)
        said = [record.getMessage() for record in caplog.records]
        assert said[0].startswith("building native attention kernel and AMX linears beside serving")
        assert said[1].endswith("no native kernel: its build failed: no room")
        assert said[2].startswith("CPU linears: dense above 8 rows, since there are none on AMX tiles: Linux does not")

    def test_a_cpu_without_amx_is_no_reason_for_a_warning(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu amx_tile avx512_bf16\n")
        monkeypatch.setattr(tiles, "_CPU", tmp_path / "cpuinfo")
        model: Any = SimpleNamespace(packed_rows=8, device=LAYOUT.device, layout=LAYOUT)
        engine: Any = None
        caplog.set_level(logging.INFO)
        Adoption(additions.additions("torch", model, engine)).begin()
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert record.getMessage().endswith("none on AMX tiles: this CPU lacks amx_bf16")
