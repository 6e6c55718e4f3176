"""Digests that say whether two processes hold the same tokenizer, and which weights made an answer."""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from shared.directories import cache_directory
from shared.errors import StartupError

_log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",  # SentencePiece: tokenizer.model, spiece.model, ...
    "*.tiktoken",
)
MODEL_FILES = ("config.json", "generation_config.json")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")

# Keys of tokenizer_config.json that change no ids: the template has a version of its own, the others tell where the
# files came from and differ between machines that hold the same tokenizer.
_WITHOUT_EFFECT = {
    "chat_template",
    "is_local",
    "local_files_only",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "transformers_version",
}

# A file may change twice within one tick of the file system's clock, and its stamp then stays. So a digest is
# remembered only for a file that has been left alone for longer than the coarsest clock in use (FAT, 2 s).
_SETTLED_SECONDS = 2.0


def tokenizer_fingerprint(path: Path) -> str:
    """A SHA-256 (64 hex digits) over all that changes ids: the tokenizer's files and the version of `tokenizers`.

    Chat templates do not count. Raises StartupError where tokenizer.json is missing or a file cannot be read.
    """
    try:
        version = metadata.version("tokenizers")
    except metadata.PackageNotFoundError as error:
        raise StartupError("The package tokenizers is not installed: pip install tokenizers.") from error
    files = _matching(path, TOKENIZER_FILES)
    if path / "tokenizer.json" not in files:
        raise StartupError(f"The model directory {path} has no tokenizer.json.")
    digest = _Framed("hermes tokenizer 1", version)
    for file in files:
        digest.add(file.name)
        digest.add(_settings(file) if file.name == "tokenizer_config.json" else _content(file))
    return digest.hex()


def model_version(path: Path) -> str:
    """A SHA-256 (64 hex digits) over config.json, generation_config.json and the weights.

    Reading gigabytes at each start would be slow, so the digest of a weights file is remembered in the cache directory
    as long as its size and time stamps stay. Raises StartupError where files are missing or cannot be read.
    """
    configs, weights = _matching(path, MODEL_FILES), _matching(path, WEIGHT_FILES)
    if path / "config.json" not in configs:
        raise StartupError(f"The model directory {path} has no config.json.")
    if not any(file.suffix in {".safetensors", ".bin"} for file in weights):
        raise StartupError(f"The model directory {path} has no weights (*.safetensors).")
    digest = _Framed("hermes model 1")
    for file in configs:
        digest.add(file.name)
        digest.add(_content(file))
    for file in weights:
        digest.add(file.name)
        digest.add(_weights_digest(file))
    return digest.hex()


class _Framed:
    """A SHA-256 over fields that each carry their length, so that no two lists of fields look alike."""

    def __init__(self, *fields: str) -> None:
        self._hash = hashlib.sha256()
        for field in fields:
            self.add(field)

    def add(self, field: str | bytes) -> None:
        data = field.encode() if isinstance(field, str) else field
        self._hash.update(len(data).to_bytes(8, "little"))
        self._hash.update(data)

    def hex(self) -> str:
        return self._hash.hexdigest()


def _matching(path: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StartupError(f"Cannot read {file}: {error.strerror}.") from error


def _settings(file: Path) -> bytes:
    """What of tokenizer_config.json can change ids, in one order and spacing."""
    try:
        settings = json.loads(_content(file))
    except ValueError as error:
        raise StartupError(f"{file} is not valid JSON ({error}).") from error
    if not isinstance(settings, dict):
        raise StartupError(f"{file} does not hold a JSON object.")
    kept = {key: value for key, value in settings.items() if key not in _WITHOUT_EFFECT}
    return json.dumps(kept, sort_keys=True).encode()


def _weights_digest(file: Path) -> str:
    """The SHA-256 of a file's content, from memory if nothing touched the file since."""
    try:
        before = _stamp(file)
        memory = cache_directory() / "digests" / _Framed(os.fspath(file.absolute())).hex()
        if (known := _recall(memory, before)) is not None:
            return known
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        settled = time.time() - file.stat().st_mtime > _SETTLED_SECONDS
        if settled and _stamp(file) == before:
            _remember(memory, before, digest)
    except OSError as error:
        raise StartupError(f"Cannot read {file}: {error.strerror}.") from error
    return digest


def _stamp(file: Path) -> str:
    """Size, times and inode of a file; a tool that sets the modification time back still moves the change time."""
    stat = file.stat()
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _record(stamp: str, digest: str) -> str:
    return f"{stamp} {digest} {_Framed(stamp, digest).hex()}\n"


def _recall(memory: Path, stamp: str) -> str | None:
    """The digest remembered for this stamp; None where there is none, or the record is damaged."""
    try:
        record = memory.read_text("ascii")
    except (OSError, ValueError):  # never written, not ours to read, or not text any more: the digest is made anew
        return None
    match = re.fullmatch(rf"{re.escape(stamp)} ([0-9a-f]{{64}}) [0-9a-f]{{64}}\n", record)
    return match[1] if match and _record(stamp, match[1]) == record else None


def _remember(memory: Path, stamp: str, digest: str) -> None:
    """Keep a digest for the next start. A cache that cannot be written costs time then, nothing else."""
    draft = memory.with_suffix(f".{os.getpid()}")
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(_record(stamp, digest), "ascii")
        draft.replace(memory)
    except OSError as error:
        _log.info("the digest of the weights is not remembered, the next start computes it again: %s", error)
