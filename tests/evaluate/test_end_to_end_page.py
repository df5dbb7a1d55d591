"""What the pages say of whole models is the recorded rows, and figures show them."""

import argparse
import json
import re
import runpy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm")
pytest.importorskip("matplotlib")

import mlx.core as mx

import kvstow
from kvstow.evaluate.figures.decoding import digest
from kvstow.integrations.mlx_lm import attachment, deferred
from tests.integration import tiny
from tests.kernels import stand_in

pytestmark = pytest.mark.mlx
kernels = stand_in.kernels
ROOT = Path(kvstow.__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools/make_end_to_end_docs.py"))
FILES = {"section": "docs/kernels.md", "readme": "README.md"}
LIMIT = 130_000_000_000
REASON = "no kernel for this length"


def made(batch, tokens, scheme, ms=None, *, needed=50, off_ms=None, **more):
    """A row with the fields of the benchmark's: measured, not fitting, or failed."""
    fits = needed * 10**9 <= LIMIT
    row = {
        "bench": "end_to_end",
        "model": "llama8b",
        "dtype": "bfloat16",
        "batch": batch,
        "tokens": tokens,
        "scheme": scheme,
        "longest": False,
        "refused": None if ms else REASON if fits else f"needs {needed} GB of 130.0",
        "needed_bytes": needed * 10**9,
        "fits": fits,
        "vs_off": round(off_ms / ms, 3) if off_ms and ms else None,
        "vs_affine8": None,
        "memory_limit_bytes": LIMIT,
        "command": "python benchmarks/bench_end_to_end.py",
        "commit": "0123456789",
        "device": "A GPU",
        "mlx": "0.0",
    }
    if ms:
        row |= {
            "fetch": "fused",
            "attention_calls": {"kernel": 32},
            "step_ms": ms,
            "step_ms_all": [ms],
            "decode_tokens_per_s": batch * 1e3 / ms,
            "kv_bytes": needed * 10**8,
            "kv_bytes_bf16": needed * 10**8,
            "peak_memory_bytes": needed * 10**9,
            "peak_memory_bytes_growing": needed * 10**9,
        }
    return row | more


ROWS = [
    made(1, 4096, "off", 10.0, needed=20, off_ms=10.0),
    made(1, 4096, "affine:8"),
    made(1, 4096, "turbo:k8v3", 8.0, needed=18, off_ms=10.0),
    made(8, 32768, "off", needed=140),
    made(8, 32768, "affine:8"),
    made(8, 32768, "turbo:k8v3", 40.0, needed=60),
    made(8, 24576, "off", 30.0, longest=True),
    made(8, 61440, "turbo:k8v3", 80.0, longest=True),
]


def said(rows):
    return list(TOOL["section"](rows))


@pytest.mark.parametrize("name", FILES)
def test_pages_are_those_of_the_recorded_rows(name):
    text = (ROOT / FILES[name]).read_text(encoding="utf-8")
    made_again = TOOL["page"](text, TOOL[name](TOOL["recorded"]()))
    assert made_again == text, "run tools/make_end_to_end_docs.py"


def test_figures_are_those_of_the_recorded_rows():
    rows = TOOL["recorded"]()
    shown = [row for row in (TOOL["groups"](rows) or [[]])[0] if not row["longest"]]
    for name in TOOL["PICTURES"]:
        path = ROOT / "docs/figures" / name
        assert path.exists() == bool(rows)
        if rows:
            assert digest(shown) in path.read_text(encoding="utf-8"), "run the tool"


def test_a_table_says_what_ran_how_much_faster_and_why_the_rest_did_not():
    lines = said(ROWS)
    assert "| 1 | 4k | 100.0 | failed | 125.0 (1.25) |" in lines
    assert "| 8 | 32k | does not fit | failed | 200.0 |" in lines
    assert "| 8 | 32k | does not fit | failed | 60.0 (6.00) |" in lines
    assert f"- `affine:8` failed: {REASON}" in lines
    assert any("61440 tokens in each of 8 rows, 2.50 times `off`; 100.0" in x for x in lines)
    assert any("kernel: 160" in line for line in lines)


def test_the_last_row_of_a_cell_counts_and_models_stand_apart():
    again = made(1, 4096, "off", 20.0, off_ms=20.0)
    other = made(1, 4096, "off", 1.0, off_ms=1.0, model="smollm2")
    lines = said(TOOL["distinct"]([*ROWS, again, other]))
    assert "| 1 | 4k | 50.0 | failed | 125.0 (1.25) |" in lines
    assert "| 1 | 4k | 1000.0 |" in lines
    assert len([line for line in lines if line.startswith("| batch")]) == 4


def texts_of(svg):
    return ["".join(x.itertext()) for x in ET.fromstring(svg).iter() if x.tag.endswith("}text")]


def test_figures_are_the_same_bytes_again_and_have_no_date():
    files = TOOL["figures"](ROWS)
    assert files == TOOL["figures"](ROWS)
    for svg in files.values():
        assert not re.search(r"20\d\d-\d\d|Matplotlib", svg.decode())
        assert digest(ROWS[:6]) in svg.decode()
    assert digest(ROWS[:5]) != digest(ROWS[:6])


def test_figures_name_schemes_batches_and_contexts_and_say_where_off_does_not_fit():
    speed, memory = map(texts_of, TOOL["figures"](ROWS).values())
    for shown in (speed, memory):
        assert {"off", "turbo:k8v3", "batch 1", "batch 8", "4k", "32k"} <= set(shown)
        assert any("A GPU with mlx 0.0, at 0123456789" in text for text in shown)
        assert "24k" not in shown  # the longest context is no cell
    assert "off does not fit" in speed
    assert "off does not fit" not in memory


def test_points_are_the_ratios_that_are_known_and_crosses_the_cells_that_are_refused():
    figure = TOOL["draw_speed"](ROWS[:6], [])
    first, second = figure.axes
    points = [tuple(map(list, line.get_data())) for line in first.lines if line.get_marker() == "o"]
    assert points == [([0], [1.0]), ([], []), ([0], [1.25])]
    assert [line.get_marker() for line in second.lines].count("x") == 1
    assert all(not len(line.get_xdata()) for line in second.lines if line.get_marker() == "o")
    assert len(second.patches) == 1


def test_memory_is_measured_or_else_hollow_and_estimated():
    _, second = TOOL["draw_memory"](ROWS[:6], []).axes
    hollow = [line for line in second.lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_ydata()) for line in hollow] == [[140.0], [], []]
    assert any(list(line.get_ydata()) == [60.0] for line in second.lines)
    assert second.lines[0].get_ydata()[0] == LIMIT / 1e9


