import jaxtyping
import numpy as np
import pytest

from kvstow.codec import reference


def test_shapes_and_dtypes_are_checked_here(request):
    """Elsewhere they are not: see SHAPES_ARE_CHECKED in tests/conftest.py."""
    if not request.config.getoption("--jaxtyping-packages"):
        pytest.skip("needs --jaxtyping-packages, as scripts/check has it")
    with pytest.raises(jaxtyping.TypeCheckError):
        reference.encode_keys(np.zeros((2, 32), np.int32), bits=8)
