"""``--resume``: go on from a saved cache; its refusals before weights load, and its load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvstow.cli import params
from kvstow.errors import UnsupportedModel
from kvstow.integrations import attached
from kvstow.integrations.report import Fetch, fetch_of
from kvstow.models import skeleton
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Scheme
from kvstow.snapshot import Manifest, Snapshot

option: Callable[[Any], Any] = click.option(
    "--resume",
    "--prompt-cache-file",
    "resume",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Go on from a cache that `kvstow cache save` wrote: the prompt follows its text "
    "directly. The scheme is that of the file unless one is given.",
)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A saved cache to go on from, or none.

    Attributes:
        path: The file; None where nothing is resumed.
        manifest: What it said when the command started.
    """

    path: Path | None = None
    manifest: Manifest | None = None

    def stored_under(self, kv_quant: Scheme, kv_policy: Policy | None) -> Scheme | Policy:
        """What the options ask for; the file's own scheme where they do not.

        Raises:
            click.UsageError: If both are given.
        """
        stored = params.stored_under(kv_quant, kv_policy)
        source = click.get_current_context().get_parameter_source("kv_quant")
        asked = kv_policy is not None or source is not click.core.ParameterSource.DEFAULT
        if self.manifest is None or asked:
            return stored
        return self.manifest.policy.uniform or self.manifest.policy

    def check_options(
        self, *, system_prompt: str | None, draft: str | None, chat_template: bool, n_processes: int
    ) -> None:
        """Refuse options that contradict what is in the file.

        Raises:
            click.UsageError: If one of them does.
        """
        if self.manifest is None:
            return
        if n_processes > 1:
            raise click.UsageError(f"--resume works in one process, and {n_processes} were started")
        if system_prompt is not None:
            raise click.UsageError(
                "--system-prompt comes before what the file of --resume holds: give it to "
                "kvstow cache save"
            )
        if draft is not None:
            raise click.UsageError("--draft-model has not read what the file of --resume holds")
        saved = self.manifest.notes.get("chat_template")
        if saved is not None and saved != str(chat_template).lower():
            flag = "--chat-template" if saved == "true" else "--no-chat-template"
            raise click.UsageError(f"{self.path} was saved with {flag}: give it here too")

    def refuse_other(
        self, config: Mapping[str, Any], stored: Scheme | Policy, fetch: Fetch, dtype: str | None
    ) -> None:
        """Refuse a cache of another model, or stored otherwise, before weights load.

        Args:
            config: Of the model, as in config.json.
            stored: What the model will be attached to.
            fetch: As it is asked for.
            dtype: See `skeleton`.

        Raises:
            OtherModel: If the shapes of its layers differ.
            OtherScheme: If it is stored under other schemes.
        """
        if self.manifest is None:
            return
        try:
            unloaded = skeleton(config, dtype)
        except UnsupportedModel:  # nothing can be known without weights: `load` refuses then
            return
        snapshots = require("kvstow.integrations.mlx_lm.snapshots")
        with attached(unloaded, stored, fetch=fetch_of(stored, fetch)):
            snapshots.check(self.manifest, unloaded)

    def load(self, model: Any, tokenizer: Any) -> Any:
        """A `kvstow.session.Prefix`, for a model that is attached; None where nothing is resumed.

        Raises:
            SnapshotError: If the file is damaged, or not of this model.
        """
        if self.path is None:
            return None
        snapshots = require("kvstow.integrations.mlx_lm.snapshots")
        with Snapshot(self.path) as snapshot:
            cache = snapshots.load(snapshot, model=model, tokenizer=tokenizer)
            return require("kvstow.session").Prefix(snapshot.tokens(), cache)


def opened(path: Path | None) -> Resumed:
    """What there is to go on from, if anything.

    Raises:
        SnapshotError: If the file is no saved cache, or its header is damaged.
    """
    if path is None:
        return Resumed()
    with Snapshot(path) as snapshot:
        return Resumed(path, snapshot.manifest)
