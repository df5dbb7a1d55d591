"""What a restart costs a long prefix: to read it again, or to load it from disk.

    python benchmarks/bench_restart.py --output benchmarks/results/restart.jsonl

In every round a scheme reads the text, has it written as a prefix cache does, and loads it as a
process does that was just started: it hashes the weights, looks the tokens up, checks and loads
the file. It loads once with the file in the page cache and once after the system was told to
forget it. A hit whose next logits are not those of the cache that was read is an error, never
a row. Seconds are medians; the least ones are beside them, since other programs may run.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstow.blas import use_fast_blas

BLAS = use_fast_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

import kvstow  # noqa: E402
from kvstow.evaluate.environment import environment  # noqa: E402
from kvstow.evaluate.texts import bundled  # noqa: E402
from kvstow.integrations.mlx_lm.disk_prefixes import DiskPrefixes  # noqa: E402
from kvstow.session import Session  # noqa: E402
from kvstow.snapshot.prefixes import files  # noqa: E402

Times = dict[str, list[float]]


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    times.setdefault(name, []).append(time.perf_counter() - begin)


def forget(path: Path) -> None:
    """Take a file out of the page cache; it was synced when it was written."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def next_logits(model: Any, cache: list[Any], token: int) -> np.ndarray:
    return np.array(model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32))


def one_round(session: Session, tokens: list[int], root: Path, times: Times) -> int:
    """Returns the bytes of the file.

    Raises:
        SystemExit: If a hit is not what was read.
    """
    model, tokenizer = session.model, session.tokenizer
    *prefix, last = tokens
    with timed(times, "prefill_s"):
        cache = session.read(prefix)
    with DiskPrefixes(root) as disk:
        of_model = disk.of(model, tokenizer)
        with timed(times, "put_s"):
            of_model.put(prefix, cache)
        with timed(times, "write_s"):
            disk.flush()
    wanted = next_logits(model, cache, last)
    del cache
    (entry,) = files.entries(root)
    for name in ("load_s", "load_uncached_s"):
        if name == "load_uncached_s":
            forget(entry.path)
        restarted = DiskPrefixes(root)
        with timed(times, "identify_s"):
            of_model = restarted.of(model, tokenizer)
        with timed(times, name):
            held = of_model.nearest(prefix)
            if held is None or held.n_tokens != len(prefix):
                raise SystemExit("the prefix was not found")
            hit = held.trimmed()
            mx.eval([c.state for c in hit])
        if not np.array_equal(next_logits(model, hit, last), wanted):
            raise SystemExit("a hit goes on otherwise than the cache that was read")
    entry.path.unlink()
    return entry.n_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-quant", nargs="+", default=["off", "turbo:k8v3"])
    options = parser.parse_args()
    model, tokenizer = kvstow.load(options.model)
    text = "\n\n".join(text.text for text in bundled(["moby-dick"]))
    tokens = tokenizer.encode(text)[: options.tokens + 1]
    if len(tokens) <= options.tokens:
        raise SystemExit(f"the text has {len(tokens)} tokens")
    times: dict[str, Times] = {scheme: {} for scheme in options.kv_quant}
    n_bytes = {}
    loads = []
    for _ in range(options.rounds):
        for scheme in options.kv_quant:
            loads.append(os.getloadavg()[0])
            with kvstow.attached(model, scheme) as report, tempfile.TemporaryDirectory() as root:
                session = Session(model, tokenizer, report)
                n_bytes[scheme] = one_round(session, tokens, Path(root), times[scheme])
    for scheme, found in times.items():
        medians = {name: statistics.median(x) for name, x in found.items()}
        row = {
            "bench": "restart",
            "model": options.model,
            "scheme": scheme,
            "tokens": options.tokens,
            "file_bytes": n_bytes[scheme],
            **{name: round(x, 4) for name, x in medians.items()},
            "least": {name: round(min(x), 4) for name, x in found.items()},
            "times_faster": round(
                medians["prefill_s"] / (medians["identify_s"] + medians["load_s"]), 1
            ),
            "rounds": options.rounds,
            "load_average": round(statistics.median(loads), 2),
            **environment(" ".join(["python", *sys.argv]), BLAS),
        }
        line = json.dumps(row)
        print(line)
        if options.output is not None:
            with options.output.open("a") as file:
                print(line, file=file)


if __name__ == "__main__":
    main()
