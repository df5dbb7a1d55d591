"""Write `src/kvstow/codec/tables.py` from `tools/tables.npz`.

Usage: python tools/make_tables.py
"""

import textwrap
from pathlib import Path

import numpy as np

HEAD_DIMS = (64, 128, 256, 512)
BITS = (2, 3, 4, 5, 8)
ARCHIVE = Path(__file__).with_name("tables.npz")
MODULE = Path(__file__).parents[1] / "src" / "kvstow" / "codec" / "tables.py"

HEADER = '''\
"""Constants of the format: sign vectors, centroids and boundaries.

Written by ``tools/make_tables.py``; do not edit. The Lloyd-Max tables came from
iterating on normal samples, which ends elsewhere on another machine. So they are
data, never recomputed, and every file names the set it was written with.
"""

import numpy as np

TABLE_SET = "lloyd-max-v1"

# Bit i, counted from the lowest of the first byte, is set where element i changes sign.
_SIGN_BITS = {
'''

FOOTER = """

def _signs(bits: str) -> np.ndarray:
    flipped = np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), bitorder="little")
    return 1 - 2 * flipped.astype(np.float32)


def _floats(text: str) -> np.ndarray:
    return np.array([float(word) for word in text.split()], np.float32)


SIGNS = {head_dim: _signs(bits) for head_dim, bits in _SIGN_BITS.items()}
CENTROIDS = {bits: _floats(text) for bits, text in _CENTROIDS.items()}
BOUNDARIES = {bits: _floats(text) for bits, text in _BOUNDARIES.items()}
"""


def main() -> None:
    MODULE.write_text(format_tables(ARCHIVE), encoding="utf-8")
    print(f"wrote {MODULE}")


def format_tables(archive: Path) -> str:
    """The text of the module for the tables in `archive`."""
    with np.load(archive) as tables:
        text = HEADER
        for head_dim in HEAD_DIMS:
            text += _wrapped(f"{head_dim}", _sign_bits(tables[f"sign_{head_dim}"]))
        for name in ("centroids", "boundaries"):
            text += f"}}\n\n_{name.upper()} = {{\n"
            for bits in BITS:
                text += _floats(bits, tables[f"{name}_{bits}"])
        return text + "}\n" + FOOTER


def _sign_bits(signs: np.ndarray) -> str:
    return np.packbits(signs < 0, bitorder="little").tobytes().hex()


def _wrapped(key: str, digits: str) -> str:
    lines = textwrap.wrap(digits, 64)
    if len(lines) == 1:
        return f'    {key}: "{digits}",\n'
    quoted = "".join(f'        "{line}"\n' for line in lines)
    return f"    {key}: (\n{quoted}    ),\n"


def _floats(bits: int, values: np.ndarray) -> str:
    # The shortest decimal that is this float32 and no other.
    words = " ".join(map(str, values))
    lines = textwrap.fill(words, 92, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return f'    {bits}: """\n{lines}\n    """,\n'


if __name__ == "__main__":
    main()