def options_with(**more):
    fixed = {"model": "tiny", "dtype": "float32", "fetch": "auto", "steps": 1, "rounds": 2}
    return argparse.Namespace(**fixed | more)


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return runpy.run_path(str(ROOT / "benchmarks/bench_end_to_end.py"))


def parsed(*texts):
    return [kvstow.Scheme.parse(text) for text in texts]


def test_rows_of_the_benchmark_have_what_is_shown(bench):
    model = tiny.build("llama")
    made_with = bench["Bench"](model, options_with(memory_bytes=10**10))
    schemes = parsed("off", "turbo:k8v3")
    about = {key: ROWS[0][key] for key in ("command", "commit", "device", "mlx")}
    cell = bench["Cell"].parse("2x300")
    rows = [row | about for row in bench["rows"](made_with, cell, schemes)]
    made_with.options.memory_bytes = 1
    rows += [row | about for row in bench["rows"](made_with, bench["Cell"](1, 300), schemes)]
    assert [row["fits"] for row in rows] == [True, True, False, False]
    assert [set(row) for row in rows] == [set(ROWS[0])] * 2 + [set(ROWS[3])] * 2
    assert rows[1]["kv_bytes"] < rows[0]["kv_bytes"]
    assert json.dumps(rows)
    assert len(said(rows)) > 10
    assert TOOL["figures"](rows)
    made_with.options.memory_bytes = 10**8
    longest = bench["longest"](made_with, schemes[1], 2)
    assert made_with.fits([schemes[1]], longest)
    assert not made_with.fits([schemes[1]], bench["Cell"](2, longest.tokens + 4096))
    assert not mx.isnan(sys.modules["end_to_end_arms"].noise((2, 3, 5000, 4), mx.float32)).any()


@pytest.mark.parametrize(("fetch", "has_kernels"), [("auto", False), ("deferred", True)])
def test_a_layer_is_counted_that_is_decoded_in_each_step(bench, monkeypatch, fetch, has_kernels):
    fused = sys.modules["end_to_end_arms"].fused
    made_with = bench["Bench"](tiny.build("llama"), options_with(memory_bytes=10**10))
    schemes, cell = parsed("turbo:k8v3"), bench["Cell"](2, 3000)
    monkeypatch.setattr(fused, "why_no_device", lambda: "")
    by_kernels = made_with.needed_bytes(schemes, cell)
    monkeypatch.setattr(fused, "why_no_device", lambda: "" if has_kernels else "none")
    made_with.options.fetch = fetch
    assert made_with.needed_bytes(schemes, cell) > 1.2 * by_kernels


