"""Every exception kvstow raises on purpose.

* KvstowError
  + SchemeError          the scheme string or its fields are wrong     (ValueError)
  + UnsupportedModel     the model cannot use this scheme              (ValueError)
  + ModelNotFound        no weights where the user pointed             (FileNotFoundError)
  + ModelFileError       weights or a config that cannot be read       (ValueError)
  + PromptError          the prompt cannot be given to the model       (ValueError)
  + TextError            a text to be scored is missing, short or no text (ValueError)
  + EvaluationError      a measurement that would mean nothing         (ValueError)
  + SnapshotError        a saved cache cannot be written, read or used (ValueError)
    - ForeignSnapshot      the file is no snapshot of kvstow
    - NewerSnapshot        its format is newer than this program
    - TruncatedSnapshot    its end is missing
    - OversizedHeader      its header claims an absurd size
    - DamagedSnapshot      a checksum fails, or what it says contradicts itself
    - OtherModel           it was computed by another model, or other weights
    - OtherScheme          it is stored under another scheme
    - OtherTokenizer       its tokens are those of another tokenizer
    - OtherTables          its packed bytes need other tables
  + MissingDependency    an extra of kvstow is not installed           (ImportError)

And the one warning, `KvstowWarning` (UserWarning).
"""


class KvstowError(Exception):
    """Base of all errors raised by kvstow."""


class SchemeError(KvstowError, ValueError):
    """A scheme string or its fields are invalid."""


class PolicyError(SchemeError):
    """A policy cannot be read, or names layers that the model does not have."""


class UnsupportedModel(KvstowError, ValueError):
    """The model has a shape that the scheme cannot store."""


class ModelNotFound(KvstowError, FileNotFoundError):
    """There are no model weights where the user pointed."""


class ModelFileError(KvstowError, ValueError):
    """A model file is truncated, of another architecture, or otherwise unreadable."""


class PromptError(KvstowError, ValueError):
    """The prompt is empty, fills the model's context, or has a system turn and no template."""


class TextError(KvstowError, ValueError):
    """A text to be scored cannot be read, or is shorter than the window."""


class EvaluationError(KvstowError, ValueError):
    """A measurement would mean nothing, or rows of results do not belong together."""


class SnapshotError(KvstowError, ValueError):
    """A saved cache cannot be written, read or used."""


class ForeignSnapshot(SnapshotError):
    """The file is not a snapshot that kvstow wrote."""


class NewerSnapshot(SnapshotError):
    """The file is in a version of the format that this program does not know."""


class TruncatedSnapshot(SnapshotError):
    """The file ends before what its header announces."""


class OversizedHeader(SnapshotError):
    """The file claims a header larger than any that kvstow writes."""


class DamagedSnapshot(SnapshotError):
    """A checksum does not fit, or parts of the file contradict each other."""


class OtherModel(SnapshotError):
    """The cache was computed by a model of another shape, or with other weights."""


class OtherScheme(SnapshotError):
    """The cache is stored under another scheme than the one asked for."""


class OtherTokenizer(SnapshotError):
    """The tokens in the cache are those of another tokenizer."""


class OtherTables(SnapshotError):
    """The packed bytes mean something only with tables that this program does not have."""


class MissingDependency(KvstowError, ImportError):
    """An optional part of kvstow is needed and not installed."""


class KvstowWarning(UserWarning):
    """What was asked for is done, and is likely not what was wanted."""
