"""An arm on a model: the caches that it makes, and what is really quantised.

Every measurement goes through `running`, so all of them refuse the same mistakes and
report layers, bits and bytes in the same words.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from kvstow.capacity import LayerShape
from kvstow.errors import EvaluationError, KvstowWarning
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.simulated import codec_of, simulated
from kvstow.integrations import AttachReport, attached, usage
from kvstow.integrations.mlx_lm import convert, probe
from kvstow.integrations.mlx_lm.attach import plain_caches
from kvstow.policy import Policy


@dataclass(frozen=True, slots=True)
class Running:
    """An arm while it is attached to a model.

    Attributes:
        model: The model.
        arm: The arm.
        report: What `attach` said.
        quantised: Indices of the caches that are quantised.
        layers: Shape of each of them.
    """

    model: Any
    arm: Arm
    report: AttachReport
    quantised: tuple[int, ...]
    layers: tuple[LayerShape, ...]

    @property
    def converts(self) -> bool:
        """Whether the arm can take over a plain cache; if not, it needs the tokens themselves."""
        schemes = Policy.of(self.arm.scheme).schemes
        return self.arm.dtype is None and not any(getattr(s, "stored", False) for s in schemes)

    def new(self) -> list[Any]:
        """An empty prompt cache."""
        caches: list[Any] = make_prompt_cache(self.model)
        return self._arm_caches(caches, [None] * len(caches))

    def take_over(self, plain: list[Any]) -> list[Any]:
        """The tokens of a plain prompt cache, stored; `plain` stays as it is."""
        plain = copy.deepcopy(plain)
        return self._arm_caches(convert(self.model, list(plain)), plain)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per element of the quantised layers, all metadata included."""
        if not self.layers:
            return 16.0  # what every ratio is taken against, whatever the activations are
        weights = [shape.n_kv_heads * (shape.key_dim + shape.value_dim) for shape in self.layers]
        bits = [self._bits(*layer) for layer in zip(self.quantised, self.layers, strict=True)]
        return float(np.average(bits, weights=weights))

    def about(self, caches: list[Any]) -> dict[str, Any]:
        """What a row of results says of its arm; `caches` are those it was measured with."""
        used = usage(caches)
        simulated = self.arm.is_simulated
        kept = self.report.as_dict()["reasons"] if self.report.n_quantised else {}
        return {
            "arm": str(self.arm),
            "fetch": "simulated" if simulated else self.report.fetch,
            "layers": [len(self.quantised), len(self.report.layers)],
            "kept": kept,
            "head_dims": sorted({shape.key_dim for shape in self.layers}),
            "bits_per_value": round(self.bits_per_value, 4),
            "kv_bytes": None if simulated else used.kv_bytes,
            "kv_bytes_bf16": None if simulated else used.kv_bytes_bf16,
            "nonfinite_groups": used.nonfinite_groups,
        }

    def _bits(self, index: int, shape: LayerShape) -> float:
        if self.arm.is_simulated:
            return codec_of(self.arm, shape.key_dim)[1]
        return self.report.layers[index].scheme.bits_per_value(shape.key_dim)

    def _arm_caches(self, stored: list[Any], plain: list[Any]) -> list[Any]:
        """`stored`, with what is not of this arm taken out of it."""
        if self.arm.is_simulated:
            for i, shape in zip(self.quantised, self.layers, strict=True):
                rounding, _ = codec_of(self.arm, shape.key_dim)
                stored[i] = simulated(rounding, shape.window, plain[i])
        elif self.arm.layer is not None:
            with attached(self.model, "off"):
                fresh = make_prompt_cache(self.model)
            for i in range(len(stored)):
                if i != self.arm.layer:
                    stored[i] = fresh[i] if plain[i] is None else plain[i]
        return stored


@contextmanager
def running(model: Any, arm: Arm) -> Iterator[Running]:
    """Attach `arm` to `model` for the length of the block.

    Raises:
        UnsupportedModel: As `kvstow.attach`.
        EvaluationError: If the arm names a layer that the model does not have, or mlx cannot run
            the arm here: it lacks a kernel, or memory.
    """
    unwarned = warnings.catch_warnings(action="ignore", category=KvstowWarning)  # we measure it
    with unwarned, attached(model, arm.policy, fetch=arm.fetch) as report, _cast(model, arm.dtype):
        quantised = tuple(layer.index for layer in report.layers if layer.quantised)
        shapes = probe.attention_layers(model, plain_caches(model)) if quantised else {}
        if arm.layer is not None:
            if arm.layer not in quantised:
                raise EvaluationError(
                    f"{arm}: cache {arm.layer} of this model cannot be quantised; "
                    f"those that can are {list(quantised)}"
                )
            quantised = (arm.layer,)
        with _refusals_of_mlx(arm):
            yield Running(model, arm, report, quantised, tuple(shapes[i] for i in quantised))


def feed(model: Any, caches: list[Any], tokens: np.ndarray) -> mx.array:
    """Append ``(n, s)`` tokens at once; returns float32 logits ``(n, s, vocab)``."""
    logits: mx.array = model(mx.array(tokens), cache=caches)
    return logits.astype(mx.float32)


def settle(caches: list[Any]) -> None:
    """Compute what the caches hold, and let go of what led to it."""
    mx.eval([c.state for c in caches])
    mx.clear_cache()


def check_control(arm: Arm, difference_nats: np.ndarray) -> None:
    """Refuse an arm whose output shows that nothing was measured.

    Args:
        arm: What ran.
        difference_nats: From the reference, of every scored token.

    Raises:
        EvaluationError: If the reference run again differs, or another arm does not.
    """
    worst = float(np.abs(difference_nats).max())
    if arm.is_reference and worst:
        raise EvaluationError(
            f"the reference run twice differs from itself by {worst:.2e} nats, so no "
            "smaller difference means anything: is something else attached to this model?"
        )
    if not arm.is_reference and not worst:
        raise EvaluationError(f"{arm}: this arm quantised nothing: its output is the reference's")


@contextmanager
def _refusals_of_mlx(arm: Arm) -> Iterator[None]:
    """Name the arm where mlx raises, which has no exceptions of its own.

    Raises:
        EvaluationError: In the place of a plain RuntimeError.
        RuntimeError: A subclass of it, as it is: that is a mistake in Python code.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise EvaluationError(f"{arm}: mlx cannot run this here: {reason}") from error


@contextmanager
def _cast(model: Any, dtype: str | None) -> Iterator[None]:
    """The model in `dtype`; its weights come back after the block."""
    if dtype is None:
        yield
        return
    before: Any = tree_flatten(model.parameters())
    model.set_dtype(getattr(mx, dtype))
    try:
        yield
    finally:
        model.update(tree_unflatten(before))
