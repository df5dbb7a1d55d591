"""``kvstow cache save``: read a prompt, and save its KV cache in a file."""

import json
import tempfile
import time
from pathlib import Path

import click

from kvstow.blas import use_fast_blas
from kvstow.cli import params
from kvstow.cli.generate import LONG_PROMPT_TOKENS, check_turn, read_prompt
from kvstow.cli.progress import progress_bar
from kvstow.cli.refuse import refuse
from kvstow.errors import ForeignSnapshot, SnapshotError
from kvstow.integrations import attached
from kvstow.models import load, read_config
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Scheme
from kvstow.snapshot import Snapshot


@click.command()
@params.model
@params.kv_quant
@params.kv_policy
@params.prompt
@params.prompt_file
@click.option("--system-prompt", help="The system turn of the chat template.")
@params.chat_template
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The file to write. A saved cache that is there is replaced once the new one is whole; "
    "another file is refused.",
)
@params.dtype
@params.as_json
def save(
    *,
    model: str,
    kv_quant: Scheme,
    kv_policy: Policy | None,
    prompt: str | None,
    prompt_file: Path | None,
    system_prompt: str | None,
    chat_template: bool,
    output: Path,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Read a prompt and save its KV cache in a file.

    The text begins a user turn that `kvstow generate --resume FILE` goes on with: its own
    prompt follows the text of the file directly.

    The file holds the tokens of the prompt, so only its owner may read it.
    """
    text = read_prompt(prompt, prompt_file)
    stored = params.stored_under(kv_quant, kv_policy)
    check_turn(system_prompt, chat_template)
    check_output(output)
    config = read_config(model)
    refuse(config.config, [stored], "auto", dtype)
    if notice := use_fast_blas().notice:
        click.echo(notice, err=True)
    with progress_bar("loading") as step:
        loaded, tokenizer = load(model, dtype=dtype, progress=step)
    runs, snapshots = map(require, ("kvstow.session", "kvstow.integrations.mlx_lm.snapshots"))
    with attached(loaded, stored) as report:
        session = runs.Session(loaded, tokenizer, report, context_tokens=config.context_length)
        tokens = session.encode_part(
            text, continued=False, system_prompt=system_prompt, chat_template=chat_template
        )
        start = time.perf_counter()
        with progress_bar("prompt", shown=len(tokens) >= LONG_PROMPT_TOKENS) as step:
            held = session.read(tokens, on_prefill=step)
        seconds = time.perf_counter() - start
        notes = {"model": model, "chat_template": str(chat_template).lower()}
        n_bytes = snapshots.save(
            output, held, tokens, model=loaded, tokenizer=tokenizer, notes=notes
        )
    said = {
        "file": str(output),
        "bytes": n_bytes,
        "tokens": len(tokens),
        "scheme": str(report.scheme),
        "layers": report.as_dict(),
        "prompt_tokens_per_s": round(len(tokens) / seconds, 2),
    }
    if as_json:
        click.echo(json.dumps(said))
    else:
        click.echo(
            f"{output}: {len(tokens)} tokens in {n_bytes:,} bytes under {report.scheme}, "
            f"read at {said['prompt_tokens_per_s']} tokens/s"
        )


def check_output(output: Path) -> None:
    """Refuse a place that cannot be written, before anything is computed.

    Raises:
        click.UsageError: If nothing can be written in that directory, or another kind of file is
            there.
    """
    try:
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise click.UsageError(
            f"--output: cannot write in {output.parent}: {error.strerror}"
        ) from error
    if not output.exists():
        return
    if not output.is_file():
        raise click.UsageError(f"--output: {output} is there and no file")
    try:
        Snapshot(output).close()
    except ForeignSnapshot as error:
        raise click.UsageError(
            f"--output: {output} is there and no saved cache, so it is not replaced"
        ) from error
    except SnapshotError:
        return  # one that is damaged or too new may go
