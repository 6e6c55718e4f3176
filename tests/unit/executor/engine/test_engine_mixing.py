"""Prompts beside answers: how much of a step is theirs."""

import dataclasses
import math

import pytest
import torch

from executor import pace
from executor.scheduler import SchedulerLimits


@pytest.fixture
def paced(bench):
    """An engine whose steps may take `stall` times as long for a prompt, and cost `tokens` tokens before the first."""

    def build(stall, tokens, **options):
        served = bench(**options)
        scheduler = served.engine.scheduler
        scheduler._limits = dataclasses.replace(scheduler._limits, max_stall=stall, step_tokens=tokens)
        return served

    return build


def answering(served, words, count):
    """That many requests, each of which has its first token."""
    answers = [served.submit(words(5, seed=seed), tokens=200) for seed in range(count)]
    while not all(answer.ids for answer in answers):
        served.step()
    return answers


@pytest.mark.parametrize(
    ("stall", "tokens", "answers", "share"),
    [(2.0, 12.0, 4, 16), (3.0, 12.0, 4, 32), (2.0, 60.0, 4, 64), (2.0, 0.0, 1, 16), (2.0, math.inf, 4, 512 - 4)],
)
def test_a_long_prompt_gets_its_share_of_a_step_beside_answers(
    paced, words, reference, tokens_run, *, stall, tokens, answers, share
):
    served = paced(stall, tokens)
    running = answering(served, words, answers)
    prompt = words(600, seed=99)
    long = served.submit(prompt, tokens=12)
    tokens_run.clear()
    while not long.ids:
        served.step()
    # the last share is rounded to blocks, since a chunk ends with one
    assert tokens_run[:-1] == [answers + share // 16 * 16] * (len(tokens_run) - 1)
    assert len(tokens_run) == -(-600 // (share // 16 * 16))
    served.finish()
    assert long.ids == reference(prompt)
    assert all(len(answer.ids) == 200 for answer in running)


def test_with_no_answer_to_stall_a_prompt_has_the_whole_step(paced, words, tokens_run):
    served = paced(2.0, 0.0)
    served.run(words(1000, seed=1), tokens=1)
    assert tokens_run == [512, 488]


def test_many_prompts_for_one_answer_have_more_of_a_step(paced, words, tokens_run):
    served = paced(2.0, 15.0)
    answering(served, words, 1)
    for seed in range(4):
        served.submit(words(400, seed=50 + seed), tokens=1)
    tokens_run.clear()
    served.step()
    assert tokens_run == [1 + 4 * 16]
    served.finish()


@pytest.mark.parametrize(("stall", "answers", "prompts", "tokens"), [(2, 8, 1, 18), (2, 8, 16, 36), (1.5, 10, 1, 10)])
def test_the_share_follows_from_what_a_step_costs(stall, answers, prompts, tokens):
    limits = SchedulerLimits(512, 32, 256, max_stall=stall, step_tokens=10)
    assert limits.prompt_tokens(answers, prompts) == tokens
    assert limits.prompt_tokens(0, prompts) == math.inf


class Clock:
    """Time that only a model makes pass."""

    def __init__(self, model, monkeypatch, first, each):
        self.now = 0.0
        self.tokens = []
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)
        run = model.run

        def timed(token_ids, *rest):
            self.tokens.append(token_ids.shape[1])
            self.now += first + each * token_ids.shape[1]
            return run(token_ids, *rest)

        monkeypatch.setattr(model, "run", timed)


@pytest.mark.parametrize(("first", "each", "expected"), [(30.0, 2.0, 15.0), (0.0, 3.0, 0.0), (5.0, 0.0, math.inf)])
def test_what_a_step_costs_before_its_first_token_is_measured(model, monkeypatch, first, each, expected):
    Clock(model, monkeypatch, first, each)
    assert pace.step_tokens(model) == pytest.approx(expected)


def test_measuring_leaves_the_model_as_it_was(model, bench, reference, words):
    pace.step_tokens(model)
    prompt = words(40)
    assert bench().run(prompt)[0].ids == reference(prompt)
    assert torch.is_grad_enabled()
