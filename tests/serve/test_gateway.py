"""Who is let in, who waits, and who is refused."""

import asyncio

import pytest

pytest.importorskip("mlx_lm")

from kvstow.serve.gateway import Gateway
from kvstow.serve.refusal import Refusal


def gateway(budget_bytes=100, *, slots=8, max_queue=8, queue_timeout_s=5.0):
    """One where a token is a byte."""
    return Gateway(
        lambda n_tokens: n_tokens,
        budget_bytes,
        slots=slots,
        max_queue=max_queue,
        queue_timeout_s=queue_timeout_s,
    )


async def settle():
    for _ in range(3):
        await asyncio.sleep(0)


async def ask(gate, n_tokens, lane="batch"):
    """A request that waits, if it has to."""
    asking = asyncio.ensure_future(gate.admit(n_tokens, lane))
    await settle()
    return asking


def in_loop(test):
    """Run an asynchronous test."""

    def run():
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@in_loop
async def test_a_batch_takes_as_many_bytes_as_rows_of_its_longest():
    gate = gateway(100)
    await gate.admit(10, "batch")
    await gate.admit(40, "batch")
    assert (gate.reserved_bytes, gate.room_bytes) == (80, 20)
    assert not (await ask(gate, 10)).done()  # three rows of 40


@in_loop
async def test_outside_the_batch_the_longest_counts_alone():
    gate = gateway(100)
    for n_tokens in (70, 90):
        await gate.admit(n_tokens, "single")
    await gate.admit(80, "batch")
    assert gate.reserved_bytes == 90


@in_loop
async def test_who_waits_is_let_in_in_the_order_of_coming():
    gate = gateway(100)
    first = await gate.admit(60, "batch")
    long, short = await ask(gate, 100), await ask(gate, 1)
    assert (gate.n_waiting, long.done(), short.done()) == (2, False, False)
    gate.release(first)
    await settle()
    assert (long.done(), short.done()) == (True, False)
    gate.release(long.result())
    await settle()
    assert short.done()


@in_loop
async def test_room_is_given_back_once():
    gate = gateway(100)
    tickets = [await gate.admit(50, "batch") for _ in range(2)]
    gate.release(tickets[0])
    gate.release(tickets[0])
    assert (gate.n_running, gate.reserved_bytes) == (1, 50)
    gate.release(tickets[1])
    assert (gate.n_running, gate.reserved_bytes) == (0, 0)


@in_loop
async def test_a_full_queue_is_429_and_says_when_to_come_again():
    gate = gateway(100, max_queue=1)
    await gate.admit(100, "batch")
    await ask(gate, 1)
    with pytest.raises(Refusal) as refused:
        await gate.admit(1, "batch")
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert int(refused.value.headers["Retry-After"]) >= 1


@in_loop
async def test_without_a_queue_what_does_not_fit_now_is_429():
    gate = gateway(100, max_queue=0)
    await gate.admit(100, "batch")
    with pytest.raises(Refusal, match="queue is full"):
        await gate.admit(1, "batch")


@in_loop
async def test_who_waited_too_long_is_503_and_in_nobodys_way():
    gate = gateway(100, queue_timeout_s=0.05)
    first = await gate.admit(60, "batch")
    with pytest.raises(Refusal) as refused:
        await gate.admit(100, "batch")
    assert (refused.value.status, refused.value.code) == (503, "queue_timeout")
    assert gate.n_waiting == 0
    gate.release(first)
    assert gate.reserved_bytes == 0


@in_loop
async def test_who_leaves_the_queue_lets_those_behind_move_up():
    gate = gateway(100)
    await gate.admit(40, "batch")
    long, short = await ask(gate, 90), await ask(gate, 40)
    long.cancel()
    await settle()
    assert short.done()
    assert (gate.n_running, gate.n_waiting) == (2, 0)


@in_loop
async def test_who_leaves_when_it_is_let_in_gives_the_room_back():
    gate = gateway(100)
    first = await gate.admit(100, "batch")
    asking = await ask(gate, 90)
    gate.release(first)  # lets it in, and it has not noticed
    asking.cancel()
    await settle()
    assert asking.cancelled()
    assert (gate.n_running, gate.reserved_bytes) == (0, 0)


@in_loop
async def test_there_are_no_more_requests_than_slots():
    gate = gateway(100, slots=2)
    for _ in range(2):
        await gate.admit(1, "batch")
    assert not (await ask(gate, 1)).done()


def test_what_never_fits_is_refused_with_both_numbers():
    gateway(100).check(60, 40, "max_tokens")
    with pytest.raises(Refusal, match="60 tokens of prompt and 41 of answer take 101 bytes") as no:
        gateway(100).check(60, 41, "max_tokens")
    assert (no.value.status, no.value.code, no.value.param) == (
        400,
        "kv_budget_exceeded",
        "max_tokens",
    )
