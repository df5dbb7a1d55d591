"""docs/stats.md names every field and every metric, and none that there is not."""

import re
from pathlib import Path

import pytest

import kvstow

pytest.importorskip("starlette")
metrics = pytest.importorskip("kvstow.serve.metrics")
STATS = pytest.importorskip("tests.browser.site").STATS
PAGE = (Path(kvstow.__file__).parents[2] / "docs" / "stats.md").read_text(encoding="utf-8")
FREE = {
    "requests.refused",
    "versions",
    "attention_calls",
    "layers.by_kind",
    "layers.by_scheme",
    "layers.by_path",
}  # their keys are words of a model or an error
JSON, METRICS = PAGE.split("\n## Metrics\n")


def leaves(value, path=""):
    if isinstance(value, dict) and path not in FREE:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}".strip("."))
    else:
        yield path


def named():
    rows = re.findall(r"^\| (`[^|]+) \|", JSON, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_every_field_is_explained():
    for path in leaves(STATS.as_dict()):
        parts = path.split(".")
        above = {".".join(parts[: i + 1]) for i in range(len(parts))}
        assert above & named(), path
        assert path in named() or re.search(rf"`{parts[-1]}\b", JSON), path


def test_no_field_is_explained_that_there_is_not():
    document = STATS.as_dict()
    for name in named() - {"_bytes", "_s", "per_s"}:
        value = document
        for part in name.split("."):
            assert part in value, name
            value = value[part]


def test_every_metric_is_listed_and_no_other():
    listed = set(re.findall(r"`(kvstow_\w+)`", METRICS))
    made = set()
    for family in metrics.Metrics(lambda: STATS).collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        made.add(family.name + suffix)
    assert listed == made
