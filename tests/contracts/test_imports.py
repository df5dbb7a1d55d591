import subprocess
import sys

import pytest

FRAMEWORKS = {"mlx", "mlx_lm", "torch", "transformers", "triton", "gguf"}
TERMINAL = {"click", "rich"}


def modules_after(code):
    """Top-level modules that a fresh interpreter holds after running `code`."""
    code = f"import sys; {code}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(out.stdout.split())


def test_import_kvstow_loads_no_framework_and_no_terminal_library():
    assert not modules_after("import kvstow") & (FRAMEWORKS | TERMINAL)


@pytest.mark.parametrize("module", ["scheme", "codec", "codec.reference", "capacity", "snapshot"])
def test_the_definition_runs_on_numpy_alone(module):
    assert not modules_after(f"import kvstow.{module}") & (FRAMEWORKS | TERMINAL)


def test_the_command_line_loads_no_framework_before_a_command_runs():
    assert not modules_after("import kvstow.cli, kvstow.cli.fit") & FRAMEWORKS
