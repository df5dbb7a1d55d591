"""`WriteBehind`: a thread that writes prefixes, so that nobody waits for a disk."""

import errno
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvstow.errors import SnapshotError
from kvstow.snapshot.manifest import Manifest
from kvstow.snapshot.prefixes import files
from kvstow.snapshot.prefixes.directory import PrefixDirectory
from kvstow.snapshot.prefixes.names import Tokens, key_of
from kvstow.snapshot.prefixes.stats import PrefixStats
from kvstow.snapshot.write import Source

MAX_WAITING = 4  # each keeps the arrays of a whole cache in memory
WORTH_A_FILE = 8  # a file is written, or read, for more than an eighth of its tokens


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A prefix to be written.

    Attributes:
        tokens: All that it holds.
        manifest: As for `kvstow.snapshot.write`.
        sources: As for `kvstow.snapshot.write`; their arrays are in memory and do not change.
    """

    tokens: Tokens
    manifest: Manifest
    sources: Mapping[str, Source]


def is_worth(n_tokens: int, spared: int) -> bool:
    """Whether a prefix of `n_tokens` is worth a file beside one that spares so many of them."""
    return (n_tokens - spared) * WORTH_A_FILE > n_tokens


class WriteBehind:
    """Writes one prefix after the other in a thread of its own, which starts with the first.

    After a failure that will not pass, as of a full disk, it says so and writes no more.

    Args:
        directory: Where.
        max_bytes: What all files of the directory may take.
        stats: Where it counts.
        on_problem: Called in that thread with one line, for every file that was not written.
    """

    def __init__(
        self,
        directory: PrefixDirectory,
        max_bytes: int,
        stats: PrefixStats,
        on_problem: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.max_bytes = max_bytes
        self._directory = directory
        self._stats = stats
        self._on_problem = on_problem
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._is_broken = False
        self._is_closed = False

    def put(self, make: Callable[[], Job]) -> None:
        """Have a job written soon. Never blocks.

        Args:
            make: Makes it. If too many wait, it is dropped before it is made, and counted.

        Raises:
            Exception: Whatever `make` raises.
        """
        if self._is_broken or self._is_closed:
            return
        if self._jobs.full():
            self._stats.dropped += 1
            return
        job = make()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstow-prefixes", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:  # others have put theirs meanwhile
            self._stats.dropped += 1

    def flush(self) -> None:
        """Wait until all that was taken is written or has failed."""
        self._jobs.join()

    def close(self) -> None:
        """`flush`, and end the thread; nothing is taken afterwards."""
        self._is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                if not self._is_broken:
                    self._write(job)
            except SnapshotError as error:
                self._failed(error)
            except Exception as error:  # or `flush` would wait for ever
                self._stop(f"prefixes cannot be written: {error!r}")
            finally:
                del job
                self._jobs.task_done()

    def _write(self, job: Job) -> None:
        said, n_tokens = job.manifest, len(job.tokens)
        key = key_of(said.model, said.tokenizer, said.policy)
        found = self._directory.nearest(key, job.tokens)
        if found is not None and not is_worth(n_tokens, found.n_tokens):
            files.mark_used(self._directory.root, found.entry.path)
            self._stats.skipped += 1
            return
        n_bytes = sum(x.n_bytes for x in job.sources.values())
        if n_bytes > self.max_bytes:
            self._on_problem(
                f"{n_tokens} tokens take {n_bytes} bytes, and all prefixes may take "
                f"{self.max_bytes}: they are not written"
            )
            return
        self._evict(self.max_bytes - n_bytes)
        self._stats.written_bytes += self._directory.add(job.tokens, said, job.sources)
        self._stats.writes += 1
        self._evict(self.max_bytes)  # the header counts too

    def _evict(self, max_bytes: int) -> None:
        self._stats.evictions += len(files.evict(self._directory.root, max_bytes))

    def _failed(self, error: SnapshotError) -> None:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno != errno.ENOENT:  # cleaned up by another
            self._stop(str(error))
            return
        self._on_problem(str(error))

    def _stop(self, why: str) -> None:
        self._is_broken = True
        self._on_problem(f"{why}: no more prefixes are written, those on disk are still used")
