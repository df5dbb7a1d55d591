import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from kvstow.cli import main
from kvstow.errors import EvaluationError
from kvstow.evaluate.selection import KINDS, check_together, distinct, of_kind, runs, settings
from tests.evaluate.made_rows import (
    WINDOW,
    bits_rows,
    kl_row,
    layer_rows,
    needle_row,
    ppl_row,
    profile_row,
    texts,
)

pytest.importorskip("matplotlib")
render = pytest.importorskip("kvstow.evaluate.plot").render

MODELS = ("tiny", "other")
ROWS = [
    *[row for model in MODELS for row in bits_rows(2, 3, 4, 8, model=model)],
    *[kl_row(arm, 0.01) for arm in ("affine:4", "paper:mse3", "turbo:k8v3@keys", "off@bfloat16")],
    kl_row("off", 0.0, interval_95=[0.0, 0.0]),
    *[row for model in MODELS for row in layer_rows(model)],
    *layer_rows(scheme="turbo:k4v3"),
    *[needle_row(arm) for arm in ("off", "turbo:k8v3", "turbo:k4v3")],
    ppl_row(),
    profile_row(),
]
SHOWN = {
    "kl": {"turbo:k8v2", "turbo:k8v8", "affine:4", "paper:mse3", "turbo:k8v3@keys", *MODELS},
    "layers": {"turbo:k8v3", "turbo:k4v3", *MODELS},
    "needle": {
        "turbo:k8v3  75%",
        "found 75% (55% to 88%)",
        "turbo:k4v3  75%",
        "1,024",
        "50%",
        "3/4",
    },
    "law": {"2", "3", "4", "8", "4 times per bit"},
}


def texts_of(svg):
    return {
        "".join(text.itertext()) for text in ET.fromstring(svg).iter() if text.tag[-4:] == "text"
    }


@pytest.fixture
def cli(tmp_path):
    def run(rows, *options, end="\n"):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)) + end)
        return CliRunner().invoke(main, ["eval", "plot", str(file), *map(str, options)])

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_an_svg_is_xml_that_names_what_it_shows(kind):
    shown = texts_of(render(ROWS, kind, ".svg"))
    assert SHOWN[kind] <= shown
    assert any("n = 4 texts (python 4)" in text for text in shown)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_make_the_same_bytes(kind, suffix):
    assert render(ROWS, kind, suffix) == render(ROWS, kind, suffix)


def test_a_user_s_own_settings_of_matplotlib_change_nothing():
    import matplotlib as mpl  # noqa: PLC0415

    expected = render(ROWS, "kl", ".svg")
    with mpl.rc_context({"font.size": 20, "svg.fonttype": "path", "axes.grid": True}):
        assert render(ROWS, "kl", ".svg") == expected


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")]
)
def test_the_suffix_says_which_kind_of_file(cli, tmp_path, suffix, magic):
    figure = tmp_path / f"figure{suffix}"
    result = cli(ROWS, "--output", figure)
    assert (result.exit_code, result.output) == (0, "")
    assert figure.read_bytes().startswith(magic)


def test_a_figure_holds_no_date_and_no_version():
    svg = render(ROWS, "kl", ".svg").decode()
    assert not re.search(r"20\d\d-\d\d|Matplotlib", svg)


def test_the_reference_and_single_layers_are_no_points_of_the_kl_figure():
    arms = {row["arm"] for row in of_kind(ROWS, "kl")}
    assert arms == {
        row["arm"] for row in ROWS if row["measure"] == "kl" and "@layer" not in row["arm"]
    } - {"off"}


def test_the_law_is_of_eight_bit_keys_and_whole_caches():
    others = (
        "turbo:k4v3",
        "turbo:k8v3@values",
        "turbo:k8v3@eager",
        "turbo:k8v3@layer0",
        "paper:mse3",
    )
    rows = [kl_row(arm) for arm in ("turbo:k8v3", "turbo:k8v3+search", *others)]
    assert [row["arm"] for row in of_kind(rows, "law")] == ["turbo:k8v3", "turbo:k8v3+search"]


def test_the_law_s_rate_and_its_interval_are_in_the_legend():
    shown = texts_of(render(bits_rows(2, 3, 4, 8), "law", ".svg"))
    assert any(
        re.match(r"tiny turbo:k8v\*: falls 3\.\d\d times per bit \(3", text) for text in shown
    )


NAMES = ("<script>&\"'", "$\\frac$ ^_{", "_hidden", "a\x00b\nc\ud800", "模型", "")


@pytest.mark.parametrize("kind", KINDS)
def test_models_may_be_called_anything(kind):
    rows = [*bits_rows(2, 3), *layer_rows(), needle_row()]
    for name in NAMES:
        rows += [*bits_rows(2, 3, model=name), *layer_rows(name), needle_row(model=name)]
    shown = "\n".join(texts_of(render(rows, kind, ".svg")))
    written = ["".join(c if c.isprintable() else "\ufffd" for c in name) for name in NAMES]
    assert [name for name in written if name not in shown] == []


