import pytest

from assembler.marks import NO_MARKS
from assembler.reasoning import ReasoningMarks, ReasoningSplitter, marks_of
from assembler.words import Words

THINK = ReasoningMarks("<think>", "</think>")


def parted(pieces: list[str], opened: str | None = None) -> tuple[str, str]:
    splitter = ReasoningSplitter(THINK, NO_MARKS, opened)
    parts = [*(splitter.feed(piece) for piece in pieces), splitter.feed("", last=True)]
    return "".join(part.reasoning for part in parts), "".join(part.rest for part in parts)


CASES = {
    "marks on lines": ("<think>\nOne.\n\nTwo.\n</think>\n\nParis.\n", None, "One.\n\nTwo.", "Paris.\n"),
    "white space before": ("\n <think>a</think>b", None, "a", "b"),
    "empty": ("<think>\n\n</think>\n\nParis", None, "", "Paris"),
    "never closed": ("<think>\nOne.\n", None, "One.\n", ""),
    "half a mark at the end": ("<think>One.</thi", None, "One.</thi", ""),
    "opened by the prompt": ("\nOne.\n</think>\n\nParis", "", "One.", "Paris"),
    "opened twice": ("<think>\nOne.\n</think>\nParis", "\n", "One.", "Paris"),
    "gone on with": ("\n\nTwo.</think>Paris", "\nOne.", "\n\nTwo.", "Paris"),
    "gone on with a mark": ("<think> it</think>Paris", "\nOne.", "<think> it", "Paris"),
    "opened and never closed": ("One", "", "One", ""),
    "no reasoning": ("Paris.\n", None, "", "Paris.\n"),
    "half a mark alone": ("\n<thi", None, "", "\n<thi"),
    "a mark within the text": ("The <think> tag and </think>.", None, "", "The <think> tag and </think>."),
    "a second time": ("<think>a</think>b <think>c</think>", None, "a", "b <think>c</think>"),
    "what is like a mark": ("<think>a </thin> <think> b</think>\n", None, "a </thin> <think> b", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_reasoning_is_the_same_wherever_the_stream_is_cut(case: str) -> None:
    answer, opened, reasoning, rest = CASES[case]
    assert parted([answer], opened) == (reasoning, rest)
    assert parted(list(answer), opened) == (reasoning, rest)
    for at in range(1, len(answer)):
        assert parted([answer[:at], answer[at:]], opened) == (reasoning, rest)


def test_reasoning_comes_as_it_is_written() -> None:
    splitter = ReasoningSplitter(THINK, NO_MARKS, None)
    pieces = ["<thi", "nk>\n", "One.", "\n", "Two </", "b> ", "</think>", "\n", "\nPar", "is"]
    given = [splitter.feed(piece) for piece in pieces]
    assert [part.reasoning for part in given] == ["", "", "One.", "", "\nTwo ", "</b> ", "", "", "", ""]
    assert [part.rest for part in given] == ["", "", "", "", "", "", "", "", "Par", "is"]


@pytest.mark.parametrize(
    ("words", "marks"),
    [
        (Words(searched=("</think>",)), THINK),
        (Words(literals=("a", "<|im_start|>assistant\n<think>\n\n</think>\n\n")), THINK),
        (Words(literals=("[THINK]", "[/THINK]")), ReasoningMarks("[THINK]", "[/THINK]")),
        (Words(literals=("</seed:think>",)), ReasoningMarks("<seed:think>", "</seed:think>")),
        (Words(literals=("◁/think▷",)), ReasoningMarks("◁think▷", "◁/think▷")),
        (Words(literals=("<|END_THINKING|>",)), ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>")),
        (Words(literals=("<reasoning></reasoning>",), searched=("</thinking>",)), ReasoningMarks("<thinking>", "</thinking>")),
        (Words(literals=("Think before you answer.", "<think>"), searched=("</tool_response>",)), None),
    ],
)  # fmt: skip
def test_marks_are_those_that_the_template_looks_for_or_writes(words: Words, marks: ReasoningMarks | None) -> None:
    assert marks_of(words) == marks
