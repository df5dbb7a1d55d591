import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from kvstow.cli import COMMANDS, Main, main
from kvstow.cli.cache import COMMANDS as CACHE_COMMANDS
from kvstow.cli.eval import COMMANDS as EVAL_COMMANDS
from kvstow.cli.lazy import LazyGroup
from kvstow.cli.params import kv_quant, size
from kvstow.errors import UnsupportedModel
from kvstow.scheme import Scheme


@pytest.fixture
def group(monkeypatch):
    """A `Main` whose one command raises what a test puts into ``group.error``."""

    @click.command()
    def fail():
        raise group.error

    group = Main("kvstow", commands={})
    monkeypatch.setattr(group, "get_command", lambda *_: fail)
    return group


def run(group, error):
    group.error = error
    return CliRunner().invoke(group, ["fail"])


def test_an_error_of_ours_is_one_line_and_exit_code_1(group):
    result = run(group, UnsupportedModel("head_dim is 80"))
    assert (result.exit_code, result.output) == (1, "Error: head_dim is 80\n")


def test_an_error_that_is_a_bug_keeps_its_traceback(group):
    assert isinstance(run(group, ZeroDivisionError()).exception, ZeroDivisionError)


def test_an_interrupt_ends_with_130_and_no_traceback(group):
    result = run(group, KeyboardInterrupt())
    assert (result.exit_code, result.output.strip()) == (130, "")


def test_help_imports_no_command_and_no_framework():
    code = (
        "import sys; from click.testing import CliRunner; from kvstow.cli import main, COMMANDS;"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0;"
        "print(*{'mlx', 'mlx_lm', 'rich', *(m for m, _ in COMMANDS.values())} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == ""


def test_python_dash_m_is_the_same_program():
    out = subprocess.run(
        [sys.executable, "-m", "kvstow", "--version"], check=True, capture_output=True, text=True
    )
    assert out.stdout.startswith("kvstow, version ")


def test_a_closed_pipe_ends_the_program_without_a_traceback():
    shell = f"{sys.executable} -m kvstow --help | true"
    out = subprocess.run(["sh", "-c", shell], check=True, capture_output=True, text=True)
    assert out.stderr == ""


def test_an_unknown_command_is_a_usage_error():
    assert CliRunner().invoke(main, ["squash"]).exit_code == 2


@pytest.mark.mlx
@pytest.mark.parametrize(
    "commands", [COMMANDS, EVAL_COMMANDS, CACHE_COMMANDS], ids=["kvstow", "eval", "cache"]
)
def test_the_list_of_commands_says_what_each_command_says(commands):
    pytest.importorskip("mlx_lm")
    group = LazyGroup("group", commands=commands)
    shorts = {
        name: group.get_command(None, name).get_short_help_str(limit=100) for name in commands
    }
    assert shorts == {name: line for name, (_, line) in commands.items()}


def test_a_bad_scheme_is_a_usage_error_on_its_flag():
    @click.command()
    @kv_quant
    def show(kv_quant):
        click.echo(repr(kv_quant))

    assert CliRunner().invoke(show).output == repr(Scheme.parse("turbo:k8v3")) + "\n"
    result = CliRunner().invoke(show, ["--kv-quant", "turbo:k3v3"])
    assert result.exit_code == 2
    assert "Invalid value for '--kv-quant': key bits must be one of" in result.output


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("512mb", 512 * 10**6),
        ("1.5 GiB", 3 * 2**29),
        ("16e9", 16 * 10**9),
        ("100", 100),
        ("2TB", 2 * 10**12),
    ],
)
def test_a_size_has_a_decimal_or_a_binary_unit(text, n_bytes):
    assert size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GB", "24G", "24XB", "-1GB", "0GB", "1,5GB", "1e999", "nan"])
def test_a_size_without_a_known_unit_is_refused_with_examples(text):
    with pytest.raises(click.BadParameter, match="for example 24GB"):
        size(text)
