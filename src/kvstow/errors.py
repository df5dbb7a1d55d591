"""Every exception kvstow raises on purpose.

* KvstowError
  + SchemeError          the scheme string or its fields are wrong     (ValueError)
  + UnsupportedModel     the model cannot use this scheme              (ValueError)
  + ModelNotFound        no weights where the user pointed             (FileNotFoundError)
  + ModelFileError       weights or a config that cannot be read       (ValueError)
  + PromptError          the prompt cannot be given to the model       (ValueError)
  + TextError            a text to be scored is missing, short or no text (ValueError)
  + EvaluationError      a measurement that would mean nothing         (ValueError)
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


class MissingDependency(KvstowError, ImportError):
    """An optional part of kvstow is needed and not installed."""


class KvstowWarning(UserWarning):
    """What was asked for is done, and is likely not what was wanted."""
