"""How the compiled kernel gets to its place: once, whole or not at all, and with a reason where it does not."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

from executor.native import library
from executor.native.kernel import NativeKernel
from executor.native.operators import NoKernelError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERMES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refused(source: library.Source | None = None) -> str:
    source = source or library.attention()
    place = library.place(source)
    with pytest.raises(NoKernelError) as caught:
        library.build(source, place, threading.Event())
    assert not place.exists()
    return str(caught.value)


def written(path: Path, text: str) -> library.Source:
    path.write_text(text)
    return library.Source(path, library.attention().flags)


class TestItsName:
    def test_another_source_torch_or_cpu_has_another_place(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places = {library.place(library.attention()), library.place(library.tiles())}
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", "2.13.1")
            places.add(library.place(library.attention()))
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
            places.add(library.place(library.attention()))
        places.add(library.place(written(tmp_path / "other.cpp", "// nothing")))
        assert len(places) >= 4 + (torch.backends.cpu.get_cpu_capability() != "AVX2")
        assert {place.parent for place in places} == {cache / "native"}

    def test_a_cpu_without_such_vectors_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
        with pytest.raises(NoKernelError, match="needs a CPU with AVX2 or AVX-512, and torch calls this one NO AVX"):
            library.attention()


class TestWhatKeepsItFromBeingBuilt:
    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "/nowhere/c++")
        assert refused() == "there is no C++ compiler to build it with (/nowhere/c++)"

    def test_no_ninja(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "c++").write_text("#!/bin/sh\n")
        (tmp_path / "c++").chmod(0o755)
        monkeypatch.setattr(library, "_search_path", lambda: str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        assert refused() == "there is no ninja to build it with"

    def test_a_cache_that_cannot_be_written(self, cache: Path) -> None:
        library.require_tools()
        cache.write_text("a file in its place")
        assert "it cannot be built in" in refused()

    def test_source_that_does_not_compile(self, cache: Path, tmp_path: Path) -> None:
        reason = refused(written(tmp_path / "broken.cpp", "int f() { return missing; }\n"))
        assert "its build failed" in reason
        assert "missing" in reason
        assert "\n" not in reason
        assert [path.suffix for path in (cache / "native").iterdir()] == [".lock"], "nothing else is left"

    def test_a_kernel_that_dies_takes_nobody_along(self, tmp_path: Path) -> None:
        text = "#include <cstdlib>\nnamespace { const bool ended = (std::abort(), true); }\n"
        assert refused(written(tmp_path / "dies.cpp", text)) == "its build failed: it ended by signal 6"


def test_a_build_that_is_stopped_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "slow-c++"
    compiler.write_text(
        f"""#!/bin/sh
case "$*" in *" -c "*) echo $$ >> {tmp_path}/pids; exec sleep 100;; esac
exec c++ "$@"
"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    stopped = threading.Event()
    failures: list[str] = []

    def run() -> None:
        try:
            library.build(library.tiles(), library.place(library.tiles()), stopped)
        except NoKernelError as reason:
            failures.append(str(reason))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n"))
    stopped.set()
    thread.join(10)
    assert failures == ["its build was stopped"]
    for pid in (tmp_path / "pids").read_text().split():
        wait_for(
            lambda pid=pid: not Path("/proc", pid).exists() or "State:\tZ" in Path("/proc", pid, "status").read_text()
        )


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


BUILDER = """
import sys, threading, time
from pathlib import Path
from executor.native import library

def compile_slowly(source, name, directory, stopped):
    with open(sys.argv[1], "a") as log:
        log.write("began\\n")
    time.sleep(float(sys.argv[2]))
    Path(directory, name + ".so").write_text("whole")

library._compile = compile_slowly
place = library.place(library.tiles())
library.build(library.tiles(), place, threading.Event())
assert place.read_text() == "whole"
"""


def builder(log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(BUILDER), str(log), str(seconds)])


def test_of_several_that_build_at_once_one_does_and_all_have_it(tmp_path: Path) -> None:
    library.require_tools()
    log = tmp_path / "log"
    builders = [builder(log, 3.0) for _ in range(2)]
    assert [each.wait(60) for each in builders] == [0, 0]
    assert log.read_text() == "began\n"


def test_one_that_is_killed_while_it_builds_is_in_nobodys_way(cache: Path, tmp_path: Path) -> None:
    library.require_tools()
    log = tmp_path / "log"
    first = builder(log, 100.0)
    wait_for(log.exists)
    first.kill()
    first.wait()
    assert any(path.is_dir() for path in (cache / "native").iterdir())
    assert builder(log, 0.0).wait(60) == 0
    assert sorted(path.suffix for path in (cache / "native").iterdir()) == [".lock", ".so"]


class TestWhatIsLoaded:
    @pytest.fixture
    def place(self) -> Path:
        place = library.place(library.tiles())
        place.parent.mkdir(mode=0o700, parents=True)
        place.write_text("torn")
        place.chmod(0o600)
        return place

    def test_what_is_no_library_is_told(self, place: Path) -> None:
        assert library.is_there(place)
        with pytest.raises(NoKernelError, match=r"cannot be loaded: .*(too short|invalid ELF)"):
            NativeKernel(place.rename(place.with_name("torn.so")))

    def test_what_others_could_have_written_is_not(self, place: Path) -> None:
        for path in (place, place.parent):
            mode = path.stat().st_mode
            path.chmod(mode | 0o020)
            with pytest.raises(NoKernelError, match="others may write"):
                library.is_there(place)
            path.chmod(mode)
        assert library.is_there(place)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_nor_is_what_belongs_to_somebody_else(self, place: Path) -> None:
        os.chown(place, 12345, -1)
        with pytest.raises(NoKernelError, match="others may write"):
            library.is_there(place)
