"""What is known of an arm before it runs is what running it would say."""

import numpy as np
import pytest

from kvstow.errors import EvaluationError
from kvstow.evaluate.arms import Arm
from kvstow.evaluate.haystack import Haystack
from kvstow.evaluate.texts import Passages, Text

pytestmark = pytest.mark.mlx
pytest.importorskip("mlx.core")
tiny = pytest.importorskip("tests.integration.tiny")
unfit = pytest.importorskip("kvstow.cli.eval.unfit")
kl = pytest.importorskip("kvstow.evaluate.kl")
perplexity = pytest.importorskip("kvstow.evaluate.perplexity")
needle = pytest.importorskip("kvstow.evaluate.needle")

CONFIG = tiny.COMMON | {"model_type": "llama"}
TEXTS = [Text("made", "x", " ".join(f"Sentence {i} says little." for i in range(60)))]


class Letters:
    """One token a letter."""

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + [ord(letter) % tiny.VOCAB for letter in text]

    def decode(self, _):
        return ""


def reference_of(measure, window):
    model = tiny.build("llama")
    if measure is needle:
        prompts = window.prompts(Haystack(Letters(), TEXTS))
        return needle.Reference(model, Letters(), prompts, window)
    return measure.Reference(model, Passages(np.array(tiny.tokens(40, b=2)), ("a", "b")), window)


@pytest.mark.parametrize(
    ("measure", "window"),
    [
        (kl, kl.Window(30, 5)),
        (kl, kl.Window(30, 5, "append")),
        (perplexity, perplexity.Window(40, 8)),
        (perplexity, perplexity.Window(40, 1)),
        (needle, needle.Window((180, 200), (0.5,), 1, chunk_tokens=64)),
        (needle, needle.Window((180,), (0.5,), 1, prefix_hit=True, chunk_tokens=500)),
    ],
)
def test_an_arm_that_starts_later_than_anything_attends_is_known_to_quantise_nothing(
    monkeypatch, measure, window
):
    monkeypatch.setattr(needle, "_found", lambda *_: True)
    reference = reference_of(measure, window)
    last, later = (Arm.parse(f"turbo:k4v2+start{window.n_attended + more}") for more in (0, 1))
    assert list(unfit.unfit_for_window([last, later], window.n_attended)) == [str(later)]
    reference.score(last)
    with pytest.raises(EvaluationError, match="this arm quantised nothing"):
        reference.score(later)


def test_a_simulated_arm_quantises_from_the_first_token():
    arm = Arm.parse("turbo:k8v3+start500@keys")
    assert unfit.unfit_for_window([arm], 10) == {}
    reference_of(kl, kl.Window(30, 5)).score(arm)


def test_a_policy_quantises_from_where_its_first_layer_does():
    late, early = "turbo:k8v3+start500", "turbo:k8v3+start9"
    arms = [Arm.parse(f"policy({late}; 0: {other})") for other in (late, "off", early, "affine:8")]
    assert list(unfit.unfit_for_window(arms, 10)) == list(map(str, arms[:2]))


def test_a_policy_about_layers_that_the_model_lacks_is_known_from_its_config():
    arm = Arm.parse("policy(turbo:k8v3; 9: turbo:k8v8)")
    (reason,) = unfit.unfit_for_model(CONFIG, [arm], "float32").values()
    assert "names layers 9" in reason


def test_arms_that_a_model_cannot_take_are_known_from_its_config():
    arms = [
        "off",
        "affine:8",
        "turbo:k8v3@layer1",
        "turbo:k8v3@layer2",
        "paper:mse3",
        "off@float16",
    ]
    known = unfit.unfit_for_model(CONFIG | {"head_dim": 64}, list(map(Arm.parse, arms)), "float32")
    assert list(known) == ["turbo:k8v3@layer2"]
    odd = unfit.unfit_for_model(CONFIG | {"head_dim": 80}, list(map(Arm.parse, arms)), "float32")
    assert set(arms) - set(odd) <= {"off", "off@float16", "affine:8"}
    assert "head_dim" in odd["paper:mse3"]


def test_the_dtype_of_the_model_is_no_noise_floor():
    arms = list(map(Arm.parse, ("off", "off@bfloat16", "off@float16")))
    assert list(unfit.unfit_for_model(CONFIG, arms, "bfloat16")) == ["off@bfloat16"]


def test_arms_of_one_reason_share_a_line(capsys):
    unfit.say_unmeasured("ppl", {"off": "so", "affine:8": "so", "affine:4": "else"})
    unfit.say_unmeasured("profile", {"": "so"})
    unfit.say_unmeasured("", {"off": "so"})
    assert capsys.readouterr().err.splitlines() == [
        "ppl off, affine:8: not measured: so",
        "ppl affine:4: not measured: else",
        "profile: not measured: so",
        "off: not measured: so",
    ]
