"""What a restart costs a long prefix: to read it again, or to load it from disk.

    python benchmarks/bench_restart.py --output benchmarks/results/restart.jsonl

In every round a scheme reads the text and has it written as a prefix cache does. Then a new process
loads the model, hashes its weights, looks the tokens up, checks and loads the file; another
one does so after the system was told to forget the file. A hit whose next logits are not those
of the cache that was read is an error, never a row. Loading the weights is not counted: it is
the same either way. Seconds are medians; the least ones are beside them, since other programs
may run.
"""

import argparse
import json
import os
import statistics
import subprocess
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
LOGITS = "logits.npy"


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


def text_of(tokenizer: Any, n_tokens: int) -> tuple[list[int], int]:
    """Tokens of a text, and the one behind them.

    Raises:
        SystemExit: If there are not so many.
    """
    text = "\n\n".join(text.text for text in bundled(["moby-dick"]))
    tokens = tokenizer.encode(text)[: n_tokens + 1]
    if len(tokens) <= n_tokens:
        raise SystemExit(f"the text has {len(tokens)} tokens")
    return tokens[:-1], tokens[-1]


def load(model: Any, tokenizer: Any, root: Path, n_tokens: int) -> Times:
    """What the new process does.

    Raises:
        SystemExit: If the prefix is not found, or goes on otherwise than before.
    """
    prefix, last = text_of(tokenizer, n_tokens)
    times: Times = {}
    with timed(times, "identify_s"):
        of_model = DiskPrefixes(root).of(model, tokenizer)
    with timed(times, "load_s"):
        held = of_model.nearest(prefix)
        if held is None or held.n_tokens != n_tokens:
            raise SystemExit("the prefix was not found")
        cache = held.trimmed()
        mx.eval([c.state for c in cache])
    if not np.array_equal(next_logits(model, cache, last), np.load(root / LOGITS)):
        raise SystemExit("a hit goes on otherwise than the cache that was read")
    return times


def one_round(session: Session, root: Path, n_tokens: int, times: Times) -> Path:
    """Read and write the text; returns the file."""
    prefix, last = text_of(session.tokenizer, n_tokens)
    with timed(times, "prefill_s"):
        cache = session.read(prefix)
    with DiskPrefixes(root) as disk:
        of_model = disk.of(session.model, session.tokenizer)
        with timed(times, "put_s"):
            of_model.put(prefix, cache)
        with timed(times, "write_s"):
            disk.flush()
    np.save(root / LOGITS, next_logits(session.model, cache, last))
    (entry,) = files.entries(root)
    return entry.path


def restarted(options: argparse.Namespace, scheme: str, root: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--load", str(root), "--kv-quant", scheme]
    command += ["--model", options.model, "--tokens", str(options.tokens)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return {name: seconds for name, (seconds,) in json.loads(found.stdout).items()}


def row(
    options: argparse.Namespace, scheme: str, times: Times, n_bytes: int, load_average: float
) -> dict[str, Any]:
    medians = {name: statistics.median(x) for name, x in times.items()}
    return {
        "bench": "restart",
        "model": options.model,
        "scheme": scheme,
        "tokens": options.tokens,
        "file_bytes": n_bytes,
        **{name: round(x, 4) for name, x in medians.items()},
        "least": {name: round(min(x), 4) for name, x in times.items()},
        "times_faster": round(medians["prefill_s"] / (medians["identify_s"] + medians["load_s"])),
        "rounds": options.rounds,
        "load_average": load_average,
        **environment(" ".join(["python", *sys.argv]), BLAS),
    }


def measure(options: argparse.Namespace, model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    times: dict[str, Times] = {scheme: {} for scheme in options.kv_quant}
    n_bytes, loads = {}, []
    for _ in range(options.rounds):
        for scheme, found in times.items():
            loads.append(os.getloadavg()[0])
            with kvstow.attached(model, scheme) as report, tempfile.TemporaryDirectory() as folder:
                session = Session(model, tokenizer, report)
                path = one_round(session, Path(folder), options.tokens, found)
                n_bytes[scheme] = path.stat().st_size
                cached = restarted(options, scheme, Path(folder))
                forget(path)
                uncached = restarted(options, scheme, Path(folder))
            for name, seconds in (
                ("identify_s", cached["identify_s"]),
                ("identify_s", uncached["identify_s"]),
                ("load_s", cached["load_s"]),
                ("load_uncached_s", uncached["load_s"]),
            ):
                found.setdefault(name, []).append(seconds)
    for scheme, found in times.items():
        yield row(options, scheme, found, n_bytes[scheme], round(statistics.median(loads), 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-quant", nargs="+", default=["off", "turbo:k8v3"])
    parser.add_argument("--load", type=Path, help="the part of the new process: a directory")
    options = parser.parse_args()
    model, tokenizer = kvstow.load(options.model)
    if options.load is not None:
        with kvstow.attached(model, options.kv_quant[0]):
            print(json.dumps(load(model, tokenizer, options.load, options.tokens)))
        return
    for found in measure(options, model, tokenizer):
        line = json.dumps(found)
        print(line)
        if options.output is not None:
            with options.output.open("a") as file:
                print(line, file=file)


if __name__ == "__main__":
    main()