def test_schemes_take_turns_and_nothing_else_is_attached_in_theirs(bench, monkeypatch):
    model, turns = tiny.build("llama"), []

    def turn_ms(model, cache, *_):
        attached = attachment(model)
        scheme = attached.report.scheme if attached else "off"
        assert deferred.is_installed() == (str(scheme) == "turbo:k8v3")
        turns.append((str(scheme), frozenset(map(type, cache))))
        return {"off": 6.0, "affine:8": 3.0, "turbo:k8v3": 2.0}[str(scheme)] * len(turns)

    monkeypatch.setattr(sys.modules["end_to_end_arms"], "turn_ms", turn_ms)
    schemes = parsed("off", "affine:8", "turbo:k8v3")
    made_with = bench["Bench"](model, options_with(memory_bytes=10**10))
    off, affine, turbo = bench["rows"](made_with, bench["Cell"](2, 256), schemes)
    a, b, c = "off", "affine:8", "turbo:k8v3"
    tried_and_grown = [a, b, c] * 2
    assert [scheme for scheme, _ in turns] == [*tried_and_grown, a, b, c, b, c, a]
    assert all(len({kinds for name, kinds in turns if name == scheme}) == 1 for scheme in (a, b, c))
    assert len({kinds for _, kinds in turns}) == 3
    assert attachment(model) is None
    # Turns 7 to 12: the medians of ratios in a round, and not the ratio of medians.
    assert off["step_ms_all"] == [6.0 * 7, 6.0 * 12]
    assert turbo["vs_off"] == round((6 * 7 / (2 * 9) + 6 * 12 / (2 * 11)) / 2, 3)
    assert affine["vs_off"] == round((6 * 7 / (3 * 8) + 6 * 12 / (3 * 10)) / 2, 3)
    assert turbo["vs_affine8"] == round((3 * 8 / (2 * 9) + 3 * 10 / (2 * 11)) / 2, 3)
    assert off["vs_off"] == 1.0


def test_what_fails_on_short_caches_is_refused_without_filling_long_ones(bench, monkeypatch):
    arms, sizes = sys.modules["end_to_end_arms"], []
    filled = arms.filled

    def failing(model, cell, dtype):
        if attachment(model) is None:
            return filled(model, cell, dtype)
        sizes.append(cell.tokens)
        raise RuntimeError("no kernel for this\nat all")

    monkeypatch.setattr(arms, "filled", failing)
    made_with = bench["Bench"](tiny.build("llama"), options_with(memory_bytes=10**10))
    schemes = parsed("off", "affine:8")
    for tokens in (512, 1024):
        off, affine = bench["rows"](made_with, bench["Cell"](2, tokens), schemes)
        assert affine["refused"] == "no kernel for this (at 256 tokens)"
        assert (affine["fits"], affine["vs_off"]) == (True, None)
        assert (off["refused"], off["vs_off"]) == (None, 1.0)
    assert sizes == [256]


def test_groups_are_of_what_fits_beside_off(bench):
    made_with = bench["Bench"](tiny.build("llama"), options_with(memory_bytes=10**12))
    off, *rest = schemes = parsed("off", "turbo:k8v3", "turbo:k8v4", "turbo:k4v3")
    cell = bench["Cell"](2, 2**20)

    def grouped(room, asked=schemes):
        made_with.options.memory_bytes = made_with.needed_bytes(room, cell)
        return bench["groups"](made_with, cell, asked)

    assert grouped(schemes) == [schemes]
    assert grouped([off, *rest[:2]]) == [[off, *rest[:2]], [off, rest[2]]]
    assert grouped([off, rest[0]]) == [[off, rest[0]], [off, rest[2]], [rest[1]]]
    assert grouped([off]) == [[rest[0]], [rest[1]], [rest[2]], [off]]
    assert grouped([off], rest) == [[scheme] for scheme in rest]


def test_memory_is_that_of_the_model_and_one_cache(bench):
    model = tiny.build("llama")
    mx.eval(model.parameters())
    made_with = bench["Bench"](model, options_with(memory_bytes=10**10))
    schemes, cell = parsed("off", "turbo:k8v3"), bench["Cell"](2, 2048)
    together = list(bench["rows"](made_with, cell, schemes))
    for scheme, row in zip(schemes, together, strict=True):
        (alone,) = bench["rows"](made_with, cell, [scheme])
        assert row["peak_memory_bytes"] == pytest.approx(alone["peak_memory_bytes"], rel=0.02)
        assert row["peak_memory_bytes"] > made_with.active + row["kv_bytes"]


def test_calls_of_kernels_are_those_of_the_scheme_that_made_them(bench, kernels):
    model = tiny.build("llama", dtype=mx.bfloat16)
    made_with = bench["Bench"](model, options_with(memory_bytes=10**10, dtype="bfloat16"))
    schemes = parsed("off", "turbo:k8v3", "turbo:k4v3")
    off, *turbo = bench["rows"](made_with, bench["Cell"](2, 256), schemes)
    assert (off["fetch"], off["attention_calls"]) == ("host", {})
    steps = 3 * (1 + bench["AHEAD"])  # the turn that grows the cache and two more
    for row in turbo:
        assert row["fetch"] == "fused"
        assert row["attention_calls"] == {"kernel": steps * len(model.layers)}
    assert len(kernels.attended) >= 2 * steps * len(model.layers)
