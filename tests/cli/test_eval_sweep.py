"""`kvstow eval sweep` as a program: one file, the rows of four verbs, and what it refuses."""

import json
import shlex
import sys

import pytest
from click.testing import CliRunner

from kvstow.cli import main

pytestmark = [pytest.mark.mlx, pytest.mark.xdist_group("sweep")]
pytest.importorskip("mlx.core")
sweep_module = pytest.importorskip("kvstow.cli.eval.sweep")
run_module = pytest.importorskip("kvstow.cli.eval.run")
needle = pytest.importorskip("kvstow.evaluate.needle")

MEASURES = ("kl", "ppl", "needle", "profile")
ARMS = ("--arm", "off", "--arm", "turbo:k8v3")
IDENTITIES = [
    *[(measure, arm) for measure in MEASURES[:3] for arm in ARMS[1::2]],
    ("profile", None),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model whose context holds every default window."""
    files = pytest.importorskip("tests.models.conftest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CONTEXT", 2048)
        return files.gguf_writer(tmp_path_factory.mktemp("long"))()


@pytest.fixture(scope="module")
def swept(tiny, model, tmp_path_factory):
    """What a sweep wrote, where the model finds every fact."""
    output = tmp_path_factory.mktemp("swept") / "rows.jsonl"
    ask = ["eval", "sweep", "--model", model, *ARMS, "--texts", 2, "--output", output]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needle, "_found", lambda *_: True)
        patch.setenv("KVSTOW_CACHE", str(tiny.cache))
        result = CliRunner().invoke(main, list(map(str, ask)))
    assert (result.exit_code, result.exception) == (0, None), result.output
    return output.read_text()


@pytest.fixture
def output(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.fixture
def sweep(cli, model, output):
    """Run a sweep of two texts into `output`."""

    def run(*options, arms=ARMS):
        return cli(
            *("eval", "sweep", "--model", model, *arms, "--texts", 2, "--output", output), *options
        )

    return run


@pytest.fixture
def no_measuring(monkeypatch):
    """Fail where anything would be measured."""
    for name in sweep_module.MODULES.values():
        module = pytest.importorskip(f"kvstow.evaluate.{name}")
        if name == "profile":
            monkeypatch.setattr(module, "profile", lambda *_: pytest.fail("measured"))
        else:
            monkeypatch.setattr(module.Reference, "score", lambda *_, **__: pytest.fail("measured"))


@pytest.fixture
def no_loading(monkeypatch):
    monkeypatch.setattr(run_module, "load", lambda *_, **__: pytest.fail("weights are loaded"))


def rows_in(text):
    return [json.loads(line) for line in text.splitlines()]


def identities(path):
    return [(row["measure"], row.get("arm")) for row in rows_in(path.read_text())]


def test_the_help_says_how_many_tokens_an_arm_reads():
    shown = " ".join(sweep_module.sweep.help.split())
    modules = [sweep_module.require(f"kvstow.evaluate.{n}") for n in ("kl", "perplexity", "needle")]
    kl, ppl, facts = (module.Window().n_read(run_module.N_TEXTS) for module in modules)
    said = (
        f"kl reads {kl:,} tokens of {run_module.N_TEXTS} texts, ppl {ppl:,}, and needle {facts:,}"
    )
    assert said in shown


def test_every_measure_of_every_arm_is_a_row(swept):
    rows = rows_in(swept)
    assert [(row["measure"], row.get("arm")) for row in rows] == IDENTITIES


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize("verb", MEASURES)
def test_what_a_sweep_wrote_its_verbs_do_not_measure_again(cli, model, swept, output, verb):
    output.write_text(swept)
    arms = () if verb == "profile" else ARMS
    texts = () if verb == "needle" else ("--texts", 2)
    ask = ("eval", verb, "--model", model, *arms, *texts, "--output", output, "--json")
    result = cli(*ask)
    assert result.exit_code == 0, result.output
    assert rows_in(result.stdout) == [row for row in rows_in(swept) if row["measure"] == verb]
    assert output.read_text() == swept


def test_what_the_verbs_wrote_a_sweep_does_not_measure_again(cli, model, sweep, output, request):
    for verb in ("profile", "kl"):
        arms = () if verb == "profile" else ARMS
        ask = ("eval", verb, "--model", model, *arms, "--texts", 2, "--output", output)
        assert cli(*ask).exit_code == 0
    written = output.read_text()
    request.getfixturevalue("no_measuring")
    result = sweep("--measure", "kl", "--measure", "profile", "--json")
    assert result.exit_code == 0, result.output
    profile, *kl = rows_in(written)
    assert rows_in(result.stdout) == [*kl, profile]
    assert output.read_text() == written


@pytest.mark.parametrize("lost", [1, 3, 6])
def test_a_run_that_was_cut_off_goes_on_where_it_stopped(sweep, swept, output, monkeypatch, lost):
    monkeypatch.setattr(needle, "_found", lambda *_: True)
    kept = swept.splitlines(keepends=True)[:-lost]
    output.write_text("".join(kept))
    assert sweep().exit_code == 0
    assert output.read_text().startswith("".join(kept))
    assert identities(output) == IDENTITIES


def test_an_interrupt_loses_no_row_and_says_where_they_are(sweep, output, monkeypatch):
    perplexity = pytest.importorskip("kvstow.evaluate.perplexity")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(perplexity.Reference, "score", interrupt)
        result = sweep("--measure", "kl", "--measure", "ppl")
    assert (result.exit_code, result.stdout) == (130, "")
    assert f"what was measured is in {output}" in result.stderr
    assert identities(output) == IDENTITIES[:2]
    assert sweep("--measure", "kl", "--measure", "ppl").exit_code == 0
    assert identities(output) == IDENTITIES[:4]


@pytest.mark.usefixtures("no_measuring")
def test_people_get_the_tables_of_the_verbs_and_two_commands_that_run(sweep, swept, output, cli):
    pytest.importorskip("matplotlib")
    output.write_text(swept)
    result = sweep()
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    titles = ("KL in nats against", "perplexity of", "facts found by", "Keys and values of")
    assert [title for title in titles if title in shown] == [*titles]
    assert "The keys are " in result.stdout
    commands = [shlex.split(line) for line in result.stdout.splitlines()[-2:]]
    assert [command[2] for command in commands] == ["plot", "report"]
    for _, *command in commands:
        assert cli(*command).exit_code == 0
    assert output.with_suffix(".svg").exists()
    assert output.with_suffix(".html").exists()


@pytest.mark.usefixtures("no_measuring")
@pytest.mark.parametrize(
    ("measures", "commands"),
    [(("needle",), ["plot --kind needle", "report"]), (("ppl", "profile"), ["report"])],
)
def test_only_a_figure_that_can_be_drawn_is_offered(cli, model, swept, output, measures, commands):
    output.write_text(swept)
    options = [part for measure in measures for part in ("--measure", measure)]
    ask = ("eval", "sweep", "--model", model, "--output", output, *options, *ARMS)
    if "needle" not in measures:
        ask = (*ask, "--texts", 2)
    lines = [line for line in cli(*ask).stdout.splitlines() if line.startswith("  kvstow eval ")]
    assert len(lines) == len(commands)
    assert all(
        set(command.split()) <= set(line.split())
        for line, command in zip(lines, commands, strict=True)
    )


def test_needles_that_the_model_does_not_find_do_not_lose_the_other_measures(sweep, swept, output):
    kept = [line for line in swept.splitlines(keepends=True) if '"measure": "needle"' not in line]
    output.write_text("".join(kept))
    result = sweep()
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stderr.splitlines() if "not measured" in line)
    said = "needle off, turbo:k8v3: not measured: without quantisation this model finds"
    assert line.startswith(said)
    assert "facts found by" not in result.stdout
    assert "Keys and values of" in result.stdout
    assert output.read_text() == "".join(kept)


def test_a_sweep_that_measures_nothing_at_all_is_an_error(refused, model, output):
    ask = ("eval", "sweep", "--model", model, *ARMS, "--output", output, "--measure", "needle")
    said = refused(*ask, code=1)
    assert "this model finds" in said
    assert "Error: nothing could be measured" in said
    assert not output.exists()


@pytest.mark.usefixtures("no_measuring")
def test_arms_that_cannot_be_measured_are_said_and_the_others_go_on(sweep, swept, output):
    output.write_text(swept)
    result = sweep(arms=(*ARMS, "--arm", "turbo:k8v3@layer9", *ARMS))
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.stderr.splitlines() if "not measured" in line)
    assert line.startswith("turbo:k8v3@layer9: not measured:")
    assert "those that can are [0, 1]" in line
    assert output.read_text() == swept


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("turbo:k8v3@layer9", ["turbo:k8v3@layer9: not measured: cache 9"]),
        ("off@float32", ["Invalid value for '--arm'"]),
        (
            "turbo:k4v3+start5000",
            [
                f"{measure} turbo:k4v3+start5000: not measured: it quantises nothing of {n}"
                for measure, n in (("kl", 158), ("ppl", 384), ("needle", 1023))
            ],
        ),
    ],
)
def test_a_sweep_without_any_arm_left_ends_before_the_model_loads(
    refused, model, output, arm, said
):
    measures = [part for measure in MEASURES[:3] for part in ("--measure", measure)]
    ask = ("eval", "sweep", "--model", model, "--output", output, *measures, "--arm", arm)
    shown = refused(*ask, code=2 if "Invalid" in said[0] else 1)
    assert [line for line in said if line not in shown] == []


def test_an_arm_keeps_the_measures_that_are_long_enough_for_it(sweep, output):
    result = sweep("--measure", "kl", "--measure", "ppl", arms=("--arm", "turbo:k8v3+start384"))
    assert result.exit_code == 0, result.output
    assert "kl turbo:k8v3+start384: not measured: it quantises nothing" in result.stderr
    assert identities(output) == [("ppl", "turbo:k8v3+start384")]


def test_an_arm_that_mlx_cannot_run_here_is_said_and_the_others_go_on(sweep, output, monkeypatch):
    harness = pytest.importorskip("kvstow.evaluate.harness")
    honest = harness.Running.take_over

    def take_over(self, plain):
        if str(self.arm) != "affine:8":
            return honest(self, plain)
        raise RuntimeError("no kernel")

    monkeypatch.setattr(harness.Running, "take_over", take_over)
    result = sweep("--measure", "kl", arms=("--arm", "affine:8", *ARMS))
    assert result.exit_code == 0, result.output
    assert "kl affine:8: not measured: mlx cannot run this here: no kernel" in result.stderr
    assert identities(output) == IDENTITIES[:2]


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "--measure ppl: --tokens 512 does not fit in the model's context of 256 tokens"),
        (("--measure", "needle"), "--measure needle: --length 1024 and 10 tokens of an answer"),
        (("--measure", "kl", "--arm", "turbo:k3v3"), "Invalid value for '--arm'"),
        (("--measure", "bleu"), "Invalid value for '--measure'"),
        (("--measure", "profile", "--arm", "off"), "--arm is for kl, needle, ppl"),
        (("--measure", "needle", "--texts", 2), "--texts is for kl, ppl, profile"),
        (("--measure", "needle", "--source", "python"), "--source is for kl, ppl, profile"),
        (("--output", "missing/rows.jsonl"), "cannot write"),
    ],
)
def test_what_is_wrong_is_a_usage_error_before_the_model_loads(refused, tiny, output, options, why):
    ask = ("eval", "sweep", "--model", tiny.llama, "--output", output, *options)
    assert why in " ".join(refused(*ask, code=2).split())


def test_a_file_for_the_rows_is_required(refused, tiny):
    assert "Missing option '--output'" in refused("eval", "sweep", "--model", tiny.llama, code=2)


@pytest.mark.usefixtures("no_loading")
def test_a_missing_extra_is_named_before_the_model_loads(refused, model, output, monkeypatch):
    monkeypatch.delitem(sys.modules, "kvstow.evaluate.kl", raising=False)
    monkeypatch.setitem(sys.modules, "mlx_lm.models.cache", None)
    said = refused("eval", "sweep", "--model", model, "--output", output, code=1)
    assert "pip install 'kvstow[mlx]'" in said


@pytest.mark.usefixtures("no_loading")
def test_more_texts_than_there_are_are_refused_before_the_model_loads(
    refused, model, output, tmp_path
):
    text = tmp_path / "own.txt"
    text.write_text("short")
    ask = ("eval", "sweep", "--model", model, "--output", output, "--text", text, "--texts", 2)
    assert "2 texts are needed, there are 1" in refused(*ask, code=1)


@pytest.mark.usefixtures("no_measuring")
def test_a_text_too_short_for_one_measure_is_refused_before_any_is_taken(
    refused, model, output, tmp_path
):
    text = tmp_path / "own.txt"
    text.write_text("ab " * 150)
    ask = ("eval", "sweep", "--model", model, "--output", output, "--text", text)
    said = refused(*ask, code=1)
    assert "--measure ppl: the text file/own.txt has" in said
    assert not output.exists()


def test_the_bar_is_of_what_is_left_never_goes_back_and_ends_full(
    sweep, swept, output, monkeypatch
):
    moves = []
    output.write_text(swept.splitlines(keepends=True)[0])

    class Bar:
        def __enter__(self):
            return lambda done, total, label: moves.append((done / total, label))

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(sweep_module, "progress_bar", lambda *_: Bar())
    assert sweep("--measure", "kl", "--measure", "ppl").exit_code == 0
    shares = [share for share, _ in moves]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(1)
    assert {label for _, label in moves} == {"kl turbo:k8v3", "ppl off", "ppl turbo:k8v3"}


def test_a_profile_alone_asks_nothing_of_arms(cli, model, output, monkeypatch):
    asked = []
    monkeypatch.setattr(run_module, "refuse", lambda _, schemes, *__: asked.extend(schemes))
    result = cli(
        *("eval", "sweep", "--model", model, "--texts", 2, "--output", output),
        *("--measure", "profile", "--json"),
    )
    assert result.exit_code == 0, result.output
    assert (identities(output), asked) == ([("profile", None)], [])
