import itertools

import pytest
from tokenizers import Tokenizer

from hermes.bench.loads import Wishes, Workload
from hermes.bench.plan import Series, loads_of
from hermes.bench.prose import TOKENS_PER_WORD, Prose
from hermes.bench.workloads import scripts


@pytest.fixture(scope="module")
def count(model_directory):
    """How many tokens a text has for the default model."""
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def words_alike(one: str, other: str) -> int:
    """How many words two texts begin with alike."""
    pairs = zip(one.split(), other.split(), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def texts(workload: Workload, seed: int, **wishes: int) -> list[str]:
    """All that the users of a workload say, and what stands before it."""
    written = scripts(Wishes(**wishes).of(workload), seed)
    return [text for each in written for text in (*(one.content for one in each.openings), *each.questions)]


def test_prose_has_the_wished_words_and_about_the_known_tokens(count):
    text = Prose(1, "a").text(2000)
    assert len(text.split()) == 2000
    assert count(text) == pytest.approx(2000 * TOKENS_PER_WORD, rel=0.02)


@pytest.mark.parametrize(
    ("workload", "opening", "question"),
    [
        (Workload.SERVICE, 500, 95),
        (Workload.QUESTIONS, 500, 95),
        (Workload.CODE, 2000, 66),
        (Workload.RAG, 500, 510),
        (Workload.UNIQUE, 500, 95),
    ],
)
def test_a_workload_has_about_the_tokens_that_it_is_described_with(count, workload, opening, question):
    for script in scripts(Wishes(users=3).of(workload), seed=11):
        assert count(script.opening(0).content) == pytest.approx(opening, rel=0.06)
        assert [count(each) for each in script.questions] == pytest.approx([question] * len(script.questions), rel=0.08)


@pytest.mark.parametrize("workload", Workload)
def test_a_seed_gives_the_same_load_again(workload):
    assert texts(workload, 5) == texts(workload, 5)


@pytest.mark.parametrize("workload", Workload)
def test_two_seeds_share_nothing_that_a_cache_could_use(workload):
    for mine, other in itertools.product(texts(workload, 5, users=2), texts(workload, 6, users=2)):
        assert words_alike(mine, other) <= 3, (mine, other)


@pytest.mark.parametrize("workload", [each for each in Workload if each is not Workload.UNIQUE])
def test_users_share_the_system_text_and_ask_differently(workload):
    written = scripts(Wishes(users=4, rounds=3).of(workload), seed=1)
    assert len({script.opening(place) for script in written for place in range(3)}) == 1
    questions = [question for script in written for question in script.questions]
    assert len(set(questions)) == 12


def test_in_the_worst_case_no_two_requests_begin_alike():
    written = scripts(Wishes(users=6, rounds=4).of(Workload.UNIQUE), seed=1)
    openings = [script.opening(place).content for script in written for place in range(4)]
    for one, other in itertools.combinations(openings, 2):
        assert words_alike(one, other) <= 3


def test_only_conversations_grow():
    growing = {workload for workload in Workload if scripts(Wishes(users=1).of(workload), 1)[0].grows}
    assert growing == {Workload.SERVICE, Workload.CODE}


def test_wishes_win_over_a_workloads_own_shape():
    load = Wishes(users=3, rounds=2, concurrency=1, words=50, question=10, max_tokens=4, ignore_eos=True).of(
        Workload.RAG
    )
    assert (load.users, load.rounds, load.concurrency, load.words, load.question, load.max_tokens) == (
        3,
        2,
        1,
        50,
        10,
        4,
    )
    assert load.ignore_eos
    assert load.requests == 6
    assert Wishes(users=2).of(Workload.RAG).concurrency == 2, "no more at a time than there are"
    assert Wishes().of(Workload.RAG).words == Wishes().of(Workload.SERVICE).words


def test_the_series_of_prefixes_has_the_wished_tokens_and_fits_the_context(count):
    loads = loads_of(Series.PREFIX, Wishes(), 8192)
    sizes = [count(scripts(load, 1)[0].opening(0).content) for load in loads]
    assert sizes == pytest.approx([100, 500, 1000, 2000, 4000, 8000], rel=0.06)
    prompt = sizes[-1] + count(scripts(loads[-1], 1)[0].questions[0])
    assert prompt + loads[-1].max_tokens < 8192
    assert len(loads_of(Series.PREFIX, Wishes(), 2048)) == 3
