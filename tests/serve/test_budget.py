"""How much memory there is, and what a request takes of it."""

import pytest

pytest.importorskip("mlx_lm")

import mlx.core as mx

import kvstow
from kvstow.capacity import cost, max_tokens
from kvstow.integrations.mlx_lm import read_shape
from kvstow.serve import budget
from kvstow.serve.budget import Stored, default_budget

pytestmark = pytest.mark.mlx
MB = 10**6


@pytest.fixture
def stored(tiny):
    return Stored(read_shape(tiny[0], 100_000), kvstow.Scheme.parse("turbo:k8v3"))


def test_what_the_default_budget_leaves_is_enough_for_the_longest_prompt(stored):
    room = 100 * MB
    found = default_budget(stored, weight_bytes=20 * MB, memory_bytes=room)
    where = {"on_gpu": mx.default_device() != mx.cpu}
    longest = max_tokens(stored.shape, stored.scheme, room - 20 * MB, **where).tokens
    needed = cost(stored.shape, stored.scheme, longest, **where)
    assert 0 < found == room - 20 * MB - needed.working_bytes
    assert needed.cache_bytes + needed.fixed_bytes <= found


def test_weights_that_do_not_fit_leave_nothing(stored):
    assert default_budget(stored, weight_bytes=100 * MB, memory_bytes=90 * MB) <= 0


def test_no_tokens_take_no_bytes_and_more_take_more(stored):
    found = [stored.cache_bytes(n) for n in (0, 1, 1000, 10_000)]
    assert found[0] == 0
    assert found == sorted(set(found))


def test_a_limit_of_the_container_counts(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(budget, "_CGROUP", limit)
    without = budget._host_memory()
    limit.write_text("max\n")
    assert budget._host_memory() == pytest.approx(without, rel=0.5)
    limit.write_text("1000000\n")
    assert budget._host_memory() == MB


@pytest.mark.parametrize(
    ("said", "free"),
    [
        ({"memory_size": 9, "max_recommended_working_set_size": 7}, 7),  # Metal
        ({"device_name": "NVIDIA H200", "total_memory": 9, "free_memory": 8}, 8),  # CUDA
        ({"device_name": "another"}, None),
    ],
)
def test_a_gpu_says_its_memory_in_words_of_its_own(monkeypatch, said, free):
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx, "device_info", lambda: said)
    assert budget.free_memory() == free
    assert budget.usable_memory() > 0
