"""Cutting a text right after a control token: where it is allowed, no id changes; where ids would change, it is not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from assembler import cuts, model_files
from assembler.control import Live
from assembler.cuts import Cuts
from assembler.model_files import ModelFiles
from tests.unit.assembler.model_styles import CORPUS, STYLES

TOKENS = ("<|a|>", "<|b|>")
LETTERS = [*"abcdefgh <|>ÄäéE.\n", "\u0301", "▁"]


def built(directory: Path, *added: AddedToken, **given: Any) -> ModelFiles:
    """A model whose tokenizer has the parts named, and two plain control tokens besides those given."""
    parts = dict(given)
    if parts.pop("kind", "bpe") == "unigram":
        pieces = [("<unk>", 0.0), *((letter, -2.0) for letter in LETTERS), ("ab", -1.0), ("▁a", -1.0), ("<|", -1.5)]
        tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>"], initial_alphabet=LETTERS, show_progress=False
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}<|a|>"}))
    (directory / "config.json").write_text("{}")
    return model_files.load(directory)


def changes_nothing(files: ModelFiles, text: str, token: str) -> bool:
    """Whether all cuts of a text after a token give the ids of the whole."""
    encode, guarded = files.tokenizer.encode, files.tokenizer.encode_guarded

    def live(part: str) -> list[Live]:
        return [Live(match.start(), match.end(), token) for match in re.finditer(re.escape(token), part)]

    return all(
        encode(text) == encode(text[:end]) + encode(text[end:])
        and guarded(text, live(text)) == guarded(text[:end], live(text[:end])) + guarded(text[end:], live(text[end:]))
        for end in (match.end() for match in re.finditer(re.escape(token), text))
    )


ALLOWED: dict[str, dict[str, Any]] = {
    "byte level": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
    "byte level with a space before": {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "prepend": {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    },
    "metaspace always": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always")},
    "metaspace never": {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="never")},
    "lowercase and strip": {
        "normalizer": normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()]),
    },
    "nfc": {"normalizer": normalizers.NFC(), "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)},
    "unigram": {"kind": "unigram", "pre_tokenizer": pre_tokenizers.Metaspace()},
    "digits and split": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.Split(tokenizers.Regex(r"\s+|\w+"), "isolated"),
            ]
        )
    },
}
texts = st.lists(st.sampled_from([*TOKENS, *LETTERS, "ab", "<|a", "1", "12", "中"]), max_size=12).map("".join)


@pytest.fixture(scope="session", params=ALLOWED)
def allowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return built(tmp_path_factory.mktemp("model"), **ALLOWED[request.param])


@given(texts)
@settings(deadline=None)
def test_where_it_is_allowed_no_id_changes(allowed: ModelFiles, text: str) -> None:
    found = cuts.tried(allowed.tokenizer.added.cuts, allowed.tokenizer)
    assert found.problem is None
    assert found.tokens.issuperset(TOKENS)
    assert all(changes_nothing(allowed, text, token) for token in TOKENS)


def special(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, special=True, **({"normalized": False} | flags))


# A token, what makes it a bad place for a cut, and a text in which the cut would change ids.
BAD = {
    "rstrip": ((special("<|c|>", rstrip=True),), {}, "<|c|>", "a<|c|> b"),
    "single word": ((special("<|c|>", single_word=True),), {}, "<|c|>", None),
    "inside a longer one": ((special("<|c|>"), special("<|c|>d")), {}, "<|c|>", None),
    "inside a plain one": ((special("<|c|>"), AddedToken("x<|c|>d", normalized=False)), {}, "<|c|>", None),
    "the other begins in it": ((special("<|c|>"), special(">d")), {}, "<|c|>", None),
    "it begins in the other": ((special("<|c|>"), special("d<|")), {}, "<|c|>", None),
    "itself": ((special("cdc"),), {}, "cdc", None),
    "normalized under a normalizer": (
        (special("<|c|>", normalized=True),),
        {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])},
        "<|c|>",
        "a<|c|>b",
    ),
    "a word beside single words": ((special("cde"), special("fg", single_word=True)), {}, "cde", "cdefg"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_token_that_takes_in_what_is_beside_it_is_no_place_for_a_cut(tmp_path: Path, name: str) -> None:
    added, parts, token, text = BAD[name]
    files = built(tmp_path, *added, **parts)
    assert token in files.tokenizer.added.control
    assert token not in files.tokenizer.added.cuts.tokens
    if text is not None:
        assert not changes_nothing(files, text, token)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}}, "Metaspace"),
        ({"model": {"type": "BPE", "dropout": 0.1}}, "chance"),
        ({"model": {"type": "Oracle"}}, "Oracle"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Seer"}]}}, "Seer"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Clairvoyant"}]}}, "Clairvoyant"),
    ],
)
def test_a_tokenizer_that_looks_or_may_look_beyond_a_stretch_has_none(part: dict[str, Any], problem: str) -> None:
    added = {"content": "<a>", "rstrip": False, "single_word": False, "normalized": False}
    plain = {"model": {"type": "BPE"}, "added_tokens": [added]}
    assert cuts.find(plain, ["<a>"]) == Cuts(frozenset({"<a>"}))
    found = cuts.find(plain | part, ["<a>"])
    assert not found.tokens
    assert problem in str(found.problem)


def test_the_try_at_start_finds_what_the_description_hides(tmp_path: Path) -> None:
    for name in ("rstrip", "normalized under a normalizer"):
        added, parts, token, _ = BAD[name]
        files = built(tmp_path, *added, **parts)
        found = cuts.tried(Cuts(frozenset({token})), files.tokenizer)
        assert not found.tokens
        assert token in str(found.problem)
    files = built(tmp_path, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"))
    assert not cuts.tried(Cuts(frozenset(TOKENS)), files.tokenizer).tokens


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_models_of_every_family_can_be_cut(tmp_path: Path, style: Any) -> None:
    files = model_files.load(style.write(tmp_path))
    found = cuts.tried(files.tokenizer.added.cuts, files.tokenizer)
    assert found.problem is None
    assert found.tokens <= files.tokenizer.added.control.keys()


def test_a_tokenizer_that_panics_when_it_is_tried_has_none() -> None:
    class PanicException(BaseException):
        pass

    class Panicking:
        def encode(self, text: str) -> Any:
            raise PanicException("AddedVocabulary bad split")

        encode_guarded = encode

    tried = cuts.tried(Cuts(frozenset({"<|a|>"})), Panicking())  # type: ignore[arg-type]
    assert (tried.tokens, tried.problem) == (frozenset(), "the tokenizer broke down: AddedVocabulary bad split")
