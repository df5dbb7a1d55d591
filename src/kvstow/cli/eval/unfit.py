"""Arms that a model or a measure cannot take, found before weights are loaded."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstow.cli.console import say
from kvstow.errors import EvaluationError, PolicyError, UnsupportedModel
from kvstow.evaluate.arms import Arm
from kvstow.models import skeleton
from kvstow.policy import Policy
from kvstow.require import require
from kvstow.scheme import Off


def unfit_for_model(config: Mapping[str, Any], arms: Sequence[Arm], dtype: str) -> dict[str, str]:
    """Why each of `arms` that cannot run on a model cannot.

    Args:
        config: As in config.json.
        arms: Those that are asked for.
        dtype: Of the model.

    Raises:
        ModelFileError: As `skeleton`.
        UnsupportedModel: As `skeleton`: no arm that quantises can be tried.
    """
    reasons = {str(arm): f"the model is in {dtype} already" for arm in arms if arm.dtype == dtype}
    quantising = [arm for arm in arms if not isinstance(arm.scheme, Off)]
    if not quantising:
        return reasons
    running = require("kvstow.evaluate.harness").running
    model = skeleton(config, dtype)
    for arm in quantising:
        try:
            with running(model, arm):
                pass
        except (EvaluationError, PolicyError, UnsupportedModel) as error:
            reasons[str(arm)] = str(error).removeprefix(f"{arm}: ")
    return reasons


def unfit_for_window(arms: Iterable[Arm], n_attended: int) -> dict[str, str]:
    """Why each of `arms` that quantises nothing in so many tokens does not."""
    return {
        str(arm): f"it quantises nothing of {n_attended} tokens, the most that are attended to"
        for arm in arms
        if _begins(arm) > n_attended
    }


def _begins(arm: Arm) -> int:
    """Tokens from which on some layer quantises; a simulated arm does from the first."""
    schemes = [] if arm.is_simulated else Policy.of(arm.scheme).schemes
    quantising = [scheme for scheme in schemes if not isinstance(scheme, Off)]
    return min((getattr(scheme, "start_tokens", None) or 0 for scheme in quantising), default=0)


def say_unmeasured(measure: str, reasons: Mapping[str, str]) -> None:
    """On standard error, one line for each reason and all arms that have it.

    Args:
        measure: Its name; empty for all measures.
        reasons: By arm, which is empty where the measure has none.
    """
    for reason in dict.fromkeys(reasons.values()):
        arms = ", ".join(arm for arm, why in reasons.items() if arm and why == reason)
        say(f"{' '.join(filter(None, (measure, arms)))}: not measured: {reason}")
