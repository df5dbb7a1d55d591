"""Many clients at once, for seconds; benchmarks/load_server.py does it for minutes."""

import asyncio
import gc
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from kvstow.serve.options import PrefixFiles

for package in ("mlx_lm", "openai", "uvicorn"):
    pytest.importorskip(package)
TOOL = Path(__file__).parents[2] / "benchmarks" / "load_server.py"
load = SimpleNamespace(**runpy.run_path(str(TOOL)))

pytestmark = pytest.mark.mlx
CONTEXT = 700  # tokens, and characters of this tokenizer's
TEXTS = [f"{i} and {'abcdefghij'[i:]} " * 60 for i in range(4)]
N_CLIENTS = 32


def active_bytes(it):
    """What mlx holds once nothing is kept of any prompt."""
    it.settled()
    it.engine.prompt_cache.trim_to(n_sequences=0)  # nothing runs
    gc.collect()
    return mx.get_active_memory()


def counted(seen, how):
    return sum(n for kind, n in seen.ended.items() if kind.endswith(how))


def loaded(url, asks):
    """What clients saw until everything of interest had happened: a slow machine takes longer."""
    seen = load.Seen()
    for _ in range(20):
        load.merge(seen, asyncio.run(load.load(url, asks, N_CLIENTS, 2)))
        if counted(seen, ": 429") and counted(seen, ": gone") and len(seen.greedy) > 20:
            return seen
    raise AssertionError(f"not everything happened: {seen.ended}")


# Its collections have found sockets left open, by a client here or by a test before.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_many_clients_get_the_answers_of_one_and_leave_nothing_behind(serve, tiny, tmp_path):
    rng = random.Random(0)
    asks = iter(lambda: load.mixture(TEXTS, rng, CONTEXT), None)
    with serve(
        tiny,
        "turbo:k8v3+stored",
        context=CONTEXT,
        decode_concurrency=8,
        max_queue=10,
        prefix_files=PrefixFiles(tmp_path / "prefixes", 10**8),
    ) as it:
        asyncio.run(load.load(it.url, asks, N_CLIENTS, 2))
        before = active_bytes(it)
        seen = loaded(it.url, asks)
        assert seen.errors == []
        assert active_bytes(it) - before <= load.SLACK_BYTES
        assert it.gateway.n_waiting == 0
        assert it.engine._outboxes == set()
        found = asyncio.run(load.compare(it.url, seen.greedy))
        assert found["compared"] == len(seen.greedy)
        assert found["largest_gap_nats"] <= load.NEAR_TIE_NATS
        assert it.service.state == "ok"
