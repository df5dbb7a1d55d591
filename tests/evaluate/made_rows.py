"""Rows of results as they are measured, with figures that are made up."""

import numpy as np

from kvstow.evaluate.arms import Arm

WINDOW = {"prefix_tokens": 127, "steps": 32, "build": "convert"}
RUN = {
    "started": "2026-01-01T00:00:00+00:00",
    "command": "kvstow eval kl",
    "commit": "abc1234567",
    "machine": "A machine (Linux x86_64)",
}
DISTORTION = {2: 0.117482, 3: 0.034548, 4: 0.009501, 5: 0.002505, 8: 0.0000412}


def texts(model, n=4):
    return {"n_texts": n, "sources": {"python": n}, "sha256": f"tokens of {model}"}


def kl_row(arm="turbo:k8v3", kl=0.02, *, model="tiny", per_text=None, **more):
    per_text = np.array([0.8, 1.2, 0.9, 1.1]) * kl if per_text is None else np.array(per_text)
    mean = float(per_text.mean())
    parsed = Arm.parse(arm)
    bits = parsed.bits_per_value(64, 3.25 if parsed.paper else None)
    return {
        "measure": "kl",
        "model": model,
        "arm": arm,
        "dtype": "float32",
        "window": WINDOW,
        "texts": texts(model, len(per_text)),
        "fetch": "eager",
        "layers": [2, 3],
        "kept": {"a sliding window": [1]},
        "bits_per_value": bits,
        "kv_bytes": None if parsed.is_simulated else 12_345,
        "kv_bytes_bf16": None if parsed.is_simulated else 45_678,
        "mean_kl_nats": mean,
        "interval_95": [mean * 0.9, mean * 1.1],
        "median_kl_nats": mean * 0.7,
        "p999_kl_nats": mean * 9,
        "per_text_kl_nats": per_text.tolist(),
        "top1_agreement": 0.953,
        "change_of_log_ppl": -0.0123,
        "reference_ppl": 21.75,
        **RUN,
        **more,
    }


def bits_rows(*bits, model="tiny", c=0.7, floor=0.0, keys=8):
    """KL in proportion to the squared error of the best code."""
    kl = {b: floor + c * DISTORTION[b] for b in bits}
    return [kl_row(f"turbo:k{keys}v{b}", kl[b], model=model) for b in bits]


def layer_rows(model="tiny", scheme="turbo:k8v3", layers=(0, 1, 3)):
    return [kl_row(f"{scheme}@layer{i}", 0.001 * (i + 1), model=model) for i in layers]


def ppl_row(arm="turbo:k8v3", **more):
    return kl_row(arm) | {
        "measure": "ppl",
        "window": {"n_tokens": 512, "chunk_tokens": 64},
        "ppl": 22.125,
        "ppl_off": 21.5,
        "mean_change_nats": 0.02866,
        "per_text_change_nats": [0.02, 0.03],
        **more,
    }


def needle_row(arm="turbo:k8v3", *, model="tiny", found=3, found_off=4, **more):
    cells = [
        {"length": length, "depth": depth, "n": 4, "found": found, "found_off": found_off}
        for length in (512, 1024)
        for depth in (0.0, 0.5, 1.0)
    ]
    return {
        "measure": "needle",
        "model": model,
        "arm": arm,
        "dtype": "float32",
        "window": {"lengths": [512, 1024], "depths": [0.0, 0.5, 1.0], "prefix_hit": False},
        "texts": texts(model),
        "cells": cells,
        "score": found / 4,
        "score_off": found_off / 4,
        "relative": found / found_off if found_off else 0.0,
        **RUN,
        **more,
    }


def profile_row(**more):
    layer = {"key_norm": 12.345, "value_norm": 1.5, "ratio": 8.23, "outlier_channels": 2}
    ranges = {"key_group_range": 5.5, "value_group_range": 1.25}
    return {
        "measure": "profile",
        "model": "tiny",
        "dtype": "float32",
        "window": {"n_tokens": 128},
        "texts": texts("tiny"),
        "hardness": 3.21,
        "hard_keys": True,
        "threshold": 2.5,
        "layers_profile": [{"index": i, **layer, **ranges} for i in range(3)],
        **RUN,
        **more,
    }
