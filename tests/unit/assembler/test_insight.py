"""What insight finds in prompts, and what it keeps silent about."""

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from itertools import count
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from assembler import insight as insight_module
from assembler import template_files
from assembler.cache.key import tag_of
from assembler.causes import Causes
from assembler.findings import DYNAMIC_PREFIX, Finding
from assembler.jinja_template import JinjaTemplate
from assembler.metrics import AssemblerMetrics
from assembler.model_files import ModelFiles
from assembler.orders import Order, Policies
from assembler.pipeline import Assembler
from assembler.recall import CacheUse
from hermes.v1 import types_pb2
from tests.unit.assembler import made_prompts
from tests.unit.assembler.prompted import assembled, chat, dynamic

SYSTEM = (
    "You are the helper of a bicycle shop. {} Answer in two sentences, and be kind to all who ask you, whatever they "
    "want to know about bicycles and their parts."
)


@pytest.fixture(scope="module")
def assembler(files: ModelFiles) -> Iterator[Assembler]:
    made = Assembler(files)
    yield made
    made.close()


_namespaces = count()


@pytest.fixture
def use() -> CacheUse:
    """A namespace of the test's own."""
    return CacheUse(f"n{next(_namespaces)}")


async def test_two_conversations_tell_of_a_date_and_what_it_costs(assembler: Assembler, use: CacheUse) -> None:
    assert await dynamic(assembler, use, ("system", SYSTEM.format("It is 2026-11-30.")), ("user", "Why?")) == []
    turns = ("system", SYSTEM.format("It is 2026-12-01.")), ("user", "How?")
    (found,) = await dynamic(assembler, use, *turns)
    text = turns[0][1]
    assert text[found.start : found.end] == "2026-12-01"
    after = len(assembler.files.tokenizer.encode(text[found.end :] + "<|im_end|>\n<|im_start|>user\n"))
    assert found.tokens == after
    assert str(after) in found.message
    assert "last user message" in found.remedy


async def test_the_same_head_in_other_turns_and_other_conversations_costs_nothing(
    assembler: Assembler, use: CacheUse
) -> None:
    for date in ("2026-11-30", "2026-12-01"):
        await assembled(assembler, use, ("system", SYSTEM.format(date)), ("user", "Why?"))
    now = ("system", SYSTEM.format("2026-12-01"))
    assert await dynamic(assembler, use, now, ("user", "Why?"), ("assistant", "So."), ("user", "And?")) == []
    assert await dynamic(assembler, use, now, ("user", "Something else?")) == []


async def test_a_conversation_whose_head_changes_with_each_turn_loses_all_of_its_turns(
    assembler: Assembler, use: CacheUse
) -> None:
    talk = [("user", "Tell me of gears. " * 30), ("assistant", "There are many of them. " * 400), ("user", "And?")]
    await assembled(assembler, use, ("system", SYSTEM.format("10:15:01")), *talk)
    before = await assembled(assembler, use, ("system", SYSTEM.format("10:15:59")), *talk, ("assistant", "a" * 9))
    (found,) = before.findings
    ids = assembler.files.tokenizer.encode("".join(text for _, text in talk))
    assert abs(found.tokens - len(ids)) < 0.1 * len(ids)


@pytest.mark.parametrize("talks", [1, 2, 5])
async def test_conversations_that_take_turns_lose_no_less_than_one_alone(
    assembler: Assembler, use: CacheUse, talks: int
) -> None:
    """Each has a time in its head, another one each turn."""
    turns = [[("user", f"Question {talk}: " + "Tell me of a river. " * 9)] for talk in range(talks)]
    told: list[list[int]] = [[] for _ in turns]
    for round_ in range(4):
        for talk, so_far in enumerate(turns):
            system = "system", SYSTEM.format(f"It is 10:{round_:02}:{talk:02}.")
            told[talk].append(sum(each.tokens for each in await dynamic(assembler, use, system, *so_far)))
            so_far += [("assistant", f"{talk} {round_} " + "It is a fine river. " * 30), ("user", f"More {round_}?")]
    known = 0  # of the turns before, what the last one had
    for round_, length in enumerate((1, 3, 5), 1):
        known = len(assembler.files.tokenizer.encode("".join(text for _, text in turns[0][:length])))
        head = len(assembler.files.tokenizer.encode(SYSTEM))
        assert all(abs(each[round_] - known - head) < 0.1 * (known + head) for each in told), told


