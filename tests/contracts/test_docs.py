"""Numbers in the pages are those of the code, or of recorded rows."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvstow
from kvstow.codec.reference import pack_bits
from kvstow.codec.tables import TABLE_SET
from kvstow.scheme import HEAD_DIMS, KEY_BITS, VALUE_BITS, Turbo

DOCS = Path(kvstow.__file__).parents[2] / "docs"
FORMAT = (DOCS / "format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("key_bits", KEY_BITS)
@pytest.mark.parametrize("value_bits", VALUE_BITS)
def test_the_sizes_in_the_format_page_are_those_of_the_scheme(key_bits, value_bits):
    scheme = Turbo(key_bits, value_bits)
    bits = scheme.bits_per_value(128)
    sizes = [f"{scheme.bytes_per_token(head_dim)}" for head_dim in HEAD_DIMS]
    assert "| " + " | ".join([str(scheme), f"{bits}", *sizes, f"{16 / bits:.2f}"]) + " |" in FORMAT


def test_the_packing_example_in_the_format_page_is_what_is_packed():
    packed = pack_bits(np.array([1, 2, 3, 4, 5, 6, 7, 0], np.uint8), bits=3)
    assert f"`{packed.tobytes().hex(' ')}`" in FORMAT


def test_the_format_page_names_the_table_set_in_use():
    assert f"`{TABLE_SET}`" in FORMAT


def recorded(name):
    lines = (DOCS.parent / "benchmarks" / "results" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_recorded_commands_name_no_place_of_one_machine():
    for path in (DOCS.parent / "benchmarks" / "results").glob("*.jsonl"):
        for row in recorded(path.name):
            words = (row.get("command") or "").split()
            assert not [word for word in words if word.startswith(("/", "~"))], path.name


def test_the_speed_and_room_of_servers_are_the_recorded_ones():
    page = (DOCS / "server.md").read_text(encoding="utf-8")
    said = {
        "mlx-lm": "`mlx_lm.server`, plain caches",
        "off": "`kvstow serve --kv-quant off`",
        "turbo": "`kvstow serve --kv-quant turbo`",
    }
    for row in recorded("server.jsonl"):
        name = said.pop(row["server"])
        assert f"| {name} | {row['tokens_per_s']:.2f} | {row['vs_mlx_lm']:.3f} |" in page
    assert not said
    for row in recorded("contexts.jsonl"):
        assert f"| `{row['scheme']}` | {row['most_at_once']} | {row['vs_off']:.3f} |" in page


def test_the_restart_in_the_readme_is_the_recorded_one():
    rows = recorded("restart.jsonl")
    (row,) = (x for x in rows if (x["scheme"], x["tokens"]) == ("turbo:k8v3", 4096))
    readme = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"4096 tokens in {row['load_s'] + row['identify_s']:.2f} s from disk, "
        f"{row['identify_s']:.2f} s of them to identify the model, where it reads them in "
        f"{row['prefill_s']:.0f} s"
    ) in readme
    assert row["commit"] in readme
