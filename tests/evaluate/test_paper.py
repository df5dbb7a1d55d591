"""The paper's quantisers do what the paper says, and what can be computed exactly."""

import math

import numpy as np
import pytest

from kvstow.errors import SchemeError, UnsupportedModel
from kvstow.evaluate.distortion import Keys, Values, distortion, unit_vectors
from kvstow.evaluate.lloyd_max import codebook
from kvstow.evaluate.paper import (
    TurboQuantMse,
    TurboQuantProd,
    projection,
    quantiser,
    rotation,
)

BOTH = [TurboQuantMse, TurboQuantProd]
# Near enough to the limit; a rotation of the 1536 of the paper takes seconds on a busy machine.
LARGE = 256
# Theorems 1 and 2 of arXiv:2504.19874, for 1 to 4 bits.
PAPER_MSE = (0.36, 0.117, 0.03, 0.009)
PAPER_PRODUCT = (1.57, 0.56, 0.18, 0.047)
# Lloyd-Max of the unit normal, which a coordinate tends to.
NORMAL = (0.36338, 0.117482, 0.034548, 0.009501, 0.002505, 0.000644, 0.000163, 0.0000412)


@pytest.mark.parametrize("bits", range(1, 5))
def test_the_mse_is_that_of_the_paper_to_a_unit_of_its_last_digit(bits):
    measured = distortion(TurboQuantMse(bits, LARGE), n_vectors=1536)
    figure = PAPER_MSE[bits - 1]
    last_digit = 10.0 ** -len(str(figure).partition(".")[2])
    assert measured.mse == pytest.approx(figure, abs=last_digit)
    # 1536 * 256 coordinates: two standard errors are 0.5%.
    assert measured.mse == pytest.approx(TurboQuantMse(bits, LARGE).exact_mse, rel=0.01)


@pytest.mark.parametrize("bits", range(1, 5))
def test_the_product_error_is_the_exact_one_and_the_papers_to_its_rounding(bits):
    measured = distortion(TurboQuantProd(bits, LARGE), n_vectors=1536)
    # Projections of this size differ by 1% (standard deviation).
    assert measured.product == pytest.approx(TurboQuantProd(bits, LARGE).exact_mse, rel=0.03)
    assert measured.product == pytest.approx(PAPER_PRODUCT[bits - 1], rel=0.16)


@pytest.mark.parametrize("bits", range(1, 5))
def test_the_papers_product_figures_are_pi_over_two_times_its_rounded_mse(bits):
    figure = PAPER_PRODUCT[bits - 1]
    product = math.pi / 2 * (1, *PAPER_MSE)[bits - 1]
    last_digit = 10.0 ** -len(str(figure).partition(".")[2])
    assert 0 <= product - figure < last_digit  # cut off, not rounded


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_codebook_tends_to_that_of_the_normal_distribution(bits):
    figure = NORMAL[bits - 1]
    assert codebook(bits, 10**6).mse == pytest.approx(figure, rel=4e-3)  # of three digits
    finite = [codebook(bits, head_dim).mse for head_dim in (64, 128, 256, 1536, 10**6)]
    assert finite == sorted(finite)


@pytest.mark.parametrize("bits", range(1, 9))
def test_in_three_dimensions_the_codebook_is_uniform(bits):
    levels = (2 * np.arange(2**bits) + 1) / 2**bits - 1  # Archimedes: so is a coordinate
    np.testing.assert_allclose(codebook(bits, 3).centroids, levels, atol=1e-7)
    assert codebook(bits, 3).mse == pytest.approx(4.0**-bits)


def test_one_bit_codes_the_mean_length_of_a_coordinate():
    mean = math.gamma(64) / math.gamma(64.5) / math.sqrt(math.pi)
    np.testing.assert_allclose(codebook(1, 128).centroids, [-mean, mean], rtol=1e-6)


def test_the_codebook_is_the_best_for_samples_of_its_density(rng):
    centroids, boundaries, mse = codebook(3, 64)
    samples = unit_vectors(rng, 20_000, 64)

    def error(levels):
        return float(64 * ((samples - levels[np.searchsorted(boundaries, samples)]) ** 2).mean())

    assert error(centroids) == pytest.approx(mse, rel=0.01)
    assert all(error(centroids * stretch) > error(centroids) for stretch in (0.97, 1.03))


@pytest.mark.parametrize("bits", range(1, 5))
def test_mse_shrinks_inner_products_by_its_distortion_and_prod_does_not(bits):
    mse = TurboQuantMse(bits, 128)
    assert distortion(mse).gain == pytest.approx(1 - mse.exact_mse, abs=0.003)
    # Of one projection the gain is off by 1 in 128, or less with a first stage.
    gains = [distortion(TurboQuantProd(bits, 128, seed), 256, seed).gain for seed in range(8)]
    assert np.mean(gains) == pytest.approx(1, abs=3 / 128 / math.sqrt(8))


def test_prod_is_right_on_average_over_projections_for_one_pair_of_vectors(rng):
    x, y = unit_vectors(rng, 2, 64)
    read = [y @ TurboQuantProd(2, 64, seed).reconstruct(x) for seed in range(1000)]
    error = math.sqrt(TurboQuantProd(2, 64).exact_mse / 64 / 1000)
    assert np.mean(read) == pytest.approx(y @ x, abs=3 * error)
    assert np.var(read) * 64 == pytest.approx(TurboQuantProd(2, 64).exact_mse, rel=0.15)


