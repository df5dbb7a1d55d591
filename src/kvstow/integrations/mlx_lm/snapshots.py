"""Save the prompt cache of a model in a file, and load it for the same model again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from kvstow.errors import DamagedSnapshot, SnapshotError
from kvstow.integrations.mlx_lm import probe, records
from kvstow.integrations.mlx_lm.attach import attachment, plain_caches
from kvstow.policy import Policy
from kvstow.snapshot import Fingerprint, Manifest, Record, Snapshot, Source, check_scheme, write
from kvstow.snapshot.header import TensorInfo

_PLAIN = (bool, int, float, str)
N_SAMPLES = 64  # of each parameter; a sum over all of it goes into the hash beside them


def save(
    path: Path,
    cache: Sequence[Any],
    tokens: Sequence[int],
    *,
    model: Any,
    tokenizer: Any,
    notes: Mapping[str, str] | None = None,
) -> int:
    """Write `cache` to a file at once or not at all; returns its bytes.

    Args:
        path: Where; a file that is there is replaced.
        cache: The model's, of one sequence.
        tokens: All that were appended to it.
        model: The model that filled the cache, attached as it was then.
        tokenizer: Of the tokens.
        notes: Whatever else shall be remembered.

    Raises:
        SnapshotError: If the cache cannot be saved, or the file not written.
    """
    held = np.asarray(tokens, np.uint32)
    described = [records.describe(c) for c in cache]
    sources = {"tokens": Source("U32", held.shape, lambda: held)}
    for i, (_, arrays) in enumerate(described):
        sources |= records.sources(arrays, f"{i}.")
    layers = tuple(record for record, _ in described)
    return write(path, identity(model, tokenizer).manifest(layers, sources, notes), sources)


def load(snapshot: Snapshot, *, model: Any, tokenizer: Any) -> list[Any]:
    """The cache in a file, for a model that is attached to the scheme it is stored under.

    Args:
        snapshot: The file. Every tensor is verified before anything is returned.
        model: The model that filled the cache.
        tokenizer: Of the model.

    Raises:
        OtherModel: If another model, or other weights, filled it.
        OtherScheme: If the model is attached to another scheme.
        OtherTokenizer: If its tokens are others.
        SnapshotError: If the file is damaged.
    """
    check(snapshot.manifest, model)
    snapshot.manifest.check_tokenizer(vocabulary_id(tokenizer))
    snapshot.manifest.model.check(fingerprint(model))
    return restored(snapshot, make_prompt_cache(model))


def restored(snapshot: Snapshot, fresh: Sequence[Any]) -> list[Any]:
    """The cache in a file, in the place of one that is known to be of the same model.

    Args:
        snapshot: The file. Every tensor is verified before anything is returned.
        fresh: A new prompt cache of the model's.

    Raises:
        OtherScheme: If it is stored under other schemes than `fresh` is.
        SnapshotError: If the file is damaged.
    """
    _check_schemes(snapshot.manifest, fresh)

    def read(name: str) -> mx.array:
        return records.to_mlx(snapshot.read(name), snapshot.tensors[name].dtype)

    pairs = zip(fresh, snapshot.manifest.layers, strict=True)
    return [records.restored(c, record, read, f"{i}.") for i, (c, record) in enumerate(pairs)]


@dataclass(frozen=True, slots=True)
class Identity:
    """What all caches of one attached model have in common.

    Attributes:
        model: Which one it is.
        tokenizer: A hash of the vocabulary.
        policy: What it is attached to.
    """

    model: Fingerprint
    tokenizer: str
    policy: Policy

    def manifest(
        self,
        layers: Sequence[Record],
        sources: Mapping[str, Source],
        notes: Mapping[str, str] | None,
    ) -> Manifest:
        """The manifest of one of them.

        Args:
            layers: Its records.
            sources: Its tensors, the tokens among them.
            notes: Whatever else shall be remembered.

        Raises:
            SnapshotError: If these do not belong together.
        """
        (n_tokens,) = sources["tokens"].shape
        made = Manifest(
            model=self.model,
            tokenizer=self.tokenizer,
            policy=self.policy,
            layers=tuple(layers),
            n_tokens=n_tokens,
            notes=notes or {},
        )
        try:
            made.check({name: TensorInfo(x.dtype, x.shape) for name, x in sources.items()})
        except DamagedSnapshot as error:
            raise SnapshotError(f"this cache cannot be saved: {error}") from error
        return made


def identity(model: Any, tokenizer: Any) -> Identity:
    """Of a model as it is attached now."""
    return Identity(fingerprint(model), vocabulary_id(tokenizer), _policy(model))


def check(manifest: Manifest, model: Any) -> None:
    """Refuse a cache that is not this model's, as far as its shape and schemes tell.

    Args:
        manifest: Of the cache.
        model: The model; it may be a `kvstow.models.skeleton`, and should be attached.

    Raises:
        OtherModel: If the cache belongs to a model of another shape.
        OtherScheme: If it is stored under other schemes than those attached.
    """
    manifest.model.check(_shape(model))
    _check_schemes(manifest, make_prompt_cache(model))


def fingerprint(model: Any) -> Fingerprint:
    """Which model this is; the same with and without a scheme."""
    shape = _shape(model)
    return Fingerprint(shape.architecture, shape.layers, weights_id(model))


def weights_id(model: Any) -> str:
    """A hash of the parameters as they are loaded, their dtypes and any adapter included.

    Of each, the sum of its bits as whole numbers, which is exact in any order, and some
    elements; so all are read once, on the device. With them goes what modules are set to,
    such as the base of their positions, or the scale of an adapter.
    """
    digest = hashlib.sha256(_settings(model).encode())
    parameters: Any = tree_flatten(model.parameters())
    for name, x in sorted(parameters):
        bits = x.reshape(-1).view(_bits(x.dtype))
        parts = [mx.sum(bits), bits[:: max(1, bits.size // N_SAMPLES)]]
        digest.update(f"{name} {x.shape} {x.dtype}\n".encode())
        digest.update(b"".join(np.array(part).tobytes() for part in parts))
    return digest.hexdigest()[:32]


def vocabulary_id(tokenizer: Any) -> str:
    """A hash of the tokens and their numbers."""
    listed = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:32]


def _shape(model: Any) -> Fingerprint:
    caches = plain_caches(model)
    probe.fill(model, caches, (1,))
    shapes = []
    for cache in caches:
        record, arrays = records.describe(cache)
        infos = {k: TensorInfo(records.DTYPES[x.dtype], x.shape) for k, x in arrays.items()}
        shapes.append(record.shape(infos, ""))
    name = getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2]
    return Fingerprint(str(name), tuple(shapes))


def _check_schemes(manifest: Manifest, fresh: Sequence[Any]) -> None:
    for i, (record, cache) in enumerate(zip(manifest.layers, fresh, strict=True)):
        check_scheme(i, record, records.describe(cache)[0])


def _settings(model: Any) -> str:
    """Every number, word and configuration that is an attribute of a module, in one line."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN):
                found[f"{name}.{key}"] = value
            elif is_dataclass(value) and not isinstance(value, type) and not callable(value):
                found[f"{name}.{key}"] = asdict(value)  # a model's ``args``
    # Objects within would be written with their address.
    return json.dumps(found, sort_keys=True, default=lambda x: type(x).__name__)


def _policy(model: Any) -> Policy:
    attached = attachment(model)
    return Policy.of("off" if attached is None else attached.report.scheme)


def _bits(dtype: mx.Dtype) -> mx.Dtype:
    return {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[dtype.size]
