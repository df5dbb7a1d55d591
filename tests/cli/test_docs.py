import runpy
from pathlib import Path

import kvstow

ROOT = Path(kvstow.__file__).parents[2]


def test_the_page_of_commands_is_what_the_commands_say():
    page = runpy.run_path(str(ROOT / "tools" / "make_cli_docs.py"))["page"]()
    stored = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert stored == page, "run tools/make_cli_docs.py"
