"""A long prompt is read once; what is on disk is listed, and removed by name."""

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.mlx
mx = pytest.importorskip("mlx.core")
files = pytest.importorskip("kvstow.snapshot.prefixes.files")

LONG = "hi there, " * 18  # one token a letter; with the words of the template below 256


@pytest.fixture
def run(cli, tiny, tmp_path):
    """The JSON of a run of the tiny llama with a prefix cache."""

    def run(*options, prompt=LONG, model=tiny.llama, root=tmp_path / "p"):
        args = ["--model", model, "--prompt", prompt, "--max-tokens", 4, "--json"]
        result = cli("generate", *args, "--prefix-cache", root, *options)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


@pytest.fixture
def ls(cli, tmp_path):
    """What is listed, as JSON."""

    def run(*args, root=tmp_path / "p"):
        result = cli("cache", "ls", *args, "--prefix-cache", root, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def corrupt(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("scheme", ["off", "turbo:k8v3", "affine:8"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_second_run_reads_one_token_and_answers_the_same(run, tiny, scheme, model):
    options, model = ("--kv-quant", scheme), getattr(tiny, model)
    first, second = (run(*options, model=model) for _ in range(2))
    assert second["text"] == first["text"]
    assert (second["prompt_tokens"], second["resumed_tokens"]) == (1, first["prompt_tokens"] - 1)
    assert second["kv_tokens"] == first["kv_tokens"]
    wrote, read = first["prefix_cache"], second["prefix_cache"]
    assert (wrote["writes"], wrote["disk_hits"], wrote["misses"]) == (1, 0, 1)
    assert (read["writes"], read["disk_hits"], read["misses"]) == (0, 1, 0)
    assert read["disk_tokens"] == second["resumed_tokens"]


def test_another_question_about_the_same_text_reads_the_question_alone(run):
    first = run("--no-chat-template", "--kv-quant", "off")
    other = run("--no-chat-template", "--kv-quant", "off", prompt=LONG[:-2] + "hello")
    assert other["resumed_tokens"] == first["prompt_tokens"] - 2
    alone = run("--no-chat-template", "--kv-quant", "off", prompt=LONG[:-2] + "hello", root="auto")
    assert alone["text"] == other["text"]
    assert alone["resumed_tokens"] == 0


def test_a_directory_that_can_only_be_read_is_warned_of(cli, tiny, tmp_path, monkeypatch):
    really = os.access

    def access(path, mode):
        return really(path, mode) and (mode == os.F_OK or Path(path) != tmp_path)

    monkeypatch.setattr(os, "access", access)
    args = ("generate", "--model", tiny.llama, "--prompt", "hi", "--max-tokens", 1)
    said = cli(*args, "--prefix-cache", tmp_path)
    assert said.exit_code == 0
    assert f"warning: --prefix-cache {tmp_path} cannot be written" in said.stderr
    said = cli(*args, "--prefix-cache", tmp_path / "more" / "prefixes")
    assert said.exit_code == 2
    assert f"cannot be made: {tmp_path} is no directory to write in" in said.stderr


def test_a_short_prompt_is_not_kept(run, ls):
    assert run(prompt="hi there")["prefix_cache"]["writes"] == 0
    assert ls() == []


def test_auto_is_a_directory_under_kvstow_cache(run, ls, tiny):
    run(root="auto")
    paths = [Path(saved["file"]) for saved in ls(root="auto")]
    assert paths
    assert all(path.is_relative_to(tiny.cache / "prefixes") for path in paths)


def test_the_summary_says_what_came_from_disk(cli, tiny, tmp_path):
    args = ("generate", "--model", tiny.llama, "--prompt", LONG, "--max-tokens", 2)
    first, second = (cli(*args, "--prefix-cache", tmp_path).stderr for _ in range(2))
    assert "prefixes    0 tokens read, " in first
    assert f" tokens read, 0 bytes written in {tmp_path}" in second
    assert "prefixes" not in cli(*args).stderr


def test_a_damaged_file_costs_a_warning_and_no_answer(cli, run, tiny, tmp_path):
    expected = run()
    (entry,) = files.entries(tmp_path / "p")
    corrupt(entry.path)
    args = ("--model", tiny.llama, "--prompt", LONG, "--max-tokens", 4, "--json")
    result = cli("generate", *args, "--prefix-cache", tmp_path / "p")
    said = json.loads(result.stdout)
    assert result.stderr.count("warning: prefix cache: ") == 1
    assert (said["text"], said["prefix_cache"]["errors"]) == (expected["text"], 1)
    assert run()["prefix_cache"]["disk_hits"] == 1


def test_a_directory_that_cannot_be_written_costs_a_warning_and_no_answer(
    cli, run, tiny, tmp_path, monkeypatch
):
    expected = run(root=tmp_path / "other")["text"]

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    args = ("--model", tiny.llama, "--prompt", LONG, "--max-tokens", 4, "--json")
    result = cli("generate", *args, "--prefix-cache", tmp_path / "p")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["text"] == expected
    assert "Read-only file system: no more prefixes are written" in result.stderr


def test_files_take_no_more_than_they_may(run, ls):
    run()
    (first,) = ls()
    other = "there is, " * 18
    run("--prefix-cache-bytes", int(first["bytes"] * 1.5), prompt=other)
    (second,) = ls()
    assert second["name"] != first["name"]


@pytest.mark.usefixtures("no_load")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--prefix-cache-bytes", "1GB"), "--prefix-cache-bytes needs --prefix-cache"),
        (("--prefix-cache", "x", "--draft-model", "smollm2"), "--draft-model has not read"),
        (("--prefix-cache", "x", "--prefix-cache-bytes", "many"), "'many' is not a size"),
        (("--prefix-cache", os.devnull), "is there and no directory"),
    ],
)
def test_options_that_contradict_each_other_are_refused(refused, tiny, options, why):
    args = ("generate", "--model", tiny.llama, "--prompt", "x", *options)
    assert why in refused(*args, code=2)


def test_resuming_and_a_prefix_cache_are_two_ways(refused, run, ls, tiny, tmp_path):
    run()
    args = ("generate", "--model", tiny.llama, "--prompt", "x", "--prefix-cache", tmp_path / "p")
    assert "give one of" in refused(*args, "--resume", ls()[0]["file"], code=2)


# --- ls


def test_listing_says_what_each_file_holds_and_the_last_used_comes_first(cli, run, ls, tiny):
    whole = run()
    run("--kv-quant", "turbo:k8v4")
    run()
    first, second = ls()
    assert (first["scheme"], second["scheme"]) == ("turbo:k8v3", "turbo:k8v4")
    assert first["model"] == str(tiny.llama)
    assert first["tokens"] == whole["prompt_tokens"] - 1
    assert first["bytes"] == Path(first["file"]).stat().st_size
    assert first["problem"] is None
    said = cli("cache", "show", first["file"], "--json")
    assert json.loads(said.stdout)["tokens"] == first["tokens"]


def test_the_table_has_what_the_json_has(cli, run, ls, tmp_path):
    run()
    (entry,) = ls()
    shown = cli("cache", "ls", "--prefix-cache", tmp_path / "p").stdout
    assert all(x in shown for x in (entry["name"], f"{entry['tokens']:,}", "turbo:k8v3", "1 in "))
    empty = cli("cache", "ls", "--prefix-cache", tmp_path / "none")
    assert (empty.exit_code, empty.stdout) == (0, f"no prefixes in {tmp_path / 'none'}\n")


def test_files_saved_by_hand_are_listed_and_removed_by_their_paths(
    cli, refused, ls, tiny, tmp_path
):
    path = tmp_path / "x.safetensors"
    args = ("cache", "save", "--model", tiny.llama, "--prompt", "hi", "--output", path)
    assert cli(*args).exit_code == 0
    (saved,) = ls(path)
    assert (saved["name"], saved["tokens"], saved["model"]) == (str(path), 2, str(tiny.llama))
    assert "there is no file" in refused("cache", "ls", tmp_path / "none", code=2)
    assert "removed 1" in cli("cache", "rm", path).stdout
    assert not path.exists()


def test_a_damaged_header_is_listed_with_what_is_wrong(run, ls, tmp_path):
    run()
    (entry,) = files.entries(tmp_path / "p")
    raw = bytearray(entry.path.read_bytes())
    raw[200] ^= 1
    entry.path.write_bytes(raw)
    (listed,) = ls()
    assert (listed["tokens"], listed["problem"]) == (
        None,
        "the checksum of the header does not fit",
    )


# --- rm


def rm(cli, tmp_path, *args):
    result = cli("cache", "rm", *args, "--prefix-cache", tmp_path / "p", "--json")
    assert result.exit_code == 0, result.output
    return len(json.loads(result.stdout)["removed"])


def test_removing_takes_names_models_schemes_or_all(cli, run, ls, tiny, tmp_path):
    for model in (tiny.llama, tiny.other):
        for scheme in ("turbo:k8v3", "turbo:k8v4"):
            run("--kv-quant", scheme, model=model)
    assert len(ls()) == 4
    assert rm(cli, tmp_path, "--model", tiny.other, "--scheme", "turbo") == 1
    assert {(x["model"], x["scheme"]) for x in ls()} == {
        (str(tiny.other), "turbo:k8v4"),
        (str(tiny.llama), "turbo:k8v3"),
        (str(tiny.llama), "turbo:k8v4"),
    }
    assert rm(cli, tmp_path, "--scheme", "turbo:k8v4") == 2
    assert rm(cli, tmp_path, "--model", "nobody") == 0
    assert rm(cli, tmp_path, ls()[0]["name"]) == 1
    run()
    assert (rm(cli, tmp_path, "--all"), ls()) == (1, [])


def test_nothing_is_removed_that_was_not_named(refused, run, ls, tiny, tmp_path):
    run()
    where = ("--prefix-cache", tmp_path / "p")
    for args in ((), ("--all", "--scheme", "off"), (ls()[0]["name"], "--all")):
        assert "give one of" in refused("cache", "rm", *args, *where, code=2)
    assert "neither a prefix" in refused("cache", "rm", "abcdef-01234567", *where, code=2)
    assert "no saved cache" in refused("cache", "rm", tiny.llama, *where, code=2)
    assert "--scheme: " in refused("cache", "rm", "--scheme", "turbo:k9v9", *where, code=2)
    assert len(ls()) == 1
    assert tiny.llama.exists()


def test_two_prefixes_of_one_name_are_told_apart_by_their_files(
    refused, run, ls, tmp_path, monkeypatch
):
    saved = pytest.importorskip("kvstow.cli.cache.saved")
    run()
    run("--kv-quant", "off")
    monkeypatch.setattr(saved, "name_of", lambda _: "same")
    said = refused("cache", "rm", "same", "--prefix-cache", tmp_path / "p", code=2)
    assert "the name of 2 prefixes" in said
    assert len(ls()) == 2


def test_a_file_that_cannot_be_removed_is_an_error(cli, run, tmp_path, monkeypatch):
    run()
    monkeypatch.setattr(files, "remove", lambda _: False)
    result = cli("cache", "rm", "--all", "--prefix-cache", tmp_path / "p")
    assert result.exit_code == 1
    assert "1 cannot be removed, as " in result.stderr


# --- gc


def test_collecting_removes_what_is_damaged_unfinished_or_too_much(cli, run, ls, tmp_path):
    for prompt in (LONG, "there is, " * 18, "hello hi, " * 18):
        run(prompt=prompt)
    newest, middle, oldest = ls()
    root = tmp_path / "p"
    victim = files.entries(root)[1].path
    corrupt(victim)
    files.os.utime(victim, ns=(10**18, 10**18))  # it does not matter when it was used
    old, young = (victim.with_name(f".{victim.name}.{x}") for x in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"x" * 10)
    files.os.utime(old, (1, 1))
    args = ("cache", "gc", "--prefix-cache", root, "--json", "--max-bytes", newest["bytes"])

    tried = json.loads(cli(*args, "--dry-run").stdout)
    assert len(ls()) == 3
    assert old.exists()
    said = json.loads(cli(*args).stdout)
    assert said == tried | {"dry_run": False}
    assert {x["file"]: x["why"] for x in said["removed"]} == {
        str(old): "unfinished",
        middle["file"]: "the checksum of tensor 1.value_scales does not fit",
        oldest["file"]: "not used",
    }
    assert (said["checked"], said["left"]) == (3, [])
    assert said["bytes"] == 10 + middle["bytes"] + oldest["bytes"]
    assert [x["name"] for x in ls()] == [newest["name"]]
    assert young.exists()


def test_collecting_without_a_size_removes_nothing_that_is_whole(cli, run, ls, tmp_path):
    run()
    result = cli("cache", "gc", "--prefix-cache", tmp_path / "p")
    assert result.stdout == "checked 1; 0 removed, 0 bytes\n"
    assert len(ls()) == 1
    assert cli("cache", "gc", "--prefix-cache", tmp_path / "none").exit_code == 0


def test_what_cannot_be_removed_is_said(cli, run, tmp_path, monkeypatch):
    run()
    corrupt(files.entries(tmp_path / "p")[0].path)
    monkeypatch.setattr(files, "remove", lambda _: False)
    said = json.loads(cli("cache", "gc", "--prefix-cache", tmp_path / "p", "--json").stdout)
    assert (said["removed"], said["bytes"]) == ([], 0)
    assert said["left"][0]["why"] == "cannot be removed"
