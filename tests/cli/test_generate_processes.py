"""``kvstow generate`` in several processes, each with a part of the heads."""

import json
import sys
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.mlx
processes = pytest.importorskip("tests.integration.launch")
ours = pytest.importorskip("kvstow.cli.processes")
PROGRAM = (sys.executable, "-m", "kvstow", "generate", "--prompt", "hi")


@processes.needs_ring
def test_two_processes_print_the_text_of_one_once_and_hold_half_each(cli, tiny):
    args = ("--model", tiny.llama, "--kv-quant", "turbo:k8v3", "-m", 12, "--json")
    alone = json.loads(cli("generate", "--prompt", "hi", *args).stdout)
    done = processes.launch(*PROGRAM, *map(str, args), KVSTOW_CACHE=str(tiny.cache))
    (together,) = processes.objects(done)
    assert together["text"] == alone["text"]
    assert (alone["processes"], together["processes"]) == (1, 2)
    assert together["layers"] == alone["layers"]
    assert 2 * together["kv_bytes"] == alone["kv_bytes"]


@pytest.mark.usefixtures("no_load")
def test_heads_that_do_not_divide_are_refused_before_weights_load(refused, directory, monkeypatch):
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(ours, "launched", lambda: ours.Processes(group, 2, 0))
    model = directory(num_attention_heads=9, num_key_value_heads=3)
    error = refused("generate", "-p", "hi", "--model", model, code=1)
    said = "this llama cannot be split over 2 processes: its 9 query heads and 3 KV"
    assert said in " ".join(error.split())


def test_a_draft_model_beside_several_processes_is_a_usage_error(refused, monkeypatch):
    monkeypatch.setattr(ours, "launched", lambda: ours.Processes(None, 2, 0))
    error = refused("generate", "-p", "hi", "--draft-model", "smollm2", code=2)
    assert "--draft-model works in one process, and 2 were started" in " ".join(error.split())


def test_a_process_that_finds_no_other_does_not_answer_alone(refused, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")  # a launcher that mlx was not built for
    assert "this is process 1 of several, and mlx finds no other" in refused(
        "generate", "-p", "hi", code=1
    )


@pytest.mark.parametrize("verb", ["fit", "bench", "eval"])
def test_a_command_that_each_process_would_run_alone_is_a_usage_error(refused, monkeypatch, verb):
    monkeypatch.setenv("MLX_RANK", "1")
    error = refused(verb, "--help", code=2)
    assert f"'{verb}' works in one process, and several were started" in error


def test_only_the_first_process_prints(capsys):
    for rank in (0, 1):
        of_two = ours.Processes(None, 2, rank)
        of_two.print("result")
        of_two.say("line")
        assert capsys.readouterr() == (("result\n", "line\n") if rank == 0 else ("", ""))


def test_a_process_alone_keeps_its_seed_and_has_no_group(monkeypatch):
    for name in ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    alone = ours.launched()
    assert (alone.group, alone.size, alone.is_first) == (None, 1, True)
    assert [ours.shared_seed(seed, alone) for seed in (None, 7)] == [None, 7]
