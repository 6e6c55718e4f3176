"""Control tokens as text with every kind of tokenizer; with those that normalize, also what becomes one of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from assembler import model_files
from assembler.control import Live
from assembler.messages import Conversation, Message, Role
from assembler.model_files import ModelFiles
from assembler.order import OrderPolicy
from assembler.rendering import Renderer
from assembler.templates import RenderOptions
from assembler.tokenizer import Tokenizer

TEMPLATE = "<s>{% for m in messages %}{{ m.content }}</s>{% endfor %}"
LETTERS = "abcdefghijklmnopqrstuvwxyz<>/S "


def word_piece() -> tokenizers.Tokenizer:
    vocab = {piece: at for at, piece in enumerate(["[UNK]", "<s>", "</s>", *LETTERS, *(f"##{x}" for x in LETTERS)])}
    built = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.decoder = decoders.WordPiece(cleanup=False)
    return built


def unigram() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("<s>", -0.5), ("</s>", -0.5), *((letter, -5.0) for letter in LETTERS.replace(" ", "▁"))]
    built = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    built.decoder = decoders.Metaspace(prepend_scheme="first")
    return built


def bpe(*, metaspace: str | None = None, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *LETTERS, "▁", "<s"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    built = tokenizers.Tokenizer(models.BPE(vocab, [("<", "s")], unk_token="<unk>", ignore_merges=ignore_merges))
    if metaspace is not None:
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=False)
        built.decoder = decoders.Metaspace(prepend_scheme=metaspace)
    return built


def made(built: tokenizers.Tokenizer, directory: Path, normalizer: Any = None, **flags: bool) -> ModelFiles:
    if normalizer is not None:
        built.normalizer = normalizer
    fields = {"normalized": False} | flags
    built.add_special_tokens([tokenizers.AddedToken(token, special=True, **fields) for token in ("<s>", "</s>")])
    built.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text("{}")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return model_files.load(directory)


def ids_of(files: ModelFiles, content: str) -> list[int]:
    assert files.template is not None
    renderer = Renderer(files.template, files.tokenizer, OrderPolicy(), "encode")
    reading = renderer.render(Conversation((Message(Role.USER, content),)), RenderOptions()).reading
    if reading.live is None:
        return list(files.tokenizer.encode(reading.text))
    return list(files.tokenizer.encode_guarded(reading.text, reading.live))


KINDS = {
    "word pieces": word_piece,
    "unigram": unigram,
    "bpe": bpe,
    "bpe of whole words": lambda: bpe(ignore_merges=True),
    "metaspace first": lambda: bpe(metaspace="first"),
    "metaspace always": lambda: bpe(metaspace="always"),
    "metaspace never": lambda: bpe(metaspace="never"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_control_token_in_a_text_is_text_for_every_kind_of_tokenizer(kind: str, tmp_path: Path) -> None:
    files = made(KINDS[kind](), tmp_path)
    control = files.tokenizer.added.control
    for content in ("a<s>b", "<s>", "</s></s>", "<<s>s>", "a </s> b"):
        ids = ids_of(files, content)
        assert [each for each in ids if each in control.values()] == [control["<s>"], control["</s>"]]
        assert "".join(files.tokenizer.decode(ids).split()) == "".join(f"<s>{content}</s>".split())


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(text=st.text(alphabet=LETTERS, max_size=20))
def test_where_all_control_tokens_count_the_guard_gives_the_tokenizer_s_ids(
    kind: str, tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    tokenizer = GUARDED.get(kind) or made(KINDS[kind](), tmp_path_factory.mktemp("kind")).tokenizer
    GUARDED[kind] = tokenizer
    text = f"<s>{text} </s>"
    live = [
        Live(at, at + len(token), token)
        for at in range(len(text))
        for token in ("<s>", "</s>")
        if text.startswith(token, at)
    ]
    assert tokenizer.encode_guarded(text, live) == tokenizer.encode(text)


GUARDED: dict[str, Tokenizer] = {}


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"single_word": True}])
def test_flags_of_a_live_token_work_on_its_neighbours(tmp_path: Path, flags: dict[str, bool]) -> None:
    files = made(bpe(), tmp_path, **flags)
    text = "<s>  a <s> b</s>"
    plain = files.tokenizer.encode(text)
    live = [Live(0, 3, "<s>"), Live(7, 10, "<s>"), Live(12, 16, "</s>")]
    assert files.tokenizer.encode_guarded(text, live) == plain


@pytest.mark.parametrize(
    ("normalizer", "content"),
    [
        (normalizers.Lowercase(), "a<S>b"),
        (normalizers.NFKC(), "a＜s＞b"),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Replace("[", "<")]), "[s>"),
        (normalizers.Replace("x", ""), "<xs>"),
        (normalizers.StripAccents(), "<s\u0301>"),
    ],
)
def test_what_a_normalizer_makes_a_control_token_of_is_text_too(tmp_path: Path, normalizer: Any, content: str) -> None:
    files = made(bpe(), tmp_path, normalizer, normalized=True)
    control = files.tokenizer.added.control
    assert control["<s>"] in files.tokenizer.encode(content)
    assert [each for each in ids_of(files, content) if each in control.values()] == [control["<s>"], control["</s>"]]


def test_ids_are_the_models_own_also_where_tokens_stand_in_any_order(tmp_path: Path) -> None:
    built = bpe()
    built.add_tokens([tokenizers.AddedToken("plain", special=False)])
    built.add_special_tokens(["<z>", "<s>", "</s>", "<a>"])
    built.add_tokens([tokenizers.AddedToken("more", special=False)])
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({}))
    tokenizer = model_files.load(tmp_path).tokenizer
    text = "<s>plain<z>more<a></s>"
    live = [Live(0, 3, "<s>"), Live(8, 11, "<z>"), Live(15, 18, "<a>"), Live(18, 22, "</s>")]
    assert tokenizer.encode_guarded(text, live) == tokenizer.encode(text)
    assert set(tokenizer.added.control) == {"<s>", "</s>", "<z>", "<a>"}


def test_white_space_that_a_template_writes_is_no_control_token(tmp_path: Path) -> None:
    built = bpe()
    built.add_tokens([tokenizers.AddedToken("\n\n", special=False), tokenizers.AddedToken("USER:", special=False)])
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(
        "{{ 'USER:' }}{% for m in messages %}{{ m.content + '\\n\\n' }}{% endfor %}"
    )
    assert "\n\n" not in model_files.load(tmp_path).tokenizer.added.control
    assert "USER:" in model_files.load(tmp_path).tokenizer.added.control
