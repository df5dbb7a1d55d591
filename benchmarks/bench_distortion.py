"""Distortion of the TurboQuant paper's quantisers and of kvstow's formats, and its figure.

    python benchmarks/bench_distortion.py --output benchmarks/results/distortion.jsonl \
        --figure docs/figures/distortion.svg

Method: `kvstow.evaluate.distortion`, on random unit vectors; numpy alone. One JSON row
per quantiser and dimension: means over the seeds, each of which makes its own vectors
and matrices, the standard deviation over them, and what the paper prints beside it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kvstow
from kvstow.codec.search import SEARCHED_KEY_BITS
from kvstow.evaluate.distortion import Distortion, Keys, Quantiser, Values, distortion
from kvstow.evaluate.environment import environment
from kvstow.evaluate.paper import BITS, TurboQuantMse, TurboQuantProd
from kvstow.scheme import KEY_BITS, VALUE_BITS

N_VECTORS = 1024
N_SEEDS = 8
PAPER_DIM = 1536  # of the vectors in the paper's experiments
HEAD_DIM = 128
# Theorems 1 and 2 of arXiv:2504.19874, for 1 to 4 bits: D_mse, and D_prod times the dimension.
PAPER_MSE = {1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009}
PAPER_PRODUCT = {1: 1.57, 2: 0.56, 3: 0.18, 4: 0.047}
# Of Okabe and Ito, distinct to every kind of colour vision.
BLACK, ORANGE, BLUE, GREEN, PURPLE = "black", "#E69F00", "#0072B2", "#009E73", "#CC79A7"
VERMILION = "#D55E00"
STYLES = {
    "paper:mse": ("TurboQuant mse", "o", BLACK),
    "paper:prod": ("TurboQuant prod", "^", PURPLE),
    "values": ("kvstow values", "s", BLUE),
    "values+search": ("kvstow values, scale searched", "D", GREEN),
    "keys": ("kvstow keys", "v", ORANGE),
}


def rows_of(name: str, bits: int, per_seed: list[Quantiser]) -> dict[str, Any]:
    """A row for one quantiser, of which `per_seed` differ in their matrices."""
    results = [distortion(one, N_VECTORS, seed) for seed, one in enumerate(per_seed)]
    mean, deviation = np.mean(results, axis=0), np.std(results, axis=0, ddof=1)
    row = {"bench": "distortion", "quantiser": name, "bits": bits}
    row |= {"head_dim": per_seed[0].head_dim, "bits_per_value": per_seed[0].bits_per_value}
    for field, value, spread in zip(Distortion._fields, mean, deviation, strict=True):
        row |= {field: significant(value), f"{field}_sd": significant(spread)}
    exact = getattr(per_seed[0], "exact_mse", None)  # of the paper's; also its product error
    row |= {"exact": exact and significant(exact)}
    row |= {"paper_mse": PAPER_MSE.get(bits) if name == "paper:mse" else None}
    row |= {"paper_product": PAPER_PRODUCT.get(bits) if name == "paper:prod" else None}
    return row | {"n_vectors": N_VECTORS, "n_seeds": len(per_seed)}


def measure() -> list[dict[str, Any]]:
    rows = []
    for head_dim in (PAPER_DIM, HEAD_DIM):
        for bits in PAPER_MSE if head_dim == PAPER_DIM else BITS:
            mse = [TurboQuantMse(bits, head_dim, seed) for seed in range(N_SEEDS)]
            prod = [TurboQuantProd(bits, head_dim, seed) for seed in range(N_SEEDS)]
            rows += [rows_of("paper:mse", bits, [*mse]), rows_of("paper:prod", bits, [*prod])]
    for bits in VALUE_BITS:
        rows.append(rows_of("values", bits, [Values(bits, HEAD_DIM)] * N_SEEDS))
        searched = Values(bits, HEAD_DIM, search=True)
        rows.append(rows_of("values+search", bits, [searched] * N_SEEDS))
    for bits in KEY_BITS:
        rows.append(rows_of("keys", bits, [Keys(bits, HEAD_DIM)] * N_SEEDS))
    searched_keys = Keys(SEARCHED_KEY_BITS, HEAD_DIM, search=True)
    rows.append(rows_of("keys+search", SEARCHED_KEY_BITS, [searched_keys] * N_SEEDS))
    return rows


def significant(x: float) -> float:
    return float(f"{x:.4g}")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415 - an extra that only the figure needs

    # The same rows make the same bytes.
    plt.rcParams.update({"svg.hashsalt": "kvstow", "svg.fonttype": "none", "font.size": 9})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    bits = np.linspace(1, 9, 2)
    for axes, field, paper in ((left, "mse", PAPER_MSE), (right, "product", PAPER_PRODUCT)):
        axes.semilogy(bits, 4.0**-bits, ":", color="grey", label="no code can be below")
        hidden = {"paper:prod"} if field == "mse" else {"values", "values+search"}
        for name, (label, marker, colour) in STYLES.items():
            if name in hidden:
                continue
            drawn = [r for r in rows if r["quantiser"] == name and r["head_dim"] == HEAD_DIM]
            x, y = [r["bits_per_value"] for r in drawn], [r[field] for r in drawn]
            axes.semilogy(x, y, marker=marker, color=colour, label=label, markersize=5, lw=1)
        printed = {"label": "the paper's figures, norms not counted"}
        axes.semilogy(
            paper.keys(), paper.values(), "o", ms=10, mfc="none", mec=VERMILION, **printed
        )
        axes.set(xlabel="bits per value, all metadata counted", xticks=range(1, 10))
        axes.grid(alpha=0.3)
    left.set(title="squared error of a unit vector", ylabel="mean over random unit vectors")
    right.set(title=f"squared error of an inner product, times {HEAD_DIM}")
    for axes in (left, right):
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="JSONL, written anew")
    parser.add_argument("--figure", type=Path, help="SVG; needs matplotlib")
    options = parser.parse_args()
    about = environment(" ".join(["python", *sys.argv]), kvstow.use_fast_blas())
    rows = [row | about for row in measure()]
    for row in rows:
        name = f"{row['quantiser']} {row['bits']} d{row['head_dim']}"
        print(f"{name:24}", *(f"{row[key]!s:10}" for key in (*Distortion._fields, "exact")))
    if options.output is not None:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if options.figure is not None:
        draw(rows, options.figure)


if __name__ == "__main__":
    main()
