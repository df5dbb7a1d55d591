"""The page of the server speaks of what there is."""

import re
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

import kvstow
from kvstow.serve.requests import HARMLESS, NOT_DONE, ChatRequest, TextRequest

ROOT = Path(kvstow.__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))
SOURCES = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "src/kvstow/serve").glob("*.py"))


def test_every_parameter_is_on_the_page():
    fields = {*ChatRequest.model_fields, *TextRequest.model_fields}
    assert fields | set(HARMLESS) | set(NOT_DONE) <= WORDS


def test_every_error_code_is_on_the_page_and_none_else():
    codes = set(re.findall(r'code(?:: str)?=? ?=? ?"(\w+)"', SOURCES))
    table = PAGE.partition("## Errors")[2].partition("##")[0]
    named = {
        w
        for row in re.findall(r"^\| [45].*?\|(.*?)\|", table, re.M)
        for w in re.findall(r"`(\w+)`", row)
    }
    assert named == codes


def test_every_option_named_on_the_page_is_one():
    options = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE.partition("## Beside")[0]))
    assert {o for o in mentioned if f"  {o} " not in options} == set()
