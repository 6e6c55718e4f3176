import pytest

from hermes.bench.hermes_target import HermesTarget
from hermes.bench.loads import Caches
from hermes.bench.targets import Call, TargetError
from hermes.messages import Message
from shared.errors import resource_exhausted, unavailable
from tests.unit.hermes.fake_assembler import CALLING


def call(caches: Caches = Caches.ON, *, ignore_eos: bool = False) -> Call:
    return Call((Message("system", "s"), Message("user", "hi")), 7, ignore_eos, caches)


async def asked(assembler, admin, asking: Call, namespace: str | None = None):
    heard: list[None] = []
    target = HermesTarget(assembler.address, admin.address, None, namespace)
    try:
        await target.begin()
        reply = await target.answer(asking, lambda: heard.append(None))
        await target.end()
    finally:
        await target.close()
    return reply, len(heard)


async def test_an_answer_has_its_text_and_what_both_caches_had(assembler, admin):
    reply, heard = await asked(assembler, admin, call())
    assert reply == ("Paris.", 9, 4, 3, 5, 0.25)
    assert heard == 2
    (request,) = assembler.requests
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0
    assert (request.stopping.max_tokens, request.stopping.ignore_eos) == (7, False)
    assert [message.content for message in request.prompt.chat.messages] == ["s", "hi"]


@pytest.mark.parametrize("caches", Caches)
async def test_off_keeps_a_request_from_reading_and_writing_and_on_lets_it_do_both(assembler, admin, caches):
    await asked(assembler, admin, call(caches))
    policy = assembler.requests[0].cache
    on = caches is Caches.ON
    assert (policy.HasField("read"), policy.HasField("write")) == (True, True)
    assert (policy.read, policy.write) == (on, on)


async def test_each_run_has_a_namespace_of_its_own_and_empties_it_in_both_caches(assembler, admin):
    for _ in range(2):
        await asked(assembler, admin, call())
    namespaces = [request.cache.namespace for request in assembler.requests]
    assert len(set(namespaces)) == 2
    assert assembler.flushes == namespaces
    assert [request.namespace for request in admin.requests] == namespaces


async def test_a_given_namespace_is_used_and_left_as_it_is(assembler, admin):
    for _ in range(2):
        await asked(assembler, admin, call(), "mine")
    assert {request.cache.namespace for request in assembler.requests} == {"mine"}
    assert not assembler.flushes
    assert not admin.requests


async def test_answers_of_full_length_are_asked_for(assembler, admin):
    await asked(assembler, admin, call(ignore_eos=True))
    assert assembler.requests[0].stopping.ignore_eos


async def test_reasoning_is_heard_and_is_no_part_of_the_answer(assembler, admin):
    assembler.events = CALLING
    reply, heard = await asked(assembler, admin, call())
    assert (reply.text, heard) == ("Let me see.", 3)


async def test_a_refusal_keeps_its_reason(assembler, admin):
    assembler.events, assembler.error = [], resource_exhausted("QUEUE_FULL", "There is too much load.", retry_after=1)
    with pytest.raises(TargetError) as error:
        await asked(assembler, admin, call())
    assert (error.value.reason, error.value.message) == ("QUEUE_FULL", "There is too much load.")


async def test_a_stream_that_ends_early_is_an_error(assembler, admin):
    assembler.events = assembler.events[:2]
    with pytest.raises(TargetError, match="BROKEN_STREAM"):
        await asked(assembler, admin, call())


async def test_what_cannot_be_emptied_or_asked_is_an_error_that_says_why(assembler, admin):
    admin.error = unavailable("BUSY", "Not now.")
    target = HermesTarget(assembler.address, admin.address, None, None)
    await target.begin()
    with pytest.raises(TargetError, match="Not now"):
        await target.end()
    with pytest.raises(TargetError, match="UNIMPLEMENTED"):
        await target.facts()  # the fake has no model
    await target.close()
