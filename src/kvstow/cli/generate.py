"""``kvstow generate``: answer one prompt, and say what the KV cache took."""

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstow.blas import use_fast_blas
from kvstow.cli import draft as drafting
from kvstow.cli import params, prefix_cache, processes
from kvstow.cli import resume as resuming
from kvstow.cli.progress import progress_bar
from kvstow.cli.refuse import check_fetch, refuse
from kvstow.integrations import attached
from kvstow.integrations.report import Fetch
from kvstow.models import load, read_config
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Scheme

if TYPE_CHECKING:
    from kvstow.session import Run, Session, Summary

# Below this many prompt tokens a prefill is over before a bar can be read.
LONG_PROMPT_TOKENS = 512


@click.command()
@params.model
@params.kv_quant
@params.kv_policy
@params.fetch
@params.prompt
@params.prompt_file
@click.option("--system-prompt", help="The system turn of the chat template.")
@params.chat_template
@resuming.option
@prefix_cache.options
@click.option(
    "--max-tokens",
    "-m",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Most tokens to generate.",
)
@click.option(
    "--temp",
    type=params.Finite(min=0),
    default=0.0,
    show_default=True,
    help="Sampling temperature; 0 takes the most likely token.",
)
@click.option("--top-p", type=params.Finite(0, 1), default=0.0, help="Nucleus sampling; 0 is off.")
@click.option(
    "--top-k", type=click.IntRange(min=0), default=0, help="Draw from the k most likely; 0 is off."
)
@click.option(
    "--min-p",
    type=params.Finite(0, 1),
    default=0.0,
    help="Least probability relative to the most likely token's.",
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Of the random generator.")
@drafting.options
@params.dtype
@params.as_json
def generate(
    *,
    model: str,
    kv_quant: Scheme,
    kv_policy: Policy | None,
    fetch: Fetch,
    prompt: str | None,
    prompt_file: Path | None,
    system_prompt: str | None,
    chat_template: bool,
    resume: Path | None,
    kept: prefix_cache.PrefixCache,
    max_tokens: int,
    draft_model: str | None,
    num_draft_tokens: int | None,
    dtype: str | None,
    as_json: bool,
    seed: int | None,
    **sampling: Any,
) -> None:
    """Answer a prompt with the KV cache stored under a scheme.

    The text goes to standard output as it comes; a summary of speed and memory
    follows on standard error. With --json, standard output is one JSON object.

    Started in several processes by mlx.launch, each holds a part of the heads.
    """
    text = read_prompt(prompt, prompt_file)
    check_sampling(sampling)
    resumed = resuming.opened(resume)
    stored = resumed.stored_under(kv_quant, kv_policy)
    check_fetch(fetch, [stored])
    team = processes.launched()
    drafting.check_options(draft_model, num_draft_tokens, team.size)
    check_turn(system_prompt, chat_template)
    resumed.check_options(
        system_prompt=system_prompt,
        draft=draft_model,
        chat_template=chat_template,
        n_processes=team.size,
    )
    kept.check_options(resume=resume, draft=draft_model, n_processes=team.size)
    config = read_config(model)
    refuse(config.config, [stored], fetch, dtype)
    resumed.refuse_other(config.config, stored, fetch, dtype)
    processes.refuse_split(config.config, dtype, team)
    of_draft = Policy.of(stored).default  # rules are about the layers of the other model
    drafting.refuse_draft(config, draft_model, (of_draft, fetch, dtype))
    team.say(use_fast_blas().notice)
    with progress_bar("loading") as step:
        loaded, tokenizer = load(model, dtype=dtype, progress=step, group=team.group)
    runs = require("kvstow.session")
    with (
        attached(loaded, stored, fetch=fetch) as report,
        drafting.loaded_draft(
            draft_model, num_draft_tokens, tokenizer, (of_draft, fetch, dtype)
        ) as draft,
        kept.opened(loaded, tokenizer, model) as on_disk,
    ):
        session: Session = runs.Session(
            loaded, tokenizer, report, context_tokens=config.context_length, draft=draft
        )
        prefix = resumed.load(loaded, tokenizer)
        turn = {"system_prompt": system_prompt, "chat_template": chat_template}
        tokens = _encode(session, text, turn, continued=prefix is not None)
        options = {
            "max_tokens": max_tokens,
            "sampling": runs.Sampling(**sampling, seed=processes.shared_seed(seed, team)),
            "echo": team.is_first and not as_json,
            "on_disk": on_disk,
            **({} if prefix is None else {"prefix": prefix}),
        }
        run, answer = _stream(session, tokens, **options)
        summary = replace(run.summary(), processes=team.size)
    _print(team, answer, summary, kept, as_json=as_json)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of the one prompt source that was given.

    Raises:
        click.UsageError: If none or both were given, or the text is empty or not UTF-8.
    """
    if (prompt is None) == (prompt_file is None):
        got = "both" if prompt is not None else "neither"
        raise click.UsageError(f"give exactly one of --prompt and --prompt-file, got {got}")
    try:
        if prompt_file is not None:
            text, source = prompt_file.read_text(encoding="utf-8-sig"), str(prompt_file)
        elif prompt == "-":
            stdin = b"" if sys.stdin is None else sys.stdin.buffer.read()  # None: it is closed
            text, source = stdin.decode("utf-8-sig"), "standard input"
        else:
            text, source = prompt or "", "--prompt"
            text.encode("utf-8")  # bytes of the command line that are no text fail here
    except UnicodeError as error:
        raise click.UsageError(f"the prompt is not UTF-8 text: {error}") from error
    except OSError as error:
        raise click.UsageError(f"cannot read the prompt: {error}") from error
    if not text.strip():
        raise click.UsageError(f"the prompt is empty ({source})")
    return text


def check_turn(system_prompt: str | None, chat_template: bool) -> None:
    """Refuse a system turn where there are no turns.

    Raises:
        click.UsageError: If there is one.
    """
    if system_prompt is not None and not chat_template:
        raise click.UsageError("--system-prompt needs the chat template, got --no-chat-template")


def check_sampling(options: dict[str, Any]) -> None:
    """Refuse options that a temperature of 0 would silently ignore.

    Raises:
        click.UsageError: If one of them is set.
    """
    if options["temp"] == 0:
        for name in ("top_p", "top_k", "min_p"):
            if options[name]:
                flag = "--" + name.replace("_", "-")
                raise click.UsageError(f"{flag} needs --temp above 0, got --temp 0")


def describe(summary: "Summary") -> str:
    """The summary for people, several lines."""
    kv = summary.kv
    lines = [
        "",
        f"scheme      {summary.report}",
        *([f"resumed     {summary.resumed_tokens} tokens"] if summary.resumed_tokens else []),
        f"prompt      {summary.prompt_tokens} tokens, {summary.prompt_tokens_per_s:.1f} tokens/s",
        f"generation  {summary.generation_tokens} tokens, "
        f"{summary.generation_tokens_per_s:.1f} tokens/s ({summary.finish_reason})",
        f"KV cache    {kv.kv_bytes:,} bytes for {kv.tokens} tokens "
        f"(room for {kv.capacity_tokens}); bf16 would take {kv.kv_bytes_bf16:,}: "
        f"{kv.compression_ratio:.2f}x",
        f"memory      {summary.peak_memory_bytes:,} bytes at the peak, weights included",
    ]
    if summary.processes > 1:
        lines.append(f"processes   {summary.processes}; bytes are those of one")
    if calls := summary.attention_calls:
        said = ", ".join(f"{n} {what}" for what, n in calls.items())
        lines.append(f"attention   calls over packed tokens: {said}")
    if kv.compression_ratio < 1:
        lines.append("            (what is not quantised has the model's own, wider dtype)")
    if (draft := summary.draft) is not None:
        lines += [
            f"draft       {draft.report}",
            f"            {draft.acceptance_rate:.0%} of {draft.proposed_tokens} proposed tokens "
            f"accepted, {draft.num_draft_tokens} at a time",
            f"            {draft.kv.kv_bytes:,} bytes of KV cache; bf16 would take "
            f"{draft.kv.kv_bytes_bf16:,}: {draft.kv.compression_ratio:.2f}x",
        ]
    if kv.nonfinite_groups:
        lines.append(f"warning     {kv.nonfinite_groups} groups of NaN or inf from the model")
    return "\n".join(lines)


def _encode(session: "Session", text: str, turn: dict[str, Any], *, continued: bool) -> list[int]:
    if continued:
        return session.encode_part(text, continued=True, **turn)
    return session.encode(text, **turn)


def _print(
    team: processes.Processes,
    answer: str,
    summary: "Summary",
    kept: prefix_cache.PrefixCache,
    *,
    as_json: bool,
) -> None:
    if as_json:
        said = {"text": answer, **summary.as_dict(), "prefix_cache": kept.stats}
        team.print(json.dumps(said))
    else:
        team.say("\n".join([describe(summary), *kept.lines()]))


def _stream(
    session: "Session", tokens: list[int], *, on_disk: Any, echo: bool, **options: Any
) -> tuple["Run", str]:
    start = session.generate if on_disk is None else partial(session.generate_kept, on_disk)
    shown = len(tokens) >= LONG_PROMPT_TOKENS and session.draft is None
    with progress_bar("prompt", shown=shown) as step:
        run = start(tokens, on_prefill=step, **options)
        text = iter(run)
        first = next(text, "")
    pieces = []
    for piece in chain([first], text):
        pieces.append(piece)
        if echo:
            click.echo(piece, nl=False)
    if echo:
        click.echo()
    return run, "".join(pieces)