def test_many_models_and_schemes_are_told_apart():
    from kvstow.evaluate.figures.canvas import colour_of, dash_of  # noqa: PLC0415

    assert len({(colour_of(i), dash_of(i)) for i in range(28)}) == 28
    render([kl_row(model=f"model {i}") for i in range(12)], "kl", ".svg")


@pytest.mark.parametrize("kl", [1e-8, 1.0, 50.0])
def test_one_row_is_a_figure(kl):
    render([kl_row("turbo:k8v3", kl)], "kl", ".svg")
    render([kl_row("turbo:k8v3@layer7", kl)], "layers", ".svg")


def test_a_needle_that_off_does_not_find_has_no_ratio():
    shown = texts_of(render([needle_row(found=0, found_off=0)], "needle", ".svg"))
    assert "0/0" in shown


def test_needles_of_several_models_are_named_by_model():
    shown = texts_of(render([needle_row(), needle_row(model="other")], "needle", ".svg"))
    assert {"tiny", "other"} <= shown


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"dtype": "bfloat16"},
            "the dtype of kl turbo:k8v3 of tiny is float32, that of kl affine:4",
        ),
        ({"window": WINDOW | {"steps": 8}}, '"steps": 32.*"steps": 8'),
        ({"window": WINDOW | {"build": "append"}}, '"build": "convert".*"build": "append"'),
        ({"texts": texts("tiny", 8)}, "n_texts of .* is 4, .* is 8"),
        (
            {"texts": texts("tiny") | {"sources": {"file": 4}}},
            'sources of .*"python": 4.*"file": 4',
        ),
        (
            {"texts": texts("another")},
            "texts' sha256 of .* is tokens of tiny, .* is tokens of another",
        ),
    ],
)
def test_rows_that_answer_different_questions_are_refused_with_what_differs(change, named):
    rows = [kl_row(), kl_row("affine:4", **change)]
    with pytest.raises(EvaluationError, match=f"do not belong into one figure: .*{named}"):
        render(rows, "kl", ".svg")


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"window": WINDOW | {"steps": 8}}])
def test_rows_of_different_models_must_agree_too(change):
    with pytest.raises(EvaluationError, match=r"kl turbo:k8v3 of tiny .* of other"):
        check_together([kl_row(), kl_row(model="other", **change)])


def test_models_may_have_tokens_of_their_own():
    check_together([kl_row(), kl_row(model="other")])


def test_rows_of_another_kind_are_not_asked_to_agree():
    render(
        [kl_row(), needle_row(dtype="bfloat16"), kl_row("turbo:k8v3@layer1", dtype="float16")],
        "kl",
        ".svg",
    )


def test_settings_keep_rows_apart_that_no_figure_may_join():
    other = [kl_row(dtype="bfloat16"), kl_row("affine:4", dtype="bfloat16")]
    rows = [kl_row(), other[0], kl_row("affine:4"), other[1]]
    assert settings(rows) == [[rows[0], rows[2]], other]


def test_a_row_measured_again_with_the_same_result_counts_once():
    again = kl_row(commit="another", machine="Another", started="later", command="again")
    assert distinct([kl_row(), again]) == [kl_row()]


def test_a_row_from_before_a_field_was_recorded_contradicts_no_later_one():
    later = needle_row(interval_95=[0.55, 0.88], commit="later")
    assert distinct([needle_row(), later]) == [needle_row()]


def test_two_answers_to_one_question_are_refused_with_both_commits():
    again = kl_row(kl=0.03, commit="another")
    message = r"measure kl turbo:k8v3 of tiny, and their \w+ differs: .*abc1234567.*commit another"
    with pytest.raises(EvaluationError, match=message):
        distinct([kl_row(), again])


def test_each_commit_and_machine_is_in_the_caption():
    rows = [kl_row(), kl_row("affine:4", commit="fedcba9876", machine="B"), kl_row("affine:8")]
    assert runs(rows) == ["commit abc1234567, A machine (Linux x86_64)", "commit fedcba9876, B"]
    shown = " ".join(texts_of(render(rows, "kl", ".svg")))
    assert "abc1234567" in shown
    assert "fedcba9876" in shown


@pytest.mark.parametrize(
    "change",
    [
        {"mean_kl_nats": None},
        {"mean_kl_nats": "0.1"},
        {"mean_kl_nats": float("nan")},
        {"mean_kl_nats": 10**400},
        {"interval_95": [0.1]},
        {"bits_per_value": True},
        {"per_text_kl_nats": []},
        {"texts": [1]},
        {"texts": {"n_texts": "4"}},
        {"window": None},
        {"model": 3},
        {"arm": None},
        {"kept": {"why": 3}},
    ],
)
def test_a_row_that_cannot_be_shown_is_refused_with_its_field(change):
    (field,) = change
    with pytest.raises(EvaluationError, match=f"cannot be shown: its '{field}' is"):
        distinct([kl_row() | change])