async def test_the_cost_of_a_conversation_goes_by_its_own_characters_a_token(
    assembler: Assembler, use: CacheUse
) -> None:
    text = "请介绍一下这座城市的历史和文化，以及当地的美食。" * 20
    talk = [("user", text), ("assistant", text), ("user", "再说")]
    rules = "Answer in two sentences and be kind to all who ask you, whatever it is. " * 60
    for time in ("10:15:01", "11:16:59"):
        (found,) = await dynamic(assembler, use, ("system", f"It is {time}. {rules}"), *talk) or (None,)
    assert found is not None
    really = len(assembler.files.tokenizer.encode(rules + text * 2))
    assert abs(found.tokens - really) < 0.05 * really


async def test_each_of_several_values_is_told_with_the_tokens_up_to_the_next(
    assembler: Assembler, use: CacheUse
) -> None:
    between = "Answer in two sentences, and be kind to all who ask you. "
    pattern = f"Session {{}}. {between * 3}It is {{}}. {between * 2}Your number is {{}}. {between}"
    for values in (
        ("f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "08:10", 4),
        ("a3bb189e-8bf9-3888-9912-ace4e6543002", "09:55", 5),
    ):
        found = await dynamic(assembler, use, ("system", pattern.format(*values)), ("user", "Why?"))
    assert [each.message.partition(",")[0] for each in found] == [
        "Message 0 has a UUID", "Message 0 has a time of day", "Message 0 has a number"
    ]  # fmt: skip
    lengths = [each.tokens for each in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 30


async def test_a_value_that_was_told_is_told_again_and_with_it_what_changes_besides(
    assembler: Assembler, use: CacheUse
) -> None:
    pattern = "Session {}. Answer in two sentences, and be kind to all who ask you. It is {}. Be brief, and be right."
    told = []
    for session, time in (("a81f3c9d", "10:15"), ("77aa01c9", "10:15"), ("e3b477d2", "10:15"), ("5f3c9a7e", "11:20")):
        found = await dynamic(assembler, use, ("system", pattern.format(session, time)), ("user", "Why?"))
        told.append([(each.start, each.end) for each in found])
    assert told == [[], [(8, 16)], [(8, 16)], [(8, 16), (81, 86)]]


async def test_a_value_of_varying_length_is_found(assembler: Assembler, use: CacheUse) -> None:
    for number in (9, 10, 99, 100):
        found = await dynamic(assembler, use, ("system", SYSTEM.format(f"Visitor {number}.")), ("user", "Why?"))
    assert found[0].message.startswith("Message 0 has a number")


async def test_a_name_is_told_where_many_differ_in_nothing_else(assembler: Assembler, use: CacheUse) -> None:
    names = ["Ada", "Béla", "Chen", "Dagny", "Emre", "Fatou", "Gil", "Hana", "Ivo", "Jun"]
    told = [
        bool(await dynamic(assembler, use, ("system", SYSTEM.format(f"You talk to {name}.")), ("user", f"I am {name}")))
        for name in names
    ]
    assert told == [False] * 7 + [True] * 3


async def test_names_of_prompts_that_several_conversations_have_are_nothing_to_tell(
    assembler: Assembler, use: CacheUse
) -> None:
    for name in ("Ada", "Béla", "Chen", "Dagny", "Emre", "Fatou", "Gil", "Hana", "Ivo", "Jun"):
        for question in ("Why?", "How?"):
            turns = ("system", SYSTEM.format(f"You work for {name}.")), ("user", question)
            assert await dynamic(assembler, use, *turns) == []


async def test_questions_whose_words_the_template_itself_writes_are_nothing_to_tell(
    assembler: Assembler, use: CacheUse
) -> None:
    """Without a system message the template has its own, in which the question is found before it comes."""
    for words in (
        "AI",
        "assistant",
        "named",
        "trained",
        "Hugging",
        "Face",
        "by",
        "helpful",
        "are",
        "You",
        "SmolLM",
        "a",
    ):
        assert await dynamic(assembler, use, ("user", words)) == []


async def test_the_second_system_message_is_named_and_white_space_before_a_text_counts(
    assembler: Assembler, use: CacheUse
) -> None:
    for date in ("2026-11-30", "2026-12-01"):
        turns = ("system", "Be brief and kind."), ("system", f"  \n It is {date}. Say so."), ("user", "Why?")
        found = await dynamic(assembler, use, *turns)
    assert (found[0].message_index, turns[1][1][found[0].start : found[0].end]) == (1, "2026-12-01")


async def test_namespaces_and_templates_are_not_compared_with_each_other(files: ModelFiles) -> None:
    one = Assembler(files)
    other = Assembler(replace(files, template=template_files.read("zephyr", {"eos_token": "</s>"})))
    for place, (made, use) in enumerate([(one, CacheUse("a")), (one, CacheUse("b")), (other, CacheUse("a"))]):
        assert await dynamic(made, use, ("system", SYSTEM.format(f"2026-11-1{place}")), ("user", "Why?")) == []
    one.close()
    other.close()


async def test_the_policy_of_a_request_is_kept(assembler: Assembler, use: CacheUse) -> None:
    def turns(day: int) -> tuple[tuple[str, str], ...]:
        return ("system", SYSTEM.format(f"2026-11-{day}")), ("user", "Why?")

    assert await dynamic(assembler, use._replace(write=False), *turns(10)) == []
    assert await dynamic(assembler, use, *turns(11)) == [], "the one before must not be remembered"
    assert await dynamic(assembler, use._replace(read=False), *turns(12)) == []
    assert len(await dynamic(assembler, use, *turns(13))) == 1


async def test_a_warning_quotes_the_caller_who_gets_it_and_nobody_else(
    assembler: Assembler, use: CacheUse, caplog: pytest.LogCaptureFixture
) -> None:
    for mail in ("Zk81x0q7Lw22", "Qm44n9t1Bv35"):
        found = await dynamic(assembler, use, ("system", SYSTEM.format(f"Token {mail}.")), ("user", "Why?"))
    assert "Qm44n9t1Bv35" in found[0].message
    assert "Zk81" not in str(found)
    assert "Qm44" not in found[0].remedy
    assert "a random token" in caplog.text
    assert not any(text in caplog.text for text in ("Zk81", "Qm44", "Token"))


async def test_the_end_of_a_message_is_the_messages_whatever_mark_it_ends_in(
    assembler: Assembler, use: CacheUse
) -> None:
    for place, last in enumerate(
        [
            "Answer",
            "at",
            "once!",
            "Refuse",
            "rarely.",
            "Ask",
            "back?",
            "Be",
            "kind;",
            "Wait!",
            "Tell",
            "all.",
            "Sum",
            "up?",
            "Hurry;",
        ]
    ):
        text = f"{SYSTEM.format('today')} Remember what we said of the shop before: {last * 3}"
        found = await dynamic(assembler, use, ("system", text), ("user", f"Why {place}?"))
        for each in found:
            assert (each.message_index, each.end) == (0, len(text))
            assert each.start is not None
            assert text[each.start : each.end] in each.message
    assert found, "it takes eight"


@pytest.mark.parametrize(("count", "told"), [(256, 1), (257, 0)])
async def test_heads_of_very_many_messages_are_not_looked_at(
    assembler: Assembler, use: CacheUse, count: int, told: int
) -> None:
    others = [("system", f"Rule {place}.") for place in range(count - 1)]
    for day in (10, 11):
        found = await dynamic(assembler, use, ("system", SYSTEM.format(f"2026-11-{day}")), *others, ("user", "Why?"))
    assert len(found) == told


async def test_the_log_says_each_thing_once(
    assembler: Assembler, use: CacheUse, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "assembler.insight")
    for day in range(10, 20):
        await assembled(assembler, use, ("system", SYSTEM.format(f"2026-11-{day}")), ("user", "Why?"))
    assert len(caplog.records) == 1
    assert repr(use.namespace) in caplog.text


DATED = (
    "{{ 'You are the helper of a bicycle shop, and today is ' }}{{ strftime_now('%d %B %Y') }}{{ '. Answer in two "
    "sentences, and be kind.' }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ note }}\n"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
    "{% endfor %}"
)


@pytest.fixture
def dated(files: ModelFiles) -> Iterator[Assembler]:
    made = Assembler(replace(files, template=JinjaTemplate(DATED, {})))
    yield made
    made.close()


async def test_a_date_that_the_template_prints_is_the_templates(
    dated: Assembler, use: CacheUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for day in (10, 11):

        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> "Clock":
                return cls(2026, 11, day)  # noqa: B023 - used in this round alone

        monkeypatch.setattr("assembler.pipeline.datetime", Clock)
        found = await dynamic(dated, use, ("user", "Why?"))
    assert found[0].message.startswith("The chat template writes a date, '11 November 2026'")
    assert (found[0].message_index, found[0].start) == (None, None)
    assert "template" in found[0].remedy


async def test_a_value_in_tools_or_in_template_variables_is_named_as_such(dated: Assembler, use: CacheUse) -> None:
    def order(rate: str, note: str) -> Order:
        tool = types_pb2.Tool(function_json=f'{{"name": "rates", "description": "Exchange rates as of {rate}."}}')
        prompt = chat(("user", "Why?"), tools=[tool], template_kwargs_json=f'{{"note": "{note}"}}')
        return Order(prompt, None, cache=use)

    await dated.assemble(order("2026-11-10", "x"))
    (found,) = (await dated.assemble(order("2026-11-11", "x"))).findings
    assert found.message.startswith("A tool's description has a date, '2026-11-11'")
    assert "tools" in found.remedy
    await dated.assemble(order("2026-11-10", "id 5f3c9a7e11d2"))
    (found,) = (await dated.assemble(order("2026-11-10", "id 77aa01c9e3b4"))).findings
    assert found.message.startswith("Template_kwargs_json has a hexadecimal id")


async def test_what_is_remembered_is_bounded(
    assembler: Assembler, monkeypatch: pytest.MonkeyPatch, use: CacheUse
) -> None:
    monkeypatch.setattr(insight_module, "_MOST_SCOPES", 5)
    monkeypatch.setattr(insight_module, "_MOST_CHARACTERS", 60_000)
    insight = assembler.insight
    assert insight is not None
    for number in range(40):
        text = f"{number} " + "Be kind to all. " * (number * 40)
        await assembled(assembler, CacheUse(f"{use.namespace} {number % 8}"), ("system", text), ("user", "Why?" * 9000))
        held = [heads.size for heads in insight._heads.values()]
        assert insight._characters == sum(held)
        assert len(held) <= 5
        assert sum(held[:-1]) <= 60_000


async def test_a_flush_forgets_the_prompts_of_its_namespace(assembler: Assembler, use: CacheUse) -> None:
    other = CacheUse(f"{use.namespace} too")
    for each in (use, other):
        await assembled(assembler, each, ("system", SYSTEM.format("2026-11-10")), ("user", "Why?"))
    assert assembler.insight is not None
    assembler.insight.forget(tag_of(use.namespace))
    turns = ("system", SYSTEM.format("2026-11-11")), ("user", "Why?")
    assert await dynamic(assembler, use, *turns) == []
    assert len(await dynamic(assembler, other, *turns)) == 1
    assembler.insight.forget(None)
    assert assembler.insight.summaries() == []
    assert assembler.insight._characters == 0


async def test_a_system_part_of_a_megabyte_is_compared_by_its_beginning(assembler: Assembler, use: CacheUse) -> None:
    rest = "".join(made_prompts.system(random.Random(1), 12_000))
    for time in ("10:15:01", "11:20:59"):
        found = await dynamic(assembler, use, ("system", f"It is {time}. {rest}"), ("user", "Why?"))
    ids = assembler.files.tokenizer.encode(rest)
    assert abs(found[0].tokens - len(ids)) < 0.05 * len(ids)


async def test_summaries_count_the_prompts_and_the_tokens_of_each_cause(assembler: Assembler, use: CacheUse) -> None:
    tokens = 0
    for day in range(10, 15):
        turns = ("system", SYSTEM.format(f"2026-11-{day}")), ("user", "Why?"), ("user", "How?")
        tokens += sum(each.tokens for each in (await assembled(assembler, use, *turns)).findings)
    assert assembler.insight is not None
    (summary,) = assembler.insight.summaries(use.namespace)
    assert (summary.namespace, summary.prompts) == (use.namespace, 5)
    assert [(each.kind.code, each.prompts, each.tokens) for each in summary.causes] == [
        ("DYNAMIC_PREFIX", 4, tokens),
        ("ROLE_ORDER", 5, 0),
    ]
    assert tokens > 0


async def test_switched_off_it_looks_at_nothing(files: ModelFiles) -> None:
    blind = Assembler(files, Policies(insight=False))
    for day in range(10, 13):
        turns = ("system", SYSTEM.format(f"2026-11-{day}")), ("user", "Why?"), ("user", "How?")
        found = (await assembled(blind, CacheUse(), *turns)).findings
    assert [each.code for each in found] == ["ROLE_ORDER"]
    assert blind.insight is None
    blind.close()


def test_warnings_are_counted_by_code_with_their_tokens() -> None:
    registry = CollectorRegistry()
    metrics = AssemblerMetrics("m", registry)
    metrics.warned(
        (Finding("DYNAMIC_PREFIX", "", tokens=5), Finding("DYNAMIC_PREFIX", "", tokens=6), Finding("ROLE_ORDER", ""))
    )
    metrics.warned(())

    def value(name: str, code: str) -> float | None:
        return registry.get_sample_value(f"hermes_assembly_{name}_total", {"model_name": "m", "code": code})

    assert (value("warnings", "DYNAMIC_PREFIX"), value("warning_tokens", "DYNAMIC_PREFIX")) == (1, 11)
    assert (value("warnings", "ROLE_ORDER"), value("warnings", "CONTROL_TEXT")) == (1, 0)


async def test_requests_that_keep_nothing_leave_no_namespace_behind(assembler: Assembler, use: CacheUse) -> None:
    insight = assembler.insight
    assert insight is not None
    before = len(insight._heads)
    for number in range(50):
        reading = CacheUse(f"{use.namespace} {number}", write=False)
        await assembled(assembler, reading, ("system", "Be kind."), ("user", "Why?"))
    assert len(insight._heads) == before


def test_sums_are_bounded_over_all_namespaces_and_show_the_beginnings_of_long_names() -> None:
    causes = Causes()
    finding = Finding(DYNAMIC_PREFIX, "A message.", 0, "A remedy.", 3)
    for number in range(25):
        for _ in range(1000):
            causes.add(f"{number} " + "n" * 1000, [finding])
    summaries = causes.summaries()
    assert sum(each.prompts for each in summaries) <= 20_000
    assert max(len(each.namespace) for each in summaries) < 100
    (last,) = causes.summaries("24 " + "n" * 1000)
    assert [(each.prompts, each.tokens) for each in last.causes] == [(1000, 3000)]
    causes.forget(None)
    assert causes.summaries() == []
