"""A KV cache in a file: written at once or not at all, refused where it does not fit.

`write` and `Snapshot` know numpy arrays and the file format (`docs/format.md`);
`kvstow.integrations.mlx_lm.snapshots` knows the caches of a model.
"""

from kvstow.snapshot.manifest import Fingerprint, Manifest, check_scheme
from kvstow.snapshot.read import Snapshot
from kvstow.snapshot.record import Record
from kvstow.snapshot.write import Source, write

__all__ = ["Fingerprint", "Manifest", "Record", "Snapshot", "Source", "check_scheme", "write"]
