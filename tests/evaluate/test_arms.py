import pytest

from kvstow.errors import EvaluationError, SchemeError
from kvstow.evaluate.arms import Arm
from kvstow.scheme import Turbo

SPELLINGS = (
    "off",
    "off@bfloat16",
    "affine:4g32",
    "affine:8@layer0",
    "turbo:k8v3",
    "turbo:k8v3+stored",
    "turbo:k8v3@eager",
    "turbo:k4v2+stored@deferred",
    "turbo:k4v3@keys",
    "turbo:k4v3@values",
    "turbo:k8v2@layer17",
    "turbo:k8v2@full",
    "paper:mse3",
    "paper:prod8@keys",
)


@pytest.mark.parametrize("text", SPELLINGS)
def test_an_arm_has_one_spelling(text):
    assert str(Arm.parse(text)) == text
    assert Arm.parse(Arm.parse(text)) == Arm.parse(text)


def test_bare_turbo_is_written_out():
    assert str(Arm.parse("turbo@eager")) == "turbo:k8v3@eager"


@pytest.mark.parametrize(
    "text",
    [
        *("off@eager", "off@layer1", "affine:8@deferred", "affine:4@keys", "turbo@bfloat16"),
        *("turbo@", "turbo@layer", "turbo@layer-1", "turbo@eager@keys", "turbo @eager"),
        *("paper:mse0", "paper:mse9", "paper:prod", "paper:qjl3", "paper:mse3@eager"),
        *("paper:mse3@layer1", "off@layer0", "affine:8@full", "off@full", ""),
    ],
)
def test_what_is_no_arm_is_refused(text):
    with pytest.raises((EvaluationError, SchemeError), match="expected"):
        Arm.parse(text)


def test_full_is_a_policy_that_leaves_sliding_windows_out():
    assert str(Arm.parse("turbo:k8v2@full").policy) == "policy(turbo:k8v2; sliding: off)"
    assert str(Arm.parse("turbo:k8v2").policy) == "turbo:k8v2"


def test_only_the_unquantised_model_in_its_own_dtype_is_the_reference():
    assert [text for text in SPELLINGS if Arm.parse(text).is_reference] == ["off"]


def test_what_has_no_packed_cache_is_simulated():
    simulated = [text for text in SPELLINGS if Arm.parse(text).is_simulated]
    assert simulated == ["turbo:k4v3@keys", "turbo:k4v3@values", "paper:mse3", "paper:prod8@keys"]


@pytest.mark.parametrize("text", ["turbo:k8v3", "turbo:k2v8", "affine:4g32", "off"])
def test_bits_of_a_scheme_are_those_of_the_scheme(text):
    arm = Arm.parse(text)
    assert arm.bits_per_value(128) == arm.scheme.bits_per_value(128)


def test_a_part_counts_the_other_as_16_bits():
    assert Arm.parse("turbo:k8v3@keys").bits_per_value(64) == (9 + 16) / 2
    assert Arm.parse("turbo:k8v3@values").bits_per_value(64) == (16 + 3.5) / 2
    assert Arm.parse("paper:mse3").bits_per_value(64, 3.25) == 3.25
    assert Arm.parse("paper:mse3@keys").bits_per_value(64, 3.25) == (3.25 + 16) / 2
    assert isinstance(Arm.parse("turbo@keys").scheme, Turbo)