@pytest.mark.parametrize("kind", BOTH)
def test_a_vector_of_one_element_costs_what_a_random_one_does(kind):
    outlier = np.eye(64, dtype=np.float32)[:1]
    errors = [outlier - kind(3, 64, seed).reconstruct(outlier) for seed in range(40)]
    mean = (np.stack(errors) ** 2).sum(axis=-1).mean()
    # Vectors of 64 differ by 16% in their error: three standard errors of 40 are 8%.
    assert mean == pytest.approx(kind(3, 64).exact_mse, rel=0.08)


@pytest.mark.parametrize("head_dim", [2, 3, 64, 256])
def test_the_rotation_is_orthogonal(head_dim):
    matrix = rotation(head_dim, 5).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)


def test_matrices_are_independent_of_data_of_the_same_seed():
    data = np.random.default_rng(3).standard_normal((64, 64))
    data /= np.linalg.norm(data, axis=-1, keepdims=True)
    for matrix in (rotation(64, 3), projection(64, 3) / 8):
        # A cosine of any two rows is within 5 / sqrt(64) of zero.
        assert np.abs(matrix @ data.T).max() < 5 / 8
        assert np.abs(matrix.T @ data.T).max() < 5 / 8


def test_rotations_are_uniform():
    # A fixed sign of the diagonal of R alone leaves a mean that is not zero.
    traces = [np.trace(rotation(8, seed)) for seed in range(600)]
    assert np.mean(traces) == pytest.approx(0, abs=3 / math.sqrt(600))
    assert np.var(traces) == pytest.approx(1, rel=0.2)


@pytest.mark.parametrize("kind", BOTH)
def test_a_vectors_length_only_scales_what_is_read_back(kind, rng):
    x = unit_vectors(rng, 6, 64).reshape(2, 3, 64)
    rebuilt = kind(3, 64).reconstruct(x)
    assert rebuilt.shape == x.shape
    assert rebuilt.dtype == np.float32
    scales = np.array([1e-2, 1.0, 300.0], np.float32)[:, None]
    # Each of at most two norms is rounded to float16, by up to 2**-11 of itself.
    away = kind(3, 64).reconstruct(x * scales) / scales - rebuilt
    assert np.linalg.norm(away, axis=-1).max() < 2 * 2.0**-10


@pytest.mark.parametrize("kind", BOTH)
def test_a_zero_vector_is_read_back_as_zero_and_a_huge_one_stays_finite(kind):
    assert not kind(2, 64).reconstruct(np.zeros((3, 64))).any()
    huge = kind(2, 64).reconstruct(np.full(64, 1e6, np.float32))
    assert np.isfinite(huge).all()


@pytest.mark.parametrize("kind", BOTH)
def test_a_seed_decides_everything(kind, rng):
    x = unit_vectors(rng, 3, 64)
    first = kind(2, 64, seed=1).reconstruct(x)
    rotation.cache_clear()
    projection.cache_clear()
    np.testing.assert_array_equal(kind(2, 64, seed=1).reconstruct(x), first)
    assert not np.array_equal(kind(2, 64, seed=2).reconstruct(x), first)


@pytest.mark.parametrize("kind", BOTH)
def test_every_norm_is_counted(kind):
    assert TurboQuantMse(3, 128).bits_per_value == 3.125
    assert TurboQuantProd(3, 128).bits_per_value == 3.25
    assert kind(1, 128).bits_per_value == 1.125  # one bit of prod has no first stage


@pytest.mark.parametrize("kind", BOTH)
def test_what_cannot_be_coded_is_refused(kind):
    with pytest.raises(SchemeError, match="bits must be one of 1 to 8, got 0"):
        kind(0, 64)
    with pytest.raises(SchemeError, match="got 9"):
        kind(9, 64)
    with pytest.raises(SchemeError, match="head_dim must be at least 2, got 1"):
        kind(2, 1)
    for shape in [(64, 63), (65,), ()]:
        with pytest.raises(UnsupportedModel, match="last axis must have 64 elements"):
            kind(2, 64).reconstruct(np.zeros(shape, np.float32))


def test_a_quantiser_has_a_name():
    assert quantiser("mse3", 128) == TurboQuantMse(3, 128)
    assert quantiser("prod1", 64) == TurboQuantProd(1, 64)
    for name in ["mse", "mse9", "prod0", "qjl1", "mse10", ""]:
        with pytest.raises(SchemeError, match=r"expected mse<1\.\.8> or prod<1\.\.8>"):
            quantiser(name, 64)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_in_groups_are_a_little_closer_than_one_norm_for_all(bits):
    ours, paper = distortion(Values(bits, 128)), distortion(TurboQuantMse(bits, 128))
    assert 0.9 < ours.mse / paper.mse < 0.98
    assert Values(bits, 128).bits_per_value == bits + 0.5


def test_eight_bit_keys_are_unbiased():
    measured = distortion(Keys(8, 128))
    assert measured.gain == pytest.approx(1, abs=1e-4)
    assert measured.mse < 3e-5
    assert Keys(8, 128).bits_per_value == 9


def test_for_random_queries_the_product_error_is_the_mse():
    measured = distortion(TurboQuantMse(2, 128))
    assert measured.product == pytest.approx(measured.mse, rel=0.01)
