"""Check that a calibration file has what the method takes.

rtn     every weight becomes the nearest value that its block scale offers
gptq    columns one after the other, those that follow making up for the error of those before (gptq.py)
awq     as rtn, of columns multiplied by what keeps the outputs closest, and folded into what makes their inputs
smooth  the same by the largest inputs and weights
The rule `importance` takes statistics of the inputs by every method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from fp4convert.calibration.methods.scaled_weights import reads_folded
from fp4convert.calibration.statistics import Calibration, check_linears, open_calibration
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import InputError
from fp4convert.numerics.formats import IMPORTANCE, METHODS
from fp4convert.planning.steps import Plan, Step
from fp4convert.recipes.recipe import Target

RTN, GPTQ = "rtn", "gptq"
FOLDING = ("awq", "smooth")  # methods that multiply columns
UNAIDED = ("rtn",)  # methods that need no statistics
FILE_NEEDED = "Make one: fp4convert calibrate SOURCE -o FILE."


def open_statistics(method: str, rule: str | None, file: str | None) -> Calibration | None:
    """The calibration file that is given, opened.

    Raises InputError for a method that is not known, one or a rule that needs a file and has none, or a file that is none
    """
    if method not in METHODS:
        raise InputError(
            "unknown-method",
            f"--method {method!r} is not known; expected {' or '.join(METHODS)}",
            "Leave it out for rtn.",
        )
    asking = (
        f"--method {method}"
        if method not in UNAIDED
        else f"--scale-rule {rule}"
        if rule == IMPORTANCE
        else ""
    )
    if file is None and asking:
        detail = f"{asking} needs statistics of what linear layers are given; expected --calibration FILE with it"
        raise InputError("no-calibration", detail, FILE_NEEDED)
    return None if file is None else open_calibration(file)


def rule_of(method: str, rule: str | None) -> str | None:
    """The scale rule that is asked for, or that the method goes with; None for the format's own."""
    return rule or (IMPORTANCE if method == GPTQ else None)


def with_statistics(plan: Plan, calibration: Calibration) -> Plan:
    """The plan with the file in it, and with a warning where method and rule pass over modules, or over the file.

    Raises InputError where the file lacks what method and rule take of a linear layer
    """
    linears = list(_studied(plan))
    check_linears(calibration, linears)
    if plan.target.method == GPTQ:
        _check_grams(calibration, linears)
    for module in dict.fromkeys(calibration.holder(linear.module) for linear in linears):
        for statistic in _taken(plan.target, calibration):
            statistic(module)
    return replace(
        plan, calibration=str(calibration.path), warnings=(*plan.warnings, *_untouched(plan))
    )


def _check_grams(calibration: Calibration, linears: Sequence[Linear]) -> None:
    """InputError where the file has no Gram matrix of one of them, or what cannot be one."""
    if calibration.gram_kind in ("none", "diag"):
        detail = f"{calibration.path} holds no Gram matrices (--gram {calibration.gram_kind}), and --method gptq needs them"
        raise InputError(
            "no-gram",
            f"{detail}; expected block:128 or full",
            "Calibrate again with --gram block:128.",
        )
    for module in (linear.module for linear in linears):
        if not calibration.has(module, "input_gram"):
            detail = f"{calibration.path} has no input_gram of {module}; expected it of every linear layer that is rounded"
            raise InputError(
                "calibration-missing",
                detail,
                f"Calibrate again, or leave it out: --exclude '{module}'.",
                module,
            )
    for module in dict.fromkeys(calibration.holder(linear.module) for linear in linears):
        calibration.gram(module)


def _studied(plan: Plan) -> Iterator[Linear]:
    """The linear layers whose inputs method and rule want to know."""
    if takes_statistics(plan.target):
        linears = (linear for step in rounded(plan) for linear in step.linears)
        is_every = plan.target.method not in FOLDING or plan.target.scale_rule == IMPORTANCE
        yield from (linear for linear in linears if is_every or reads_folded(linear))


def _taken(target: Target, calibration: Calibration) -> list[Callable[[str], object]]:
    """What method and rule take of a linear layer's inputs."""
    moments = (
        [calibration.moments]
        if target.method != "smooth" or target.scale_rule == IMPORTANCE
        else []
    )
    of_method: dict[str | None, list[Callable[[str], object]]] = {
        "awq": [calibration.mean_magnitudes, calibration.tokens_of],
        "smooth": [calibration.channel_amax],
    }
    return [*moments, *of_method.get(target.method, [])]


def takes_statistics(target: Target) -> bool:
    """True where what the inputs are like changes how weights are rounded."""
    return target.method not in (None, *UNAIDED) or target.scale_rule == IMPORTANCE


def rounded(plan: Plan) -> Iterator[Step]:
    """The steps whose weights are rounded to four bits, by the method."""
    return (
        step
        for step in plan.steps
        if step.action == "quantize" and step.form is not None and step.form.format.is_fp4
    )


def _untouched(plan: Plan) -> Iterator[str]:
    """Modules that method and rule do not reach, or that they reach none by the file."""
    if not takes_statistics(plan.target):
        if all(step.scalar is None for step in plan.steps):
            yield "--calibration changes no weight: --method rtn takes statistics with --scale-rule importance alone"
        return
    reached = {step.module for step in rounded(plan)}
    if others := [step.name for step in plan.steps if step.is_made and step.module not in reached]:
        how = (
            f"--scale-rule {IMPORTANCE}"
            if plan.target.method in UNAIDED
            else f"--method {plan.target.method}"
        )
        yield f"{how} changes nothing for {len(others)} modules that are taken over or have eight bits, the first {others[0]!r}"


def reopened(plan: Plan) -> Calibration | None:
    """The calibration file of a plan; InputError where it is another one by now."""
    if plan.calibration is None:
        return None
    calibration = open_calibration(plan.calibration)
    if calibration.sha256 != plan.target.calibration:
        detail = f"{plan.calibration} has changed since the plan was made; expected the same file until the end"
        raise InputError("calibration-changed", detail, "Run the same command again.")
    return calibration
