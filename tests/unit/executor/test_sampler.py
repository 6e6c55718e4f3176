"""Sampling against transformers' processors, and the promises about seeds and neighbours."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from executor import sampler
from executor.requests import Sampling
from executor.sampler import SampleRow, TokenHistory, TokenRules, sample, uniforms

VOCAB = 500
LARGE_VOCAB = 150_000
CPU = torch.device("cpu")


def random_logits(rows: int = 1, vocab: int = VOCAB, *, spread: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tied_logits(rows: int = 1, vocab: int = VOCAB) -> Tensor:
    """Few different values, so that any cut goes through a tie."""
    return (random_logits(rows, vocab, spread=1.5) * 2).round() / 2


def row(generated: int = 0, *, forbidden: Sequence[int] = (), **settings: Any) -> SampleRow:
    sampling = Sampling(**settings)
    rules = TokenRules(sampling, forbidden, CPU)
    return SampleRow(sampling, sampling.seed, generated, None, rules, early=bool(forbidden))


def penalized(prompt: Sequence[int], generated: Sequence[int], vocab: int = VOCAB, **settings: Any) -> SampleRow:
    history = TokenHistory(prompt, generated, vocab, CPU)
    return SampleRow(Sampling(**settings), settings.get("seed", 0), len(generated), history)


@pytest.fixture
def drawn_from(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """`drawn_from(logits, *rows)`: what is left to draw from, after all settings."""

    def spy(logits: Tensor, *rows: SampleRow) -> Tensor:
        drawn: list[Tensor] = []
        original = sampler._draw
        with monkeypatch.context() as patch:
            patch.setattr(
                sampler, "_draw", lambda scaled, seeds: drawn.append(scaled.clone()) or original(scaled, seeds)
            )
            sample(logits.clone(), rows)
        return drawn[0]

    return spy


def warped(logits: Tensor, *warpers: Any, ids: Tensor | None = None) -> Tensor:
    ids = torch.zeros(len(logits), 0, dtype=torch.int64) if ids is None else ids
    for warper in warpers:
        logits = warper(ids, logits)
    return logits


@pytest.fixture(params=[VOCAB, 5000], ids=["small", "beyond the candidates"])
def vocab(request: pytest.FixtureRequest) -> int:
    return request.param


class TestAgainstTransformers:
    @pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.8, 50.0])
    def test_temperature(self, drawn_from: Callable[..., Tensor], temperature: float) -> None:
        logits = random_logits(4)
        expected = warped(logits, TemperatureLogitsWarper(temperature))
        assert torch.equal(drawn_from(logits, *[row(temperature=temperature)] * 4), expected)

    @pytest.mark.parametrize("top_k", [1, 2, 40, 499, 1500, 4999, 10_000])
    def test_top_k(self, drawn_from: Callable[..., Tensor], vocab: int, top_k: int) -> None:
        logits = random_logits(4, vocab)
        assert torch.equal(drawn_from(logits, *[row(top_k=top_k)] * 4), warped(logits, TopKLogitsWarper(top_k)))

    @pytest.mark.parametrize("top_k", [1, 3, 40, 1024, 1500])
    def test_top_k_keeps_all_that_tie_with_the_last(
        self, drawn_from: Callable[..., Tensor], vocab: int, top_k: int
    ) -> None:
        logits = tied_logits(4, vocab)
        assert torch.equal(drawn_from(logits, *[row(top_k=top_k)] * 4), warped(logits, TopKLogitsWarper(top_k)))

    @pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999])
    @pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
    def test_top_p(self, drawn_from: Callable[..., Tensor], vocab: int, top_p: float, spread: float) -> None:
        logits = random_logits(4, vocab, spread=spread)
        assert torch.equal(drawn_from(logits, *[row(top_p=top_p)] * 4), warped(logits, TopPLogitsWarper(top_p)))

    @pytest.mark.parametrize("top_p", [0.2, 0.6, 0.95])
    def test_top_p_keeps_as_many_of_each_tie(self, drawn_from: Callable[..., Tensor], vocab: int, top_p: float) -> None:
        logits = tied_logits(4, vocab)
        kept, expected = drawn_from(logits, *[row(top_p=top_p)] * 4), warped(logits, TopPLogitsWarper(top_p))
        assert torch.equal(kept.sort(-1).values, expected.sort(-1).values)
        assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])

    @pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
    @pytest.mark.parametrize("logits", [random_logits(4), tied_logits(4)], ids=["random", "tied"])
    def test_min_p(self, drawn_from: Callable[..., Tensor], logits: Tensor, min_p: float) -> None:
        assert torch.equal(drawn_from(logits, *[row(min_p=min_p)] * 4), warped(logits, MinPLogitsWarper(min_p)))

    def test_all_of_them_in_transformers_order(self, drawn_from: Callable[..., Tensor], vocab: int) -> None:
        logits = random_logits(8, vocab)
        rows = [row(temperature=1.3, top_k=60, top_p=0.8, min_p=0.05)] * 8
        warpers = [TemperatureLogitsWarper(1.3), TopKLogitsWarper(60), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]
        assert torch.equal(drawn_from(logits, *rows), warped(logits, *warpers))

    @pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
    def test_repetition_penalty_counts_prompt_and_completion(
        self, drawn_from: Callable[..., Tensor], penalty: float
    ) -> None:
        logits, prompt, generated = random_logits(), [5, 6, 6, 7], [7, 9]
        expected = warped(logits, RepetitionPenaltyLogitsProcessor(penalty), ids=torch.tensor([prompt + generated]))
        assert torch.equal(drawn_from(logits, penalized(prompt, generated, repetition_penalty=penalty)), expected)


def test_presence_and_frequency_penalties_are_openais(drawn_from: Callable[..., Tensor]) -> None:
    logits, generated = random_logits(), [9, 9, 9, 4]
    expected = logits.clone()
    for token in set(generated):
        expected[0, token] -= generated.count(token) * 0.25 + 0.75
    left = drawn_from(logits, penalized([5, 9], generated, presence_penalty=0.75, frequency_penalty=0.25))
    torch.testing.assert_close(left, expected, rtol=0, atol=1e-6)


def test_a_history_grows_with_the_answer(drawn_from: Callable[..., Tensor]) -> None:
    settings = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    grown = TokenHistory([1, 2], [3], VOCAB, CPU)
    grown.add(4)
    grown.add(4)
    whole = penalized([1, 2], [3, 4, 4], **settings)
    logits = random_logits()
    assert torch.equal(drawn_from(logits, SampleRow(Sampling(**settings), 0, 3, grown)), drawn_from(logits, whole))


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_history_is_kept_where_a_penalty_asks_for_it(name: str) -> None:
    assert TokenHistory.needed(Sampling(**{name: 0.5}))
    assert not TokenHistory.needed(Sampling())


def test_biases_are_added_before_the_temperature(drawn_from: Callable[..., Tensor]) -> None:
    logits = random_logits()
    expected = logits.clone()
    expected[0, 3] += 2.0
    expected[0, 8] -= 100.0
    assert torch.equal(drawn_from(logits, row(temperature=0.5, logit_bias=((3, 2.0), (8, -100.0)))), expected / 0.5)


def test_biases_are_added_before_the_penalties_as_transformers_does(drawn_from: Callable[..., Tensor]) -> None:
    logits, bias, prompt, generated = random_logits(), {3: 4.0, 6: -9.0, 7: 0.5}, [5, 6, 7], [3, 9]
    sampling = Sampling(repetition_penalty=1.3, logit_bias=tuple(bias.items()))
    drawn = SampleRow(sampling, 0, 2, TokenHistory(prompt, generated, VOCAB, CPU), TokenRules(sampling, (), CPU))
    biased = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    ids = torch.tensor([prompt + generated])
    assert torch.equal(
        drawn_from(logits, drawn), warped(logits, biased, RepetitionPenaltyLogitsProcessor(1.3), ids=ids)
    )


def test_a_bias_can_force_a_token() -> None:
    assert sample(random_logits(), [row(temperature=0.0, logit_bias=((17, 100.0),))]) == [17]
    assert sample(random_logits(), [row(seed=1, logit_bias=((17, 100.0),))]) == [17]


def test_only_allowed_tokens_are_left_and_no_forbidden_ones(drawn_from: Callable[..., Tensor]) -> None:
    logits = random_logits()
    left = drawn_from(logits, row(allowed=(3, 5, 11), forbidden=(5, 100), logit_bias=((3, 1.0), (4, 100.0))))
    assert left.isfinite().nonzero()[:, 1].tolist() == [3, 11]
    assert left[0, 3] == logits[0, 3] + 1.0


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 9e-6])
def test_greedy_at_no_temperature_whatever_else_is_set(temperature: float) -> None:
    logits = random_logits(6)
    rows = [row(temperature=temperature, top_p=0.5, top_k=30, min_p=0.9, seed=seed) for seed in range(6)]
    assert sample(logits.clone(), rows) == logits.argmax(-1).tolist()


def test_greedy_takes_penalties_biases_and_bans_into_account() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    assert sample(logits.clone(), [penalized([0], [], 4, temperature=0.0, repetition_penalty=3.0)]) == [1]
    assert sample(logits.clone(), [row(temperature=0.0, logit_bias=((3, 5.0),))]) == [3]
    assert sample(logits.clone(), [row(temperature=0.0, allowed=(2, 3))]) == [2]
    assert sample(logits.clone(), [row(temperature=0.0, forbidden=(0, 1))]) == [2]


def test_the_smallest_temperature_that_draws_is_as_good_as_greedy() -> None:
    logits = random_logits(8, spread=30.0)
    assert sample(logits.clone(), [row(temperature=1e-5, seed=i) for i in range(8)]) == logits.argmax(-1).tolist()


MIXED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 30.0, "top_p": 0.99},
    {"top_k": 7},
    {"top_k": 3000, "top_p": 0.95},
    {"min_p": 0.2},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4},
    {"logit_bias": ((4, 9.0),)},
    {"allowed": (1, 2, 3, 4)},
    {"repetition_penalty": 1.3, "top_p": 0.5},
    {"presence_penalty": 0.4, "frequency_penalty": 1.0},
]


def mixed_row(i: int, vocab: int) -> SampleRow:
    settings = Sampling(**MIXED[i % len(MIXED)], seed=1000 + i)
    history = TokenHistory([1, 2, 3], [i % 50, 7], vocab, CPU) if TokenHistory.needed(settings) else None
    rules = TokenRules(settings, (5,), CPU)
    return SampleRow(settings, settings.seed, 2, history, rules, early=i % 3 == 0)


def test_a_row_is_the_same_alone_and_among_any_neighbours() -> None:
    vocab, count = 5000, 3 * len(MIXED)
    rows = [mixed_row(i, vocab) for i in range(count)]
    logits = random_logits(count, vocab)
    together = sample(logits.clone(), rows)
    assert together == [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(count)]
    backwards = list(reversed(range(count)))
    assert [together[i] for i in backwards] == sample(logits[backwards], [rows[i] for i in backwards])


def test_what_a_row_draws_from_is_the_same_to_the_last_bit(drawn_from: Callable[..., Tensor]) -> None:
    vocab = 5000
    rows = [made for i in range(len(MIXED)) if (made := mixed_row(i, vocab)).sampling.temperature]
    logits = random_logits(len(rows), vocab)
    together = drawn_from(logits, *rows)
    for i, alone in enumerate(rows):
        assert torch.equal(together[i : i + 1], drawn_from(logits[i : i + 1], alone))


def test_same_seed_and_place_same_token_whatever_came_before() -> None:
    logits = random_logits(1, spread=0.5).expand(40, -1)
    first = sample(logits.clone(), [row(generated=i, seed=12) for i in range(40)])
    assert first == sample(logits.clone(), [row(generated=i, seed=12) for i in range(40)])
    assert len(set(first)) > 20
    assert first != sample(logits.clone(), [row(generated=i, seed=13) for i in range(40)])


def counts_of(logits: Tensor, draws: int, **settings: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How often each token comes in so many draws with fixed seeds."""
    chunks = [range(start, min(start + 2000, draws)) for start in range(0, draws, 2000)]
    tokens = [
        token
        for chunk in chunks
        for token in sample(
            logits.expand(len(chunk), -1).clone(), [row(generated=i, seed=3, **settings) for i in chunk]
        )
    ]
    return np.bincount(tokens, minlength=logits.shape[-1])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
