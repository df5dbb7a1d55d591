"""What the engine's thread is told of requests that nobody waits for."""

import pytest

pytest.importorskip("mlx_lm")

from mlx_lm.server import GenerationContext, Response

from kvstow.serve.engine import Outbox, _GivenUp

TOKEN = Response("a", 1, -0.5, None, ())


def context():
    return GenerationContext(False, False, None, None, "normal", [1, 2])


class Box(Outbox):
    """One that remembers."""

    def __init__(self, lane="batch"):
        self.got, self.n_closed = [], 0
        super().__init__(self.got.append, self._count)
        self.lane = lane

    def _count(self):
        self.n_closed += 1


def test_everything_is_handed_on_and_the_end_closes_once():
    box, ctx = Box(), context()
    for item in (ctx, (1, 2), TOKEN, None):
        box.put(item)
    box.close()
    assert box.got == [ctx, (1, 2), TOKEN, None]
    assert (box.n_closed, box.leaves, ctx._should_stop) == (1, True, False)


@pytest.mark.parametrize("item", [(1, 2), TOKEN])
def test_a_request_that_is_given_up_leaves_the_batch_when_it_is_next_spoken_of(item):
    """mlx-lm looks at the context right after that, and drops the request in the same round."""
    box, ctx = Box(), context()
    box.put(ctx)
    box.give_up()
    assert (ctx._should_stop, box.leaves, box.n_closed) == (False, False, 0)
    box.put(item)
    assert (ctx._should_stop, box.leaves, box.n_closed) == (True, True, 0)
    assert box.got == [ctx]


def test_a_request_that_is_given_up_before_its_turn_is_not_let_go_before_it_is_in_the_batch():
    box, ctx = Box(), context()
    box.give_up()
    box.put(ctx)
    assert (ctx._should_stop, box.leaves) == (True, False)


def test_a_prompt_outside_the_batch_is_left_between_two_chunks():
    box = Box("single")
    box.put(context())
    box.put((1, 2))
    box.give_up()
    with pytest.raises(_GivenUp) as left:
        box.put((2, 2))
    box.put(left.value)  # as mlx-lm does with every error
    assert (box.n_closed, len(box.got)) == (1, 2)
