"""Snapshots of made-up caches, in numpy alone."""

import numpy as np

from kvstow import Policy, Scheme
from kvstow.codec import reference as codec
from kvstow.scheme import Turbo
from kvstow.snapshot import Fingerprint, Manifest, Record, Source, header, write
from kvstow.snapshot.header import TensorInfo

NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
WINDOW, KEEP, HEADS = 32, 2, 2


def record(kind, stage, scheme, n_tokens, dtype="F32"):
    """What a cache of these would be."""
    scheme = Scheme.parse(scheme)
    held = 0 if stage == "empty" else n_tokens
    numbers = {"offset": held}
    if kind == "sliding":
        numbers |= {"keep": KEEP, "max_size": WINDOW, "index": min(held, WINDOW)}
    return Record(kind, numbers, scheme, stage, dtype if isinstance(scheme, Turbo) else "")


def arrays(made, rng, head_dim=64, dtype="F32"):
    """Random tensors for a record: name to dtype and array."""
    n_tokens = min(made.numbers["offset"], made.numbers.get("max_size", 1 << 30))
    x = rng.standard_normal((2, 1, HEADS, n_tokens, head_dim)).astype(np.float32)
    if made.stage == "empty":
        return {}
    if made.stage == "packed":
        keys = codec.encode_keys(x[0], bits=made.scheme.key_bits, guard=True)
        values = codec.encode_values(x[1], bits=made.scheme.value_bits, guard=True)
        dtypes = ("I8" if made.scheme.key_bits == 8 else "U8", "F16", "F16", "U8", "F16")
        found = zip(made.tensor_names(), dtypes, (*keys, *values), strict=True)
        return {name: (kind, plane) for name, kind, plane in found}
    if dtype == "BF16":
        x = (x.view(np.uint32) >> 16).astype(np.uint16)
    return {
        name: (dtype, part.astype(NUMPY[dtype]))
        for name, part in zip(made.tensor_names(), x, strict=True)
    }


def recurrent(rng):
    """A cache of three arrays of which one is None."""
    made = Record("arrays", {"size": 3})
    state = rng.standard_normal((1, 4, 8)).astype(np.float32)
    return made, {"0": ("F32", state), "2": ("F16", state.astype(np.float16))}


def snapshot(path, layers, n_tokens, **more):
    """Write `layers`, pairs of a record and its arrays, to `path`; returns what was written."""
    held = {"tokens": ("U32", np.arange(n_tokens, dtype=np.uint32))}
    for i, (_, own) in enumerate(layers):
        held |= {f"{i}.{name}": x for name, x in own.items()}
    infos = {name: TensorInfo(dtype, x.shape) for name, (dtype, x) in held.items()}
    shapes = tuple(made.shape(infos, f"{i}.") for i, (made, _) in enumerate(layers))
    said = {"tokenizer": "t" * 32, "policy": Policy.of("turbo"), "n_tokens": n_tokens} | more
    records = tuple(made for made, _ in layers)
    manifest = Manifest(Fingerprint("made", shapes, "w" * 32), layers=records, **said)
    sources = {name: Source(dtype, x.shape, lambda x=x: x) for name, (dtype, x) in held.items()}
    write(path, manifest, sources)
    return held


def mixed(path, rng, n_tokens=40, **more):
    """A snapshot of one layer of each kind."""
    made = [
        record("full", "packed", "turbo:k8v3", n_tokens),
        record("full", "packed", "turbo:k4v2+search", n_tokens, "BF16"),
        record("full", "exact", "turbo:k8v3+start100", n_tokens, "F16"),
        record("sliding", "packed", "turbo:k5v5", n_tokens),
        record("sliding", "exact", "off", n_tokens),
        record("full", "empty", "off", n_tokens),
    ]
    dtypes = ("F32", "F32", "F16", "F32", "BF16", "F32")
    layers = [(x, arrays(x, rng, dtype=d)) for x, d in zip(made, dtypes, strict=True)]
    inner, own = recurrent(rng)
    full, of_full = layers[0]
    both = {**{f"0.{k}": x for k, x in own.items()}, **{f"1.{k}": x for k, x in of_full.items()}}
    layers += [(inner, own), (Record("list", members=(inner, full)), both)]
    return snapshot(path, layers, n_tokens, **more)


def signed(raw):
    """`raw` with a checksum of its header that fits."""
    at = header.FIXED_BYTES - len('","checksums":"') - 16
    n_header = int.from_bytes(raw[:8], "little") + 8
    raw = raw[:at] + b"0" * 16 + raw[at + 16 :]
    return raw[:at] + header._checksum(raw[:n_header]).encode() + raw[at + 16 :]
