"""Mean KL of each scheme on eight passages, against the unquantised model.

    python benchmarks/bench_kl.py --model smollm2 --output benchmarks/results/kl.jsonl

Method: `kvstow.evaluate.kl`. One JSON row per scheme, float32 activations. The
interval is a bootstrap over passages, since tokens of one text are not independent.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import kvstow
from kvstow.evaluate import kl
from kvstow.evaluate.environment import environment

SCHEMES = ["off", "affine:8", "affine:4", "turbo:k8v8", "turbo:k8v5", "turbo:k8v4", "turbo:k8v3"]
SCHEMES += ["turbo:k8v2", "turbo:k5v3", "turbo:k4v4", "turbo:k4v3", "turbo:k4v2", "turbo:k2v2"]


def interval(per_passage: np.ndarray) -> list[float]:
    rng = np.random.default_rng(0)
    means = rng.choice(per_passage, (10_000, per_passage.size)).mean(axis=1)
    return [round(float(x), 6) for x in np.quantile(means, [0.025, 0.975])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--fetch", choices=["auto", "eager", "deferred"], default="auto")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    blas = kvstow.use_fast_blas()
    model, tokenizer = kvstow.load(options.model, dtype="float32")
    about = environment(" ".join(["python", *sys.argv]), blas)
    tokens = kl.passages(tokenizer, options.passages)
    schemes = [kvstow.Scheme.parse(text) for text in SCHEMES]
    for report, used, per_passage in kl.compare(model, tokens, schemes, fetch=options.fetch):
        row = {
            "bench": "kl",
            "model": Path(options.model).name,
            "scheme": str(report.scheme),
            "fetch": report.fetch,
            "layers": [report.n_quantised, len(report.layers)],
            "n_passages": len(tokens),
            "mean_kl_nats": round(float(per_passage.mean()), 6),
            "interval_95": interval(per_passage),
            "kv_bytes": used.kv_bytes,
            "kv_bytes_bf16": used.kv_bytes_bf16,
            **about,
        }
        print(f"{row['scheme']:12} {row['mean_kl_nats']:.6f} {row['interval_95']}", flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
