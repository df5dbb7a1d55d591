"""A directory of saved prefixes of prompts, shared by processes without a daemon or a lock.

    <directory>/<key>/<head>-<tokens>-<hash>.safetensors

A key stands for a model, a tokenizer and a policy; below it every file is a snapshot
(`kvstow.snapshot`) of so many tokens. Names say enough to pass over most files, and only what is
in a file is believed. Files appear by a rename and are never changed, so there is nothing to
lock: one that is gone is a miss. The time of its last change says when a file was last used.
"""

from kvstow.snapshot.prefixes.directory import Entry, Found, PrefixDirectory, unusable_for_all
from kvstow.snapshot.prefixes.names import HEAD_TOKENS, Tokens, as_tokens, key_of
from kvstow.snapshot.prefixes.stats import PrefixStats
from kvstow.snapshot.prefixes.writer import Job, WriteBehind, is_worth

DEFAULT_MAX_BYTES = 10 * 10**9
DEFAULT_MIN_TOKENS = 128

__all__ = [
    "DEFAULT_MAX_BYTES",
    "DEFAULT_MIN_TOKENS",
    "HEAD_TOKENS",
    "Entry",
    "Found",
    "Job",
    "PrefixDirectory",
    "PrefixStats",
    "Tokens",
    "WriteBehind",
    "as_tokens",
    "is_worth",
    "key_of",
    "unusable_for_all",
]
