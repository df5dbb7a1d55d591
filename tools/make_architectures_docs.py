"""Write `docs/architectures.md` from what `attach` does with a tiny model of each architecture.

Run it after a change of `attach`, or of mlx-lm's version.

Usage: python tools/make_architectures_docs.py
"""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kvstow  # noqa: E402
from tests.integration import architectures  # noqa: E402

SCHEME = "turbo:k8v8"
HEAD = """\
# Architectures

What `attach` does with each architecture of mlx-lm {version}, found by attaching {scheme} to a tiny
model of each. Written by `tools/make_architectures_docs.py`: run it, and do not edit this page.

- *quantised* counts entries of the model's prompt cache, which may be fewer or more than its
  layers. It is that of the tiny model, whose layers are of every kind that the architecture has.
- *path* is how attention reaches what is stored: *deferred* un-rotates the output, *eager* decodes
  keys and values first, since the model's own code needs arrays. Results are the same.
- A layer that is kept is as it is without kvstow, in memory and in result.

Each of them that is not refused is run as well, and its logits are compared with those of the
definition in numpy and of no scheme (`tests/integration/test_architectures.py`). Nothing here is
about quality: that depends on the weights, and `kvstow eval` measures it.

{counts}

| architecture | quantised | path | kept, refused, or why eager |
|---|---|---|---|
"""
# Python's words for what mlx-lm's code asked of a packed window.
NEEDS_ARRAYS = "its code computes with keys and values itself"


def page() -> str:
    """The text of docs/architectures.md."""
    rows = [row(name) for name in architectures.names()]
    kinds = [path for _, _, path, _ in rows]
    counts = ", ".join(
        f"{kinds.count(kind)} {text}"
        for kind, text in (
            ("deferred", "deferred"),
            ("eager", "eager"),
            ("refused", "refused"),
            ("not run", "not run here"),
        )
    )
    head = HEAD.format(version=f"{version('mlx-lm')}", scheme=SCHEME, counts=f"{counts}.")
    return head + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def row(name: str) -> tuple[str, str, str, str]:
    """The cells of one architecture."""
    if reason := architectures.NOT_TINY.get(name):
        return name, "", "not run", reason
    model = architectures.build(name)
    try:
        with kvstow.attached(model, SCHEME) as report:
            notes = "; ".join(_notes(report))
            return name, f"{report.n_quantised} of {len(report.layers)}", report.fetch, notes
    except kvstow.UnsupportedModel as error:
        return name, "none", "refused", str(error).removeprefix(f"{SCHEME} ")


def _notes(report: kvstow.AttachReport) -> Iterator[str]:
    for reason, indices in report.kept.items():
        yield f"{len(indices)} kept: {reason}"
    if report.fetch_reason:
        is_python = report.fetch_reason.startswith(("TypeError", "AttributeError"))
        yield f"eager: {NEEDS_ARRAYS if is_python else report.fetch_reason.split(': ', 1)[-1]}"


if __name__ == "__main__":
    (ROOT / "docs" / "architectures.md").write_text(page(), encoding="utf-8")
