import os

import pytest


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Where programs are compiled that tests run on the CPU; one for all processes of xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    folder.mkdir(exist_ok=True)
    return folder
