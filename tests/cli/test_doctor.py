"""`kvstow doctor` on a CPU, with a stand-in for kernels, and without mlx."""

import json
import sys

import pytest

stand_in = pytest.importorskip("tests.kernels.stand_in")
selfcheck = pytest.importorskip("kvstow.attention.selfcheck")
tasks = pytest.importorskip("kvstow.attention.tasks")
parity = pytest.importorskip("kvstow.evaluate.parity")
doctor = pytest.importorskip("kvstow.evaluate.doctor")

pytestmark = pytest.mark.mlx
kernels, no_gpu = stand_in.kernels, stand_in.no_gpu
TASK = tasks.AttendTask(8, 3, 64, "float32", 3, 1, ragged=False)
OTHER = tasks.EncodeTask(8, 3, 64, "float32", search=False)


@pytest.mark.usefixtures("no_gpu")
def test_it_says_versions_device_blas_and_paths(cli):
    result = cli("doctor")
    assert result.exit_code == 0
    for word in ("versions  kvstow", "machine", "device", "BLAS", "eager     works"):
        assert word in result.stdout
    assert "fused     mlx has no CUDA or Metal back-end with a GPU here" in result.stdout
    assert "parity" not in result.stdout


@pytest.mark.usefixtures("no_gpu")
def test_json_says_the_same(cli):
    found = json.loads(cli("doctor", "--json").stdout)
    assert found["healthy"]
    assert (found["paths"]["eager"], found["paths"]["deferred"]) == ("", "")
    assert found["paths"]["fused"]
    assert found["versions"]["mlx"]
    assert (found["kernels"], found["parity"], found["problems"]) == ({}, {}, [])


def test_parity_compares_this_device_with_the_definition(cli):
    result = cli("doctor", "--parity", "--json")
    assert result.exit_code == 0
    checks = json.loads(result.stdout)["parity"]
    assert set(checks.values()) == {""}
    assert {f"{what}, head_dim {d}" for what in ("codec", "attention") for d in (64, 512)} <= {
        *checks
    }


def test_a_codec_or_attention_that_differs_is_a_failure(cli, monkeypatch):
    encode, attend = parity.fast.encode_keys, parity.attend
    monkeypatch.setattr(parity.fast, "encode_keys", lambda x, **o: encode(x * 1.01, **o))
    monkeypatch.setattr(parity, "attend", lambda *a, **o: attend(*a, **o) * 1.01)
    result = cli("doctor", "--parity")
    assert result.exit_code == 1
    assert "codec, head_dim 64: keys of 2 bits: " in result.stdout
    assert "attention, head_dim 64: turbo:k8v3 is off by 1.0e-02" in result.stdout


def test_a_check_that_raises_is_a_failure_too(cli, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setattr(parity, "attend", broken)
    result = cli("doctor", "--parity")
    assert result.exit_code == 1
    assert "attention, head_dim 64: RuntimeError: no kernel image\n" in result.stdout


@pytest.fixture
def here(cli, kernels, monkeypatch, tmp_path):
    """Both: the program, and kernels that remember in one directory."""
    monkeypatch.setenv("KVSTOW_CACHE", str(tmp_path / "both"))
    return cli, kernels


def test_a_kernel_that_passed_is_listed(here):
    cli, _ = here
    name = selfcheck.outcome(TASK).kernel
    result = cli("doctor")
    assert result.exit_code == 0
    assert f"  {name}: passed" in result.stdout
    assert "fused     works" in result.stdout


def test_a_kernel_that_failed_is_a_problem_until_parity_finds_it_well(here, monkeypatch):
    cli, kernels = here
    kernels.attention_off, kernels.bytes_off = 1.0, True
    name = selfcheck.outcome(OTHER).kernel
    stand_in.new_process(monkeypatch)
    monkeypatch.setattr(parity, "sample", lambda: [TASK])
    result = cli("doctor", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert "key scales differ" in found["kernels"]["checked"][name]
    assert len(found["problems"]) == 1
    result = cli("doctor", "--parity", "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["problems"]) == 2  # TASK, and what was used before
    kernels.attention_off, kernels.bytes_off = 0.0, False
    result = cli("doctor", "--parity", "--json")
    assert (result.exit_code, json.loads(result.stdout)["problems"]) == (0, [])
    assert json.loads(result.stdout)["parity"][f"kernel {name}"] == ""
    assert cli("doctor").exit_code == 0


def test_the_sample_of_kernels_has_every_width_head_dim_and_dtype():
    sample = parity.sample()
    for name, all_of in (
        ("key_bits", parity.KEY_BITS),
        ("value_bits", parity.VALUE_BITS),
        ("head_dim", parity.HEAD_DIMS),
        ("dtype", parity.DTYPES),
    ):
        for kind in (tasks.AttendTask, tasks.EncodeTask):
            assert {getattr(t, name) for t in sample if isinstance(t, kind)} == set(all_of)
    attends = [t for t in sample if isinstance(t, tasks.AttendTask)]
    assert {(t.n_queries, t.ragged) for t in attends} >= {(1, False), (1, True), (4, True)}


def test_without_mlx_it_says_what_to_install(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_lm", None)
    result = cli("doctor")
    assert result.exit_code == 1
    assert "pip install 'kvstow[mlx]'" in result.stdout


def test_generate_says_how_many_calls_the_kernels_took_and_why_others_were_deferred(here, tiny):
    cli, _ = here
    args = ("generate", "--model", tiny.llama, "--prompt", "hi", "-m", "4", "--fetch", "fused")
    result = cli(*args, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["fetch"] == "fused"
    assert report["layers"]["paths"] == {"fused": [0, 1]}
    assert report["attention_calls"]["kernel"] >= 2 * 3
    assert set(report["attention_calls"]) == {"kernel"}
    assert "attention   calls over packed tokens: " in cli(*args).stderr
