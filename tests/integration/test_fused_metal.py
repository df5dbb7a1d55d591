"""A model whose steps go to the kernels for Metal, run on the CPU in the text that MLX makes."""

import json

import numpy as np
import pytest

import kvstow

mx = pytest.importorskip("mlx.core")
fused = pytest.importorskip("kvstow.attention.fused")
selfcheck = pytest.importorskip("kvstow.attention.selfcheck")
metal_on_cpu = pytest.importorskip("tests.kernels.metal_on_cpu")
stand_in = pytest.importorskip("tests.kernels.stand_in")
diagnosis = pytest.importorskip("kvstow.evaluate.doctor")
doctor = pytest.importorskip("kvstow.cli.doctor")
tiny = pytest.importorskip("tests.integration.tiny")
scheduled = pytest.importorskip("tests.integration.scheduled")
batching = pytest.importorskip("tests.integration.batching")

pytestmark = pytest.mark.mlx
metal, metal_folder = metal_on_cpu.metal, metal_on_cpu.metal_folder
# What lies between two codes may take the other one, as in test_fused_gpu.
LOGITS = 0.05


@pytest.fixture
def mac(metal, monkeypatch, tmp_path):
    """A Mac on which no kernel was checked yet."""
    monkeypatch.setenv("KVSTOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fused, "why_no_device", str)
    stand_in.new_process(monkeypatch)
    return metal


def test_auto_is_deferred_on_a_mac_and_says_why(mac):
    with kvstow.attached(tiny.build("llama"), "turbo") as report:
        assert report.fetch == "deferred"
        assert "have not been timed on any Mac" in report.fetch_reason
        assert "have not been timed on any Mac" in str(report)
    assert not mac


def test_kernels_that_were_asked_for_serve_every_step_of_few_tokens(mac):
    model = tiny.build("llama")
    wanted = scheduled.logits_of(model, "deferred")
    with kvstow.attached(model, "turbo", fetch="fused") as report:
        assert (report.fetch, report.warnings) == ("fused", ())
        assert "fused: steps of up to 8 tokens; deferred: longer ones" in str(report)
        before = fused.counts()
        mac.clear()
        got = scheduled.run(model)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=LOGITS)
    steps = sum(0 < n <= 8 for n in scheduled.SCHEDULE)
    longer = sum(n > 8 for n in scheduled.SCHEDULE[1:])
    counted = {"kernel": 2 * steps, "more than 8 query tokens": 2 * longer}
    assert fused.counts() - before == counted
    names = [launched["name"].split("_")[2] for launched in mac]
    assert names.count("encode") >= 2 * steps
    assert names.count("merge") == names.count("decode") >= 2 * steps


def test_a_batch_of_ragged_rows_is_near_deferred(mac):
    model = tiny.build("gemma3_text")
    replies, requests = {}, batching.prompts()
    for fetch in ("deferred", "fused"):
        with kvstow.attached(model, "turbo:k8v8", fetch=fetch):
            replies[fetch] = batching.together(model, requests, [4] * len(requests))
    for got, wanted in zip(replies["fused"], replies["deferred"], strict=True):
        batching.assert_same_reply(got, wanted, LOGITS)
    assert any("ragged" in launched["name"] for launched in mac)


def test_a_kernel_that_does_not_compile_is_deferred_with_a_warning(mac, monkeypatch):
    def refuse(**_):
        raise RuntimeError("[metal::Device] Unable to build metal library from source\nmore")

    monkeypatch.setattr(mx.fast, "metal_kernel", refuse)
    model = tiny.build("llama")
    with pytest.raises(kvstow.UnsupportedModel, match="Unable to build metal library"):
        kvstow.attach(model, "turbo", fetch="fused")
    monkeypatch.setattr(fused, "why_not_unasked", str)
    with pytest.warns(kvstow.KvstowWarning, match="slower operations are instead"):
        report = kvstow.attach(model, "turbo")
    assert report.fetch == "deferred"
    kvstow.detach(model)
    assert not mac


def test_outcomes_are_kept_for_this_gpu_system_and_source_and_the_doctor_says_them(mac):
    with kvstow.attached(tiny.build("llama"), "turbo", fetch="fused"):
        pass
    paths = list(selfcheck._folder().glob("kvstow_metal_*.json"))
    assert len(paths) == 2
    notes = [json.loads(path.read_text()) for path in paths]
    assert {note["driver"].split()[0] for note in notes} == {"macOS"}
    assert {note["why"] for note in notes} == {""}
    said = doctor.describe(diagnosis.diagnose(parity=False, on_step=print))
    assert "fused     works" in said
    assert "driver macOS" in said
    assert "only where asked for: kernels for Metal have not been timed" in said
    assert all(f"  {note['kernel']}: passed" in said for note in notes)
    assert mac
