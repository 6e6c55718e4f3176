import hashlib
import json
import os
from importlib import metadata
from pathlib import Path

import pytest

from shared.errors import StartupError
from shared.fingerprints import model_version, tokenizer_fingerprint

LONG_AGO_NS = 1_600_000_000 * 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERMES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "{{ a }}"}')
    (path / "chat_template.jinja").write_text("{{ a }}")
    write_weights(path, b"weights")
    return path


def write_weights(path: Path, content: bytes, name: str = "model.safetensors") -> Path:
    (path / name).write_bytes(content)
    os.utime(path / name, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return path / name


def records(cache: Path) -> list[Path]:
    return list((cache / "digests").glob("*"))


def test_a_fingerprint_is_a_sha256_and_stays(model: Path) -> None:
    assert len(bytes.fromhex(tokenizer_fingerprint(model))) == 32
    assert tokenizer_fingerprint(model) == tokenizer_fingerprint(model)


TOKENIZER_FILES = (
    "tokenizer.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "tokenizer.model spiece.model qwen.tiktoken"
)


@pytest.mark.parametrize("name", TOKENIZER_FILES.split())
def test_each_file_that_changes_ids_changes_the_tokenizer_fingerprint(model: Path, name: str) -> None:
    seen = {tokenizer_fingerprint(model)}
    for content in ("{}", "{ }"):
        (model / name).write_text(content)
        seen.add(tokenizer_fingerprint(model))
    assert len(seen) == 3


@pytest.mark.parametrize("change", [{"bos_token": "<t>"}, {"add_bos_token": True}, {"added_tokens_decoder": {"0": {}}}])
def test_each_setting_that_changes_ids_changes_the_tokenizer_fingerprint(
    model: Path, change: dict[str, object]
) -> None:
    before = tokenizer_fingerprint(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | change))
    assert tokenizer_fingerprint(model) != before


def test_the_version_of_the_library_changes_the_tokenizer_fingerprint(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tokenizer_fingerprint(model)
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    assert tokenizer_fingerprint(model) != before


def test_what_changes_no_ids_leaves_the_tokenizer_fingerprint(model: Path, tmp_path: Path) -> None:
    before = tokenizer_fingerprint(model)
    (model / "chat_template.jinja").write_text("{{ b }}")
    (model / "tokenizer_config.json").write_text(
        json.dumps({"name_or_path": "/elsewhere", "chat_template": "{{ b }}", "bos_token": "<s>"}, indent=4)
    )
    (model / "README.md").write_text("hello")
    (model / "config.json").write_text("{}")
    write_weights(model, b"others!")
    assert tokenizer_fingerprint(model) == before
    assert tokenizer_fingerprint(model.rename(tmp_path / "moved")) == before


def test_moving_content_between_files_changes_the_tokenizer_fingerprint(model: Path) -> None:
    (model / "merges.txt").write_text("ab")
    (model / "vocab.txt").write_text("c")
    before = tokenizer_fingerprint(model)
    (model / "merges.txt").write_text("a")
    (model / "vocab.txt").write_text("bc")
    assert tokenizer_fingerprint(model) != before


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_damaged_tokenizer_config_is_a_sentence(model: Path, content: str) -> None:
    (model / "tokenizer_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json"):
        tokenizer_fingerprint(model)


def test_a_missing_tokenizer_is_a_sentence(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        tokenizer_fingerprint(model)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "b.safetensors"])
def test_weights_and_configs_change_the_model_version(model: Path, name: str) -> None:
    before = model_version(model)
    write_weights(model, b"another", name)
    assert model_version(model) != before


def test_what_is_not_the_model_leaves_its_version(model: Path, tmp_path: Path) -> None:
    before = model_version(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (model / name).write_text("{}")
    assert model_version(model.rename(tmp_path / "moved")) == before


@pytest.mark.parametrize(("name", "missing"), [("config.json", "config.json"), ("model.safetensors", "weights")])
def test_a_model_that_is_not_whole_is_a_sentence(model: Path, name: str, missing: str) -> None:
    (model / name).unlink()
    with pytest.raises(StartupError, match=f"has no {missing}"):
        model_version(model)


def test_weights_are_read_once(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model_version(model)
    assert len(records(cache)) == 1

    def read_again(*_: object) -> None:
        raise AssertionError("the weights were read again")

    monkeypatch.setattr(hashlib, "file_digest", read_again)
    assert model_version(model) == first


def test_an_edit_of_the_same_size_with_the_old_time_is_noticed(model: Path) -> None:
    before = model_version(model)
    write_weights(model, b"WEIGHTS")
    assert model_version(model) != before


def test_another_file_with_the_same_size_and_time_is_noticed(model: Path) -> None:
    before = model_version(model)
    write_weights(model, b"WEIGHTS", "new").replace(model / "model.safetensors")
    assert model_version(model) != before


def test_a_file_that_may_still_change_within_the_clock_tick_is_not_remembered(model: Path, cache: Path) -> None:
    (model / "model.safetensors").write_bytes(b"just now")
    model_version(model)
    assert records(cache) == []


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"garbage\n", None])
def test_a_damaged_record_is_not_believed(model: Path, cache: Path, damage: bytes | None) -> None:
    first = model_version(model)
    (record,) = records(cache)
    content = record.read_bytes()
    digest_at = content.rindex(b" ") - 1  # the last digit of the digest
    flipped = content[:digest_at] + (b"0" if content[digest_at] != ord("0") else b"1") + content[digest_at + 1 :]
    record.write_bytes(flipped if damage is None else damage)
    assert model_version(model) == first
    assert record.read_bytes() == content


def test_a_cache_that_cannot_be_written_costs_only_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = model_version(model)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HERMES_CACHE", str(tmp_path / "file" / "cache"))
    assert model_version(model) == first