def test_tokens_come_as_often_as_they_should(drawn_from: Callable[..., Tensor], settings: dict[str, Any]) -> None:
    logits, draws = random_logits(1, 20, spread=1.2, seed=5), 20_000
    shares = drawn_from(logits, row(**settings)).softmax(-1, dtype=torch.float64)[0].numpy()
    counts = counts_of(logits, draws, **settings)
    possible = shares > 0
    assert counts[~possible].sum() == 0
    expected = shares[possible] * draws
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations, with fixed seeds


def test_nothing_outside_the_kept_tokens_is_ever_chosen(drawn_from: Callable[..., Tensor]) -> None:
    vocab = 5000
    for seed in range(30):
        rows = [mixed_row(i + len(MIXED) * seed, vocab) for i in range(len(MIXED))]
        rows = [made for made in rows if made.sampling.temperature]
        logits = random_logits(len(rows), vocab, spread=0.3 + seed % 4, seed=seed)
        kept, tokens = drawn_from(logits, *rows), sample(logits.clone(), rows)
        assert all(kept[i, token].isfinite() for i, token in enumerate(tokens))


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_kept_tokens(monkeypatch: pytest.MonkeyPatch, uniform: float) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda seeds: np.full(len(seeds), uniform))
    kept = (7, 8, LARGE_VOCAB // 2, LARGE_VOCAB - 2)
    (token,) = sample(random_logits(1, LARGE_VOCAB), [row(allowed=kept)])
    assert token in kept
    if uniform in (0.0, 2.0**-53):
        assert token == kept[0]


def test_half_of_a_large_vocabulary_comes_half_of_the_time() -> None:
    """Equal shares of 1/150,000: sums in single precision would be off by whole tokens."""
    draws = 100
    tokens = [
        token
        for i in range(0, draws, 10)
        for token in sample(torch.zeros(10, LARGE_VOCAB), [row(generated=j, seed=9) for j in range(i, i + 10)])
    ]
    expected = np.floor(uniforms([(9, i) for i in range(draws)]) * LARGE_VOCAB)
    assert np.abs(np.array(tokens) - expected).max() <= 1
    assert abs(sum(token < LARGE_VOCAB // 2 for token in tokens) - draws / 2) < 20


def test_half_of_a_large_vocabulary_is_kept_by_top_p(drawn_from: Callable[..., Tensor]) -> None:
    left = drawn_from(random_logits(1, LARGE_VOCAB, spread=1e-3), row(top_p=0.5))
    assert abs(int(left.isfinite().sum()) - LARGE_VOCAB / 2) < LARGE_VOCAB / 100


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_harm_no_neighbour(temperature: float) -> None:
    logits = random_logits(3)
    healthy = sample(logits[[0, 2]].clone(), [row(seed=4), row(seed=5, top_p=0.9)])
    logits[1] = float("nan")
    rows = [row(seed=4), row(temperature=temperature, top_p=0.9), row(seed=5, top_p=0.9)]
    first, odd, last = sample(logits, rows)
    assert [first, last] == healthy
    assert 0 <= odd < VOCAB


class TestUniforms:
    def test_they_lie_in_the_unit_interval_and_fill_it_evenly(self) -> None:
        for pairs in ([(0, i) for i in range(20_000)], [(seed, 0) for seed in range(20_000)]):
            drawn = uniforms(pairs)
            assert drawn.min() >= 0.0
            assert drawn.max() < 1.0
            counts, _ = np.histogram(drawn, bins=100, range=(0, 1))
            assert float(((counts - 200) ** 2 / 200).sum()) < 99 + 4 * (2 * 99) ** 0.5

    def test_neither_seeds_nor_places_in_a_row_are_related(self) -> None:
        for pairs in ([(7, i) for i in range(20_000)], [(seed, 3) for seed in range(20_000)]):
            drawn = uniforms(pairs)
            assert abs(float(np.corrcoef(drawn[:-1], drawn[1:])[0, 1])) < 0.03

    def test_all_seeds_are_taken_and_differ(self) -> None:
        seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1]
        assert len(set(uniforms([(seed, index) for seed in seeds for index in range(50)]))) == 300

    def test_a_number_depends_on_its_own_seed_and_place_alone(self) -> None:
        pairs = [(5, 0), (2**64 - 1, 3), (0, 9)]
        assert [float(uniforms([pair])[0]) for pair in pairs] == uniforms(pairs).tolist()

    def test_they_stay_the_same_over_versions(self) -> None:
        assert uniforms([(0, 0)]).tolist() == [0.8833108082136426]  # SplitMix64's first of seed 0: 0xE220A8397B1DCDAF


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000, 49_152])
def test_a_token_is_drawn_where_the_number_falls_in_the_running_sum_of_all(vocab: int) -> None:
    logits = random_logits(1, vocab)
    logits[0, 1::3] = float("-inf")
    sums = logits[0].double().softmax(-1).cumsum(-1)
    seeds = [(seed, 7) for seed in range(300)]
    expected = torch.searchsorted(sums, torch.from_numpy(uniforms(seeds)) * sums[-1], right=True).tolist()
    rows = [SampleRow(Sampling(), *pair) for pair in seeds]
    assert sample(logits.expand(300, -1).clone(), rows) == expected
