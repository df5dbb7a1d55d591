"""What the page of the format says of files is what the code does."""

import json
from pathlib import Path

import xxhash

import kvstow
from kvstow.snapshot import header, record
from tests.snapshot import made

PAGE = (Path(kvstow.__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")


def test_the_first_bytes_are_those_of_the_page(tmp_path, rng):
    made.mixed(tmp_path / "x", rng)
    raw = (tmp_path / "x").read_bytes()
    (line,) = (x.strip() for x in PAGE.splitlines() if "0123456789abcdef" in x)
    assert (raw[44:48], line[36:40]) == (b"0001", "0001")
    sample = line.replace("0123456789abcdef", raw[58:74].decode()).encode()
    assert raw[8 : 8 + len(sample)] == sample
    assert len(sample) + 8 == header.FIXED_BYTES
    assert header.MAX_HEADER_BYTES == 1 << 24
    assert "at most 2^24 bytes" in PAGE


def test_the_checksum_is_computed_as_the_page_says(tmp_path, rng):
    made.mixed(tmp_path / "x", rng)
    raw = (tmp_path / "x").read_bytes()
    n_header = 8 + int.from_bytes(raw[:8], "little")
    zeroed = raw[:58] + b"0" * 16 + raw[74:n_header]
    assert xxhash.xxh3_64_hexdigest(zeroed).encode() == raw[58:74]
    metadata = json.loads(raw[8:n_header])["__metadata__"]
    assert set(metadata) == {"kvstow_snapshot", "xxh3", "checksums", "manifest"}
    for key in (*metadata, *json.loads(metadata["manifest"])):
        assert f"| `{key}` |" in PAGE


def test_the_page_names_every_kind_number_and_tensor():
    for kind, numbers in record.NUMBERS.items():
        (row,) = (x for x in PAGE.splitlines() if x.startswith(f"| `{kind}` |"))
        assert all(f"`{number}`" in row for number in numbers)
    for stage, names in (
        ("exact", record.EXACT),
        ("packed", record.PACKED),
        ("affine", record.AFFINE),
    ):
        (row,) = (x for x in PAGE.splitlines() if x.startswith(f"| `{stage}` |"))
        assert all(f"`{name}`" in row for name in names)
    assert all(f"`{name}`" in PAGE for name in record.OF_ROWS)
