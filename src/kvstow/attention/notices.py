"""What is said of kernels that are not used: once in a process, and never as an error."""

import threading
import warnings

from kvstow.errors import KvstowWarning

_said: set[str] = set()
_lock = threading.Lock()


def warn(text: str, *, once: str) -> None:
    """Warn, but not twice of `once`; never as an error, whatever filters say."""
    with _lock:
        if once in _said:
            return
        _said.add(once)
    try:
        warnings.warn(text, KvstowWarning, stacklevel=2)
    except Warning:  # a filter makes it an error
        return
