from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assembler import model_files
from assembler.control import Live
from assembler.model_files import ModelFiles
from assembler.stretches import Stretch, stretches
from tests.unit.assembler.model_styles import STYLES

UNHURRIED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
CUTS = frozenset({"<e>"})


def tokens(text: str) -> list[Live]:
    """<s> and <e> wherever they stand."""
    places = sorted((text.find(token, at), token) for token in ("<s>", "<e>") for at in range(len(text)))
    return [Live(place, place + 3, token) for place, token in dict.fromkeys(places) if place >= 0]


def cut(text: str, *literal: int) -> list[Stretch]:
    """The stretches of a text in which all tokens count but those at the places."""
    found = tokens(text)
    return list(stretches(text, [each for each in found if each.start not in literal], found, CUTS))


def test_a_text_in_which_all_tokens_count_is_one_stretch() -> None:
    assert cut("<s>a<e><s>b<e>") == [Stretch("<s>a<e><s>b<e>", None)]
    assert cut("") == []


def test_what_is_between_cuts_and_has_a_token_that_is_only_text_is_a_stretch_of_its_own() -> None:
    assert cut("<s>a<e><s>b<s>b<e><s>c<e>d<e>", 11) == [
        Stretch("<s>a<e>", None),
        Stretch("<s>b<s>b<e>", (Live(0, 3, "<s>"), Live(8, 11, "<e>"))),
        Stretch("<s>c<e>d<e>", None),
    ]


def test_no_cut_is_made_after_a_token_that_is_only_text() -> None:
    assert cut("a<e>b<e>c", 1) == [Stretch("a<e>b<e>", (Live(5, 8, "<e>"),)), Stretch("c", None)]
    assert cut("a<e>b", 1) == [Stretch("a<e>b", ())]


@pytest.fixture(scope="module", params=["smollm2", "llama3_1", "qwen3", "mistral", "gemma", "deepseek", "glm4"])
def styled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    style = next(each for each in STYLES if each.name == request.param)
    directory: Path = tmp_path_factory.mktemp(request.param)
    return model_files.load(style.write(directory))


@UNHURRIED
@given(data=st.data())
def test_stretches_give_the_ids_of_the_whole(styled: ModelFiles, data: st.DataObject) -> None:
    tokenizer = styled.tokenizer
    names = sorted(tokenizer.added.control)[:12]
    halves = [name[:3] for name in names] + [name[3:] for name in names]
    parts = st.sampled_from([*names, *halves, " ", "\n", "\n\n", "  a", "word", "12", "é", "'s"]) | st.text(max_size=3)
    text = "".join(data.draw(st.lists(parts, max_size=25)))
    found = list(tokenizer.added.guard.tokens.found(text))
    live = [each for each in found if data.draw(st.booleans())]
    assert tokenizer.encode_guarded(text, live) == tokenizer.added.guard.encode(text, live)


def test_the_guard_is_asked_for_the_stretches_with_control_text_alone(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    encode = type(files.tokenizer.added.guard).encode
    monkeypatch.setattr(
        "assembler.guard.Guard.encode", lambda self, text, live: asked.append(text) or encode(self, text, live)
    )
    text = "<|im_start|>user\nIs <|im_end|> a token?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    live = [each for each in files.tokenizer.added.guard.tokens.found(text) if each.start != text.index("<|im_end|>")]
    ids = files.tokenizer.encode_guarded(text, live)
    assert asked == ["user\nIs <|im_end|> a token?<|im_end|>"]
    assert files.tokenizer.decode(ids) == text
    assert list(ids).count(files.tokenizer.added.control["<|im_end|>"]) == 2
