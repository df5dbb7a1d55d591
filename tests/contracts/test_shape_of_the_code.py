"""Limits a reader relies on: small files, and a public API that is a decision."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest

import kvstow

PACKAGE = Path(kvstow.__file__).parent
ROOT = PACKAGE.parent.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
GENERATED = {"tables.py"}
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "NOTICE"])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_module_is_longer_than_300_lines(path):
    if path.name not in GENERATED:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_module_begins_with_what_it_is(path):
    assert path.read_text(encoding="utf-8").startswith('"""')


def test_the_public_api_is_sorted():
    assert list(kvstow.__all__) == sorted(set(kvstow.__all__))


def test_every_name_of_the_package_is_public_or_private_on_purpose():
    ours = {
        key
        for key, value in vars(kvstow).items()
        if not key.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", "").startswith("kvstow")
    }
    assert ours <= set(kvstow.__all__)


@pytest.mark.mlx
@pytest.mark.parametrize("public", kvstow.__all__)
def test_every_public_name_exists_and_is_documented(public):
    assert inspect.getdoc(getattr(kvstow, public))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_no_page_holds_a_path_of_the_machine_it_was_written_on(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users|private|var)/\S*", text)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_link_between_pages_leads_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8"))
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (path.parent / link).exists()] == []


def test_the_scripts_named_in_the_readme_exist_and_are_executable():
    named = set(re.findall(r"(?<![\w/])(scripts/\w+)", README))
    assert {"scripts/demo", "scripts/test"} <= named
    assert all((ROOT / script).stat().st_mode & 0o111 for script in named)


def test_every_extra_named_in_the_pages_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    named = {e for group in re.findall(r"kvstow\[([\w,]+)\]", pages) for e in group.split(",")}
    assert named <= set(project["optional-dependencies"])