def test_a_row_of_an_unknown_arm_is_refused(cli, tmp_path):
    result = cli([kl_row() | {"arm": "turbo:k8v3@moon"}], "--output", tmp_path / "a.svg")
    assert (result.exit_code, result.stderr[:7]) == (1, "Error: ")
    assert "moon" in result.stderr


@pytest.mark.parametrize("name", ["figure", "figure.gif", "rows.jsonl", ".svg"])
def test_another_suffix_is_a_usage_error(cli, tmp_path, name):
    result = cli(ROWS, "--output", tmp_path / name)
    assert result.exit_code == 2
    assert "does not end in .svg or .png or .pdf" in result.stderr


@pytest.mark.parametrize("options", [[], ["--kind", "mood", "--output", "a.svg"]])
def test_a_missing_output_and_an_unknown_kind_are_usage_errors(cli, options):
    assert cli(ROWS, *options).exit_code == 2


def test_a_missing_file_of_rows_is_a_usage_error(tmp_path):
    options = ["--output", str(tmp_path / "a.svg")]
    assert CliRunner().invoke(main, ["eval", "plot", str(tmp_path / "no"), *options]).exit_code == 2
    assert CliRunner().invoke(main, ["eval", "plot", *options]).exit_code == 2


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("kl", "eval kl"),
        ("layers", "turbo:k8v3@layer0"),
        ("needle", "eval needle"),
        ("law", "turbo:k8v2"),
    ],
)
def test_no_row_of_a_kind_is_an_error_that_says_what_measures_it(cli, tmp_path, kind, command):
    figure = tmp_path / "figure.svg"
    result = cli([ppl_row(), kl_row("off", 0.0)], "--kind", kind, "--output", figure)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"no row is for a figure of kind '{kind}'" in result.stderr
    assert command in result.stderr
    assert not figure.exists()


def test_one_width_of_values_is_an_error_of_the_law(cli, tmp_path):
    result = cli(bits_rows(3, 8), "--kind", "law", "--output", tmp_path / "a.svg")
    assert result.exit_code == 1
    assert "at least two widths" in result.stderr


def test_a_mismatch_ends_with_one_error_and_no_figure(cli, tmp_path):
    figure = tmp_path / "figure.svg"
    result = cli([kl_row(), kl_row("affine:4", dtype="bfloat16")], "--output", figure)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: these rows do not belong into one figure")
    assert not figure.exists()


def test_a_directory_that_is_not_there_is_an_error(cli, tmp_path):
    result = cli(ROWS, "--output", tmp_path / "no" / "a.svg")
    assert (result.exit_code, result.stderr[:7]) == (1, "Error: ")


def test_a_last_row_that_is_not_whole_is_left_out_and_said(cli, tmp_path):
    result = cli([*ROWS, kl_row("affine:8")], "--output", tmp_path / "a.svg", end="")
    assert result.exit_code == 0
    assert "its last row is not whole, it is left out" in result.stderr
    assert "affine:8" not in texts_of((tmp_path / "a.svg").read_bytes())


def test_rows_of_several_files_are_one_figure(tmp_path):
    files = [tmp_path / f"{model}.jsonl" for model in MODELS]
    for file, model in zip(files, MODELS, strict=True):
        file.write_text(json.dumps(kl_row(model=model)) + "\n")
    figure = tmp_path / "a.svg"
    args = ["eval", "plot", *map(str, files), "--output", str(figure)]
    assert CliRunner().invoke(main, args).exit_code == 0
    assert set(MODELS) <= texts_of(figure.read_bytes())


def test_figures_and_reports_need_no_model_and_no_screen(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
        "from kvstow.cli import main\n"
        f"main(['eval', 'plot', {str(file)!r}, '--output', {str(tmp_path / 'a.svg')!r}], "
        "standalone_mode=False)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        f"main(['eval', 'report', {str(file)!r}, '--output', {str(tmp_path / 'a.html')!r}], "
        "standalone_mode=False)\n"
        "assert not {'matplotlib.pyplot', 'tkinter'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_named(monkeypatch, cli, tmp_path):
    for name in [name for name in sys.modules if name.startswith("kvstow.evaluate.figures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kvstow.evaluate.plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = cli(ROWS, "--output", tmp_path / "a.svg")
    assert result.exit_code == 1
    assert "this needs matplotlib: pip install 'kvstow[eval]'" in result.stderr


def test_only_the_arms_that_are_named_are_drawn(cli, tmp_path):
    rows = [kl_row("turbo:k8v3"), kl_row("turbo:k8v4", 0.01), kl_row("affine:8", 0.001)]
    output = tmp_path / "kl.svg"
    options = ("--arm", "turbo:k8v3", "--arm", "affine:8", "--output", output)
    assert cli(rows, *options).exit_code == 0
    shown = texts_of(output.read_bytes())
    assert {"turbo:k8v3", "affine:8"} <= shown
    assert "turbo:k8v4" not in shown
    refused = cli(rows, "--arm", "turbo:k8v2", "--output", output)
    assert refused.exit_code == 2
    assert "turbo:k8v2 has no row" in refused.stderr
