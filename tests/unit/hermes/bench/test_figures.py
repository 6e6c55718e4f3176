import pytest

from hermes.bench.figures import figures_of, spread
from hermes.bench.groups import MEASURES, groups_of, ratio
from hermes.bench.loads import Caches
from tests.unit.hermes.bench.runs import exchange, run

BY_TITLE = {measure.title: measure for measure in MEASURES}


def test_the_median_of_few_values_lies_in_their_middle():
    assert spread([3.0]).median == 3.0
    assert spread([1.0, 3.0]).median == 2.0
    assert spread([1.0, 2.0, 9.0]).median == 2.0
    assert spread([]) is None


def test_there_is_no_p95_of_fewer_than_twenty_values():
    assert spread(range(19)).p95 is None
    assert spread(range(19)).maximum == 18
    assert 18 < spread(range(20)).p95 <= 19


def test_p95_of_many_values_is_where_one_in_twenty_lies_above():
    found = spread(range(1, 1001))
    assert found.p95 == pytest.approx(951, abs=1)
    assert found.samples == 1000


def test_an_exchanges_times_are_from_its_own_sending():
    found = exchange(pieces=(0.25, 0.5, 0.75), seconds=1.0, completion_tokens=4)
    assert found.ttft == 0.25
    assert found.seconds_per_token == pytest.approx(0.25)


def test_what_the_engine_does_not_account_for_is_told_where_it_tells():
    assert exchange(pieces=(0.5,), engine_seconds=0.4).seconds_outside_engine == pytest.approx(0.1)
    assert exchange(pieces=(0.5,), engine_seconds=None).seconds_outside_engine is None
    assert exchange(pieces=(), engine_seconds=0.4).seconds_outside_engine is None
    assert figures_of(run()).ttft_outside_engine.median == pytest.approx(0.05)


@pytest.mark.parametrize("fields", [{"completion_tokens": 1}, {"pieces": ()}])
def test_an_answer_of_one_token_or_none_has_no_pace(fields):
    assert exchange(**fields).seconds_per_token is None


def test_figures_tell_first_rounds_from_later_ones_and_what_was_computed():
    exchanges = (
        exchange(0, 0, pieces=(2.0,), seconds=2.0),
        exchange(0, 1, pieces=(0.5,), seconds=1.0),
        exchange(1, 1, pieces=(0.7,), seconds=1.0),
    )
    found = figures_of(run(exchanges=exchanges, seconds=4.0))
    assert (found.requests, found.errors) == (3, 0)
    assert found.ttft_first_round.median == 2.0
    assert found.ttft_later_rounds.median == pytest.approx(0.6)
    assert (found.prompt_tokens, found.computed_tokens, found.completion_tokens) == (500, 320, 12)
    assert found.hit_rate == pytest.approx(180 / 500)
    assert found.mean_hit_tokens == 90
    assert found.assembly_hit_rate == pytest.approx(160 / 500)
    assert found.output_tokens_per_second == 3.0
    assert found.requests_per_second == 0.75


def test_gaps_are_within_answers_and_never_between_them():
    exchanges = (exchange(pieces=(1.0, 1.5)), exchange(pieces=(9.0, 9.1)))
    found = figures_of(run(exchanges=exchanges)).gap
    assert (found.samples, found.maximum) == (2, 0.5)


def test_what_failed_is_counted_and_is_in_no_time_and_no_rate():
    failed = exchange(0, 0, pieces=(99.0,), seconds=100.0, failure="TIMEOUT: too late.")
    found = figures_of(run(exchanges=(exchange(0, 0), failed), seconds=1.0))
    assert (found.requests, found.errors) == (2, 1)
    assert found.ttft.maximum == 0.4
    assert found.prompt_tokens == 100
    assert found.requests_per_second == 1.0


def test_a_run_in_which_all_failed_has_counts_and_no_times():
    found = figures_of(run(exchanges=(exchange(failure="x"),)))
    assert (found.requests, found.errors, found.ttft, found.hit_rate, found.mean_hit_tokens) == (1, 1, None, None, None)


def test_a_server_that_tells_of_no_assembly_cache_has_no_rate_of_it():
    found = figures_of(run(exchanges=(exchange(assembly_cached_tokens=None),)))
    assert found.assembly_hit_rate is None


def test_groups_put_the_seeds_of_one_load_together():
    runs = [run(caches, seed) for seed in (1, 2) for caches in Caches]
    groups = groups_of(runs)
    assert [(group.caches, len(group.runs)) for group in groups] == [(Caches.ON, 2), (Caches.OFF, 2)]


def test_a_ratio_is_of_medians_with_the_span_of_pairs_of_the_same_seed():
    def at(seconds: float, seed: int, target: str):
        return run(seed=seed, target=target, seconds=seconds, exchanges=(exchange(completion_tokens=100),))

    ours = [at(1.0, 1, "a"), at(2.0, 2, "a"), at(4.0, 3, "a")]
    theirs = [at(4.0, 3, "b"), at(4.0, 1, "b"), at(4.0, 2, "b")]
    first, second = groups_of([*ours, *theirs])
    found = ratio(BY_TITLE["output"], first, second)
    assert found.of_medians == pytest.approx(2.0)
    assert (found.lowest, found.highest) == (pytest.approx(1.0), pytest.approx(4.0))


def test_there_is_no_ratio_to_what_was_not_measured():
    first, second = groups_of([run(target="a"), run(target="b", exchanges=(exchange(pieces=()),))])
    assert ratio(BY_TITLE["TTFT, first round"], first, second) is None


def test_measures_are_in_the_unit_that_they_name():
    (group,) = groups_of([run()])
    assert group.median(BY_TITLE["TTFT, first round"]) == pytest.approx(400)
    assert group.median(BY_TITLE["from the prefix cache"]) == pytest.approx(100 * 180 / 600)
    assert group.median(BY_TITLE["TTFT, p95"]) is None
