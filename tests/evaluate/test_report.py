import json
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from kvstow.cli import main
from kvstow.errors import EvaluationError
from tests.evaluate.made_rows import (
    WINDOW,
    bits_rows,
    kl_row,
    layer_rows,
    needle_row,
    ppl_row,
    profile_row,
)

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
report = pytest.importorskip("kvstow.evaluate.report").report

ROWS = [
    *[row for model in ("tiny", "other") for row in bits_rows(2, 3, 4, 8, model=model)],
    *layer_rows(),
    ppl_row(),
    needle_row(),
    profile_row(),
]
TITLES = {
    "kl": "KL of the next token",
    "ppl": "Perplexity through the quantised cache",
    "needle": "Facts found again",
    "profile": "Keys and values of each layer",
}


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of figures and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("svg", "style"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in ("svg", "style"):
            self.open.remove(tag)

    def handle_data(self, data):
        if not self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))

    @property
    def cells(self):
        return {word.strip() for word in self.words}


@pytest.fixture(scope="module")
def page():
    return Page(report(ROWS))


def test_the_page_asks_for_nothing_from_elsewhere_and_runs_nothing(page):
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base"}
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"@import|url\((?!#)|(?:src|href)=[\"']?(?:https?:)?//", report(ROWS))


def test_the_page_is_html_with_every_table_and_figure(page):
    names = [tag for tag, _ in page.tags]
    # KL, by layer, law; needle
    assert (names.count("svg"), names.count("figure")) == (4, 4)
    # What was measured, two models, one by layer, ppl, needle, profile, provenance.
    assert names.count("table") == 8


def test_no_two_parts_of_the_page_have_one_name(page):
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids)) > 100
    used = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", report(ROWS)))
    assert used <= set(ids)


def test_the_same_rows_make_the_same_page():
    assert report(ROWS) == report(ROWS)


def test_the_page_says_what_was_measured_and_by_what(page):
    for word in ("float32; n = 4 texts (python 4)", "prefix tokens 127, steps 32, build convert"):
        assert word in page.text
    expected = {"tiny", "other", "tokens of tiny", "abc1234567", "kvstow eval kl"}
    assert expected | {"A machine (Linux x86_64)"} <= page.cells


def test_a_row_of_kl_is_shown_in_all_its_parts():
    page = Page(report([kl_row("turbo:k8v3", 0.02)]))
    expected = {"turbo:k8v3", "2 of 3", "6.25", "12,345", "27.0%", "0.02", "0.018 to 0.022"}
    assert expected | {"95.3%", "-0.0123", "0.014", "0.18"} <= page.cells
    assert "layers 1 stay as they were: a sliding window (under turbo:k8v3)" in page.text
    assert "unquantised perplexity 21.8" in page.text


def test_a_simulated_arm_has_no_bytes():
    assert "simulated" in Page(report([kl_row("turbo:k8v3@keys")])).cells


def test_rows_of_other_measures_are_shown(page):
    assert {"22.125", "21.500", "+0.02866"} <= page.cells
    assert {"75.0%", "100.0%", "55.1% to 88.0%"} <= page.cells
    assert {"12.3", "8.23", "outlier channels"} <= page.cells
    assert "tiny: keys are hard to quantise: 3.21, threshold 2.5" in page.text


@pytest.mark.parametrize(
    ("rows", "measure"),
    [
        ([kl_row()], "kl"),
        ([ppl_row()], "ppl"),
        ([needle_row()], "needle"),
        ([profile_row()], "profile"),
    ],
)
def test_measures_without_a_row_have_no_section(rows, measure):
    text = Page(report(rows)).text
    assert {name for name, title in TITLES.items() if title in text} == {measure}


def test_only_the_reference_makes_a_table_and_no_figure():
    page = Page(report([kl_row("off", 0.0, interval_95=[0.0, 0.0])]))
    assert "off" in page.cells
    assert "svg" not in {tag for tag, _ in page.tags}


def test_the_law_and_arms_out_of_order_are_in_words(page):
    assert re.search(
        r"tiny turbo:k8v\*: falls 3\.\d+ times per bit \(3\.\d+ to 3\.\d+\)", page.text
    )
    assert "more bits have the smaller KL" in page.text
    broken = Page(report([kl_row("turbo:k8v3", 0.01), kl_row("turbo:k8v4", 0.02)])).text
    assert "Not in order: tiny: turbo:k8v4 has more bits than turbo:k8v3" in broken
    assert "more bits have the smaller KL" not in broken


def test_rows_of_two_settings_are_two_sections_and_share_no_figure():
    appended = [kl_row(window=WINDOW | {"build": "append"}), kl_row(dtype="bfloat16")]
    page = Page(report([kl_row(), *appended]))
    names = [tag for tag, _ in page.tags]
    assert names.count("svg") == 3
    assert page.text.count(TITLES["kl"]) == 3
    assert {"build append", "bfloat16"} <= set(re.findall(r"build append|bfloat16", page.text))


@pytest.mark.parametrize(
    "name",
    ["<script>alert(1)</script>", "</svg><script>", "\"'><img src=//x>", "{{ 7*7 }}", "\ud800"],
)
def test_a_hostile_name_stays_text(name):
    fields = {field: f"{name} {field}" for field in ("model", "machine", "command")}
    reason = f"{name} reason"
    change = fields | {"kept": {reason: [1]}}
    rows = [kl_row(**change), ppl_row(**change), kl_row("turbo:k8v3@layer0", **change)]
    rows += [needle_row(**change), profile_row(**change)]
    page = Page(report(rows))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    words = " ".join(page.words)
    assert [text for text in (*fields.values(), reason) if text not in words] == []


def test_rows_that_contradict_each_other_are_refused():
    with pytest.raises(EvaluationError, match="two rows measure kl turbo:k8v3 of tiny"):
        report([kl_row(), kl_row(kl=0.5)])


def run(tmp_path, rows, name="report.html", end="\n"):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + end)
    return CliRunner().invoke(main, ["eval", "report", str(file), "--output", str(tmp_path / name)])


def test_the_command_writes_the_page(tmp_path):
    result = run(tmp_path, [*ROWS, kl_row(model="\ud800")])
    assert (result.exit_code, result.output) == (0, "")
    assert Page((tmp_path / "report.html").read_text(encoding="utf-8")).text.startswith(" ")


def test_another_suffix_is_a_usage_error_and_leaves_rows_alone(tmp_path):
    result = run(tmp_path, ROWS, "rows.jsonl")
    assert result.exit_code == 2
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(ROWS)


def test_rows_that_contradict_each_other_end_with_one_error_and_no_page(tmp_path):
    result = run(tmp_path, [kl_row(), kl_row(kl=0.5)])
    assert (result.exit_code, result.stderr[:24]) == (1, "Error: two rows measure ")
    assert not (tmp_path / "report.html").exists()


def test_a_last_row_that_is_not_whole_is_left_out_and_said(tmp_path):
    result = run(tmp_path, [kl_row(), ppl_row()], end="")
    assert result.exit_code == 0
    assert "its last row is not whole" in result.stderr
    assert TITLES["ppl"] not in (tmp_path / "report.html").read_text(encoding="utf-8")
