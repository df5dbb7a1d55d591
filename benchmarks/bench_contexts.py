"""How many long contexts `kvstow serve` answers at once in the same memory, under each scheme.

    python benchmarks/bench_contexts.py --output benchmarks/results/contexts.jsonl

The same requests come at once to one server after the other, all with the same ``--kv-budget``.
What is counted is how many ran together, as the server's own statistics say while they do. The
model has random weights, in bfloat16, since only the size of its caches matters; the time is that
of a CPU and says nothing of a GPU's.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_server import Server, running
from load_server import tiny
from openai import AsyncOpenAI

from kvstow.blas import use_fast_blas
from kvstow.evaluate.environment import environment

N_WORDS = 1000  # tokens that prompts are drawn from


@dataclass
class Most:
    """The largest of what the statistics said."""

    running: int = 0
    kv_bytes: int = 0
    reserved_bytes: int = 0

    def see(self, stats: Any) -> None:
        self.running = max(self.running, stats["work"]["running"])
        self.kv_bytes = max(self.kv_bytes, stats["memory"]["in_flight"]["kv_bytes"])
        self.reserved_bytes = max(self.reserved_bytes, stats["budget"]["reserved_bytes"])


async def watch(server: Server, most: Most) -> None:
    def stats() -> Any:
        with urllib.request.urlopen(f"{server.url}/kvstow/stats", timeout=60) as answer:
            return json.load(answer)

    while True:
        most.see(await asyncio.to_thread(stats))
        await asyncio.sleep(0.1)


async def burst(server: Server, prompts: list[list[int]], max_tokens: int) -> Most:
    """All prompts at once; an error of any one ends the program."""
    most = Most()
    watching = asyncio.create_task(watch(server, most))
    async with AsyncOpenAI(
        base_url=server.url, api_key="none", max_retries=0, timeout=3600
    ) as client:
        asked = (
            client.completions.create(
                model="default_model", prompt=prompt, max_tokens=max_tokens, temperature=0
            )
            for prompt in prompts
        )
        await asyncio.gather(*asked)
    watching.cancel()
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--schemes", nargs="+", default=["off", "turbo:k8v3", "turbo:k4v3"])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--budget-bytes", type=int, default=18 * 2**20)
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [
        [rng.randrange(N_WORDS) for _ in range(options.prompt_tokens)]
        for _ in range(options.requests)
    ]
    limits = ["--kv-budget", str(options.budget_bytes), "--max-queue", str(options.requests)]
    limits += ["--queue-timeout", "3600", "--request-timeout", "3600"]
    limits += ["--decode-concurrency", str(options.requests)]
    found: dict[str, tuple[Most, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(Path(folder))
        for scheme in options.schemes:
            with running(scheme, model, "bfloat16", *limits) as server:
                begin = time.monotonic()
                most = asyncio.run(burst(server, prompts, options.max_tokens))
                found[scheme] = most, time.monotonic() - begin
    about = environment(" ".join(["python", *sys.argv]), use_fast_blas())
    for scheme, (most, seconds) in found.items():
        row = {
            "bench": "contexts",
            "model": "two layers of random weights, one KV head of 64, bfloat16",
            "scheme": scheme,
            "kv_budget_bytes": options.budget_bytes,
            "requests": options.requests,
            "prompt_tokens": options.prompt_tokens,
            "max_tokens": options.max_tokens,
            "most_at_once": most.running,
            "vs_off": round(most.running / found["off"][0].running, 3) if "off" in found else None,
            "most_kv_bytes": most.kv_bytes,
            "most_reserved_bytes": most.reserved_bytes,
            "seconds": round(seconds, 1),
            **about,
        }
        print(f"{scheme:12} {most.running:3} at once, {row['vs_off']} x", flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
