"""Write `tests/golden/*.npz`: what the reference makes of a few vectors of every kind.

Usage: python tools/make_goldens.py

One file per head_dim. ``in`` holds the vectors and ``kinds`` names them. For every key
width ``k{bits}`` and value width ``v{bits}``, with and without the guard, there are the
stored planes (``parity.k8.codes``) and, for one head_dim, the decoded vectors
(``guarded.v3.decoded``). ``rotated`` and ``unrotated`` are the transforms of ``in``.
"""

from pathlib import Path

import numpy as np

from kvstow.codec import reference
from kvstow.codec.layout import PackedKeys, PackedValues
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS

FOLDER = Path(__file__).parents[1] / "tests" / "golden"
DECODED_HEAD_DIM = 64  # decoded vectors hardly compress
SEED = 42


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for head_dim in HEAD_DIMS:
        vectors = make_vectors(head_dim)
        arrays = {"in": np.stack(list(vectors.values())), "kinds": np.array(list(vectors))}
        arrays |= encode_all(arrays["in"])
        path = FOLDER / f"codec_d{head_dim}.npz"
        np.savez_compressed(path, **arrays)
        print(f"wrote {path}, {path.stat().st_size} bytes")


def make_vectors(head_dim: int) -> dict[str, np.ndarray]:
    """One vector of every kind that the codec treats in its own way."""
    rng = np.random.default_rng([SEED, head_dim])
    normal = rng.standard_normal((20, head_dim)).astype(np.float32)
    vectors = {
        "normal": normal[0],
        "outlier": np.where(np.arange(head_dim) % 37 == 5, 40, 1) * normal[1],
        "offset": normal[2] / 8 + 10,
        "far_offset": normal[3] / 512 - 300,
        "constant": np.full(head_dim, 0.5),
        "small_constant": np.full(head_dim, -1e-4),
        "zero": np.zeros(head_dim),
        "one_hot": np.eye(head_dim)[head_dim // 3],
        "ties": rng.integers(-8, 9, head_dim) / 8,
        "small": normal[4] * 1e-5,
        "tiny": normal[5] * 1e-8,
        "subnormal": normal[6] * 1e-40,
        "large": normal[7] * 3e4,
        "beyond_float16": normal[8] * 1e8,
        "near_the_limit": normal[9] * 5e37,
        "nan": np.where(np.arange(head_dim) == 40, np.nan, normal[10]),
        "infinite": np.where(np.arange(head_dim) == 7, -np.inf, normal[11]),
    }
    return {kind: vector.astype(np.float32) for kind, vector in vectors.items()}


def encode_all(vectors: np.ndarray) -> dict[str, np.ndarray]:
    """All planes at all widths, by the names that the files use."""
    head_dim = vectors.shape[-1]
    arrays = {"rotated": reference.rotate(vectors), "unrotated": reference.unrotate(vectors)}
    for prefix, guard in (("parity", False), ("guarded", True)):
        for bits in KEY_BITS:
            keys = reference.encode_keys(vectors, bits=bits, guard=guard)
            arrays |= _named(f"{prefix}.k{bits}", keys)
            if head_dim == DECODED_HEAD_DIM:
                arrays[f"{prefix}.k{bits}.decoded"] = reference.decode_keys(keys, bits=bits)
        for bits in VALUE_BITS:
            values = reference.encode_values(vectors, bits=bits, guard=guard)
            arrays |= _named(f"{prefix}.v{bits}", values)
            if head_dim == DECODED_HEAD_DIM:
                decoded = reference.decode_values(values, bits=bits, head_dim=head_dim)
                arrays[f"{prefix}.v{bits}.decoded"] = decoded
    return arrays


def _named(name: str, packed: PackedKeys | PackedValues) -> dict[str, np.ndarray]:
    return {f"{name}.{plane}": array for plane, array in packed._asdict().items()}


if __name__ == "__main__":
    main()
