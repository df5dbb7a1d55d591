"""What a prefix cache did so far."""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class PrefixStats:
    """Counts since the process began.

    Attributes:
        memory_hits: Prompts whose prefix came out of memory.
        memory_tokens: Tokens of those prefixes.
        disk_hits: Prompts whose prefix came out of a file.
        disk_tokens: Tokens of those prefixes.
        misses: Prompts of which nothing was held.
        writes: Files written.
        written_bytes: Their bytes.
        skipped: Prefixes that were not written since files hold them already, or nearly.
        dropped: Prefixes that were not written since too many others waited.
        evictions: Files removed since all of them together took too many bytes.
        errors: Prefixes that could not be written, read or believed.
    """

    memory_hits: int = 0
    memory_tokens: int = 0
    disk_hits: int = 0
    disk_tokens: int = 0
    misses: int = 0
    writes: int = 0
    written_bytes: int = 0
    skipped: int = 0
    dropped: int = 0
    evictions: int = 0
    errors: int = 0

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)
