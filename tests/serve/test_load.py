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


def test_many_clients_get_the_answers_of_one_and_leave_nothing_behind(serve, tiny, tmp_path):
    rng = random.Random(0)
    asks = iter(lambda: load.mixture(TEXTS, rng, CONTEXT), None)
    with serve(
        tiny,
        "turbo:k8v3+stored",
        context=CONTEXT,
        decode_concurrency=8,
        max_queue=20,
        prefix_files=PrefixFiles(tmp_path / "prefixes", 10**8),
    ) as it:
        before = None
        for seconds in (2, 4):
            seen = asyncio.run(load.load(it.url, asks, N_CLIENTS, seconds))
            assert seen.errors == []
            after = active_bytes(it)
            before = before or after
        assert after - before <= load.SLACK_BYTES
        assert it.gateway.n_waiting == 0
        assert it.engine._outboxes == set()
        assert counted(seen, ": 429") > 0
        assert counted(seen, ": gone") > 0
        found = asyncio.run(load.compare(it.url, seen.greedy))
        assert found["compared"] > 20
        assert found["largest_gap_nats"] <= load.NEAR_TIE_NATS
        assert it.service.state == "ok"
