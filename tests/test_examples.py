import subprocess
import sys
from pathlib import Path

import pytest

import kvstow

EXAMPLES = sorted((Path(kvstow.__file__).parents[2] / "examples").glob("*.py"))
NEED_NO_MODEL = {"how_long_a_context.py"}


def run(path):
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_can_be_read_in_a_minute(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize("name", sorted(NEED_NO_MODEL))
def test_an_example_without_a_model_runs(name):
    (path,) = (path for path in EXAMPLES if path.name == name)
    assert "turbo:k8v3" in run(path)


@pytest.mark.model
@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if p.name not in NEED_NO_MODEL], ids=lambda path: path.name
)
def test_an_example_runs_on_the_demo_model(path, smollm2):  # noqa: ARG001 (skips without weights)
    assert "turbo:k8v3" in run(path)
