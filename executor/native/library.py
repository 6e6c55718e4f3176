"""Where a compiled library lies, and how it gets there: once for each source, torch, and kind of CPU.

It is compiled in a directory beside its place, and renamed when it has been proven there, so that nobody ever sees half
of one; a lock keeps several processes from compiling the same thing, and goes with the process that holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import torch

from executor.native.operators import NoKernelError
from shared.directories import cache_directory

log: Final = logging.getLogger(__name__)

_SOURCES: Final = Path(__file__).parent
_COMMON: Final = ("-O3", "-fopenmp")
_VECTORS: Final = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""What makes ATen's vectors those of a CPU, by torch's names for kinds of them."""
_AMX: Final = ("-mavx512f", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
_LOOK_SECONDS: Final = 0.2
_BUILD_SECONDS: Final = 900.0  # a minute at most, if it had the CPU for itself
_END_SECONDS: Final = 5.0
_LOWEST_PRIORITY: Final = 19
_OTHERS_MAY_WRITE: Final = 0o022


class Source(NamedTuple):
    """A C++ file, and what the compiler is told besides."""

    path: Path
    flags: tuple[str, ...]


def attention() -> Source:
    """The kernel, for this CPU as torch sees it. Raises NoKernelError where ATen has no vectors for it that we know."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _VECTORS:
        raise NoKernelError(f"it needs a CPU with AVX2 or AVX-512, and torch calls this one {capability}")
    vectors = (f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}")
    return Source(_SOURCES / "attention.cpp", (*_COMMON, *vectors, *_VECTORS[capability]))


def tiles() -> Source:
    """Products on AMX tiles."""
    return Source(_SOURCES / "tiles.cpp", (*_COMMON, *_AMX))


def place(source: Source) -> Path:
    """Where the compiled library for this source, torch and CPU lies, or will. Raises StartupError."""
    what = (source.path.read_text(encoding="utf-8"), torch.__version__, platform.machine(), *source.flags)
    digest = hashlib.sha256("\0".join(what).encode()).hexdigest()[:16]
    return cache_directory() / "native" / f"{source.path.stem}_{digest}.so"


def is_there(library: Path) -> bool:
    """Whether it is there already. Raises NoKernelError for a file that somebody else could have put there."""
    try:
        owners = [(path.stat().st_uid, path.stat().st_mode) for path in (library, library.parent)]
    except FileNotFoundError:
        return False
    except OSError as error:
        raise NoKernelError(f"{library} cannot be read: {error.strerror}") from error
    if any(owner not in (0, os.geteuid()) or mode & _OTHERS_MAY_WRITE for owner, mode in owners):
        raise NoKernelError(f"others may write {library} or its directory, so it is not loaded")
    return True


def require_tools() -> None:
    """Raises NoKernelError where there is nothing to compile with."""
    compiler = os.environ.get("CXX", "c++")  # as torch chooses it
    if shutil.which(compiler.split()[0]) is None:
        raise NoKernelError(f"there is no C++ compiler to build it with ({compiler})")
    if shutil.which("ninja", path=_search_path()) is None:
        raise NoKernelError("there is no ninja to build it with")


def built(source: Source, stopped: threading.Event) -> Path:
    """Where the library lies, which is built unless it is there. Raises what that raises."""
    library = place(source)
    if not is_there(library):
        build(source, library, stopped)
    return library


def build(source: Source, library: Path, stopped: threading.Event) -> None:
    """Compiles and proves a library, unless another process does so first. Takes half a minute.

    Raises NoKernelError, also when `stopped` is set meanwhile: then nothing of it is left running.
    """
    require_tools()
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(library.with_suffix(".lock"), stopped):
            if not is_there(library):
                _build_there(source, library, stopped)
    except OSError as error:
        raise NoKernelError(f"it cannot be built in {library.parent}: {error.strerror}") from error


def _build_there(source: Source, library: Path, stopped: threading.Event) -> None:
    prefix = f".{library.stem}-"
    for stale in library.parent.glob(f"{prefix}*"):  # of a process that was killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=prefix, dir=library.parent))
    try:
        _compile(source, library.stem, draft, stopped)
        made = draft / library.name
        made.chmod(0o600)
        with made.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave a name without content
        made.rename(library)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _compile(source: Source, name: str, directory: Path, stopped: threading.Event) -> None:
    """In a process of its own, since a kernel that crashes must crash that, behind all that serves."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(  # noqa: S603 -- our own program
        [sys.executable, "-m", "executor.native.compiling", str(source.path), str(directory), name, *source.flags],
        env={**os.environ, "PATH": _search_path(), "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group, so that the compiler ends with it
    )
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
    output, left = "", _BUILD_SECONDS
    while True:
        try:
            output, _ = process.communicate(timeout=_LOOK_SECONDS)
            break
        except subprocess.TimeoutExpired:
            left -= _LOOK_SECONDS
            if stopped.is_set() or left <= 0:
                _end(process)
                raise NoKernelError("its build was stopped" if stopped.is_set() else "its build did not end") from None
    if process.returncode != 0:
        log.debug("building %s failed:\n%s", source.path.name, output)
        ended = f"it ended by signal {-process.returncode}" if process.returncode < 0 else _reason(output)
        raise NoKernelError(f"its build failed: {ended}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a build's processes: politely first, since ninja has to end the compiler, which is in a group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_SECONDS)
            return
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _reason(output: str) -> str:
    """The line of a build's output that says most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if " error: " in line]
    return (errors or lines[-1:] or ["it does not say why"])[0]


def _search_path() -> str:
    """PATH, and before it where this Python's own programs are: ninja may be one of them."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


@contextmanager
def _lock(path: Path, stopped: threading.Event) -> Iterator[None]:
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stopped.wait(_LOOK_SECONDS):
                    raise NoKernelError("its build was stopped") from None
        yield
