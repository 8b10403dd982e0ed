"""Check that a calibration file has the statistics of the method.

rtn     every weight becomes the nearest value under its block scale
gptq    column after column; later columns make up for the errors of earlier ones (gptq.py); as rtn
        where a linear layer saw too few tokens
awq     as rtn, after columns are multiplied by the factors that keep the outputs closest; the
        producers of the inputs are divided by them
The rule `importance` takes statistics of the inputs with every method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.calibration.statistics import Calibration, check_linears, has_few_tokens
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.errors import InputError, describe_missing, did_you_mean
from fp4convert.numerics.formats import AWQ, FORMATS, GPTQ, IMPORTANCE, METHODS, UNAIDED
from fp4convert.planning.plan import Plan
from fp4convert.planning.steps import Step
from fp4convert.recipes.patterns import exclude_option
from fp4convert.recipes.recipe import Target

FILE_NEEDED = (
    "Give --text TEXT, or --self-generate 16, which calibrates first; or make the file: fp4convert"
    " calibrate SOURCE -o FILE --text TEXT --gram block:128"
)


def open_statistics(method: str, rule: str | None, file: str | None) -> Calibration | None:
    """Open the calibration file.

    Raises  InputError for an unknown method or one whose package is not installed, for a method or
            rule that needs a file and has none, or for a wrong file
    """
    if method not in METHODS:
        raise InputError(
            "unknown-method",
            f"--method {method!r} is not known; expected {' or '.join(METHODS)}"
            f"{did_you_mean(method, METHODS)}",
            "Leave it out for rtn.",
        )
    if method == GPTQ and find_spec("torch") is None:
        raise InputError(
            "no-torch", *describe_missing("--method gptq needs the package torch", "calibrate")
        )
    asking = (
        f"--method {method}"
        if method not in UNAIDED
        else f"--scale-rule {rule}"
        if rule == IMPORTANCE
        else ""
    )
    if file is None and asking:
        detail = (
            f"{asking} needs statistics of the inputs of linear layers; expected --calibration"
            " FILE with them"
        )
        raise InputError("no-calibration", detail, FILE_NEEDED)
    return None if file is None else open_calibration(file)


def check_statistics(
    plan: Plan, calibration: Calibration, is_fitted: bool = False
) -> tuple[str, ...]:
    """Check the file's statistics for method and rule; return warnings.

    is_fitted  the file also chose formats of modules
    Raises     InputError where the file lacks statistics of a linear layer
    """
    # the linear layers whose statistics method and rule take
    method, is_weighed = plan.target.method, plan.target.scale_rule == IMPORTANCE
    linears: list[Linear] = []
    if takes_statistics(plan.target):
        is_every = method != AWQ or is_weighed
        every = (linear for step in rounded(plan) for linear in step.linears)
        linears = [linear for linear in every if is_every or linear.coding.columns]
    check_linears(calibration, linears)
    _check_targets(plan.target, calibration)
    if method == GPTQ:
        _check_grams(calibration, linears)
    # the statistics that they take must be there
    taken: list[Callable[[str], object]] = [calibration.moments]
    if method == AWQ:
        taken += [calibration.mean_magnitudes, calibration.tokens_of]
    for module in dict.fromkeys(calibration.holder(linear.module) for linear in linears):
        for statistic in taken:
            statistic(module)
    spared = _spared(plan, calibration, linears) if method == GPTQ else ()
    return (*_untouched(plan, is_fitted), *spared, *_unmatched(plan, calibration))


def _check_targets(target: Target, calibration: Calibration) -> None:
    """Raise InputError for corrections that are for another way to round."""
    wanted, rule = calibration.targets, target.rule_for(FORMATS[target.format])
    if not wanted or not takes_statistics(target):
        return
    asked = {
        "format": target.format,
        "method": target.method,
        "activations": target.activations,
        "scale_rule": rule,
    }
    others = {name: word for name, word in asked.items() if wanted.get(name, word) != word}
    if not others:
        return
    words = ", ".join(f"{name} {wanted[name]}, not {word}" for name, word in others.items())
    detail = f"{calibration.path} was made for {words.replace('_', ' ')}; expected one for these"
    line = "fp4convert calibrate SOURCE -o FILE --text TEXT"
    if target.method == GPTQ:
        line += f" --for-method {GPTQ} --format {target.format} --scale-rule {rule}"
        line += f" --activations {target.activations}"
    raise InputError("calibration-targets", detail, f"Make it: {line}")


def _unmatched(plan: Plan, calibration: Calibration) -> Iterator[str]:
    """Warn of modules that only a calibration rounded."""
    if "scale_rule" not in calibration.targets:
        return
    made = {linear.module for step in rounded(plan) for linear in step.linears}
    names = (name.partition(".target_amax") for name in calibration.refs)
    if others := [module for module, ending, _ in names if ending and module not in made]:
        yield (
            f"{len(others)} modules that {calibration.path} was rounded with stay, the first"
            f" {others[0]!r}: layers behind them make up for errors that are not there; calibrate"
            " for the same modules: quantize with --text"
        )


def _check_grams(calibration: Calibration, linears: Sequence[Linear]) -> None:
    """Raise InputError where a Gram matrix is missing or malformed."""
    if calibration.gram_kind in ("none", "diag"):
        detail = (
            f"{calibration.path} holds no Gram matrices (--gram {calibration.gram_kind}), and"
            " --method gptq needs them"
        )
        raise InputError("no-gram", f"{detail}; expected block:128 or full")
    for module in (linear.module for linear in linears):
        if not calibration.has(module, "input_gram"):
            detail = (
                f"{calibration.path} has no input_gram of {module}; expected it of every linear"
                " layer that is rounded"
            )
            raise InputError(
                "calibration-missing",
                detail,
                f"Calibrate again, or leave it out: {exclude_option(module)}",
                module,
            )
    for module in dict.fromkeys(calibration.holder(linear.module) for linear in linears):
        calibration.gram(module)


def _spared(plan: Plan, calibration: Calibration, linears: Sequence[Linear]) -> Iterator[str]:
    """Name modules that gptq leaves to the scale rule."""
    few = [each.module for each in linears if has_few_tokens(calibration, each.module)]
    if few:
        rule = plan.target.rule_for(FORMATS[plan.target.format])
        tokens = calibration.tokens_of(few[0])
        yield (
            f"{len(few)} modules saw too few tokens for --method {GPTQ} and are rounded to the"
            f" nearest, by rule {rule}; the first is {few[0]!r}, with {tokens} tokens"
        )


def takes_statistics(target: Target) -> bool:
    """Return whether statistics of inputs change the rounding of weights."""
    return target.method not in (None, *UNAIDED) or target.scale_rule == IMPORTANCE


def rounded(plan: Plan) -> Iterator[Step]:
    """Yield the steps whose weights the method rounds to four bits."""
    return (
        step
        for step in plan.steps
        if step.action == "quantize" and step.form is not None and step.form.format.is_fp4
    )


def _untouched(plan: Plan, is_fitted: bool) -> Iterator[str]:
    """Name modules that method, rule and file do not change."""
    if not takes_statistics(plan.target):
        if not is_fitted and not plan.scalars:
            rule = plan.target.rule_for(FORMATS[plan.target.format])
            yield f"--calibration has no effect: --method rtn with rule {rule} uses no statistics"
        return
    reached = {step.module for step in rounded(plan)}
    if others := [step.name for step in plan.steps if step.is_made and step.module not in reached]:
        how = (
            f"--scale-rule {IMPORTANCE}"
            if plan.target.method in UNAIDED
            else f"--method {plan.target.method}"
        )
        yield (
            f"{how} changes nothing for {len(others)} modules that are carried over or have eight"
            f" bits, the first {others[0]!r}"
        )


def reopened(plan: Plan) -> Calibration | None:
    """Open the calibration file of a plan again.

    Raises  InputError where it has changed
    """
    if plan.calibration is None:
        return None
    calibration = open_calibration(plan.calibration)
    if calibration.sha256 != plan.target.calibration:
        detail = (
            f"{plan.calibration} has changed since the plan was made; expected the same file"
            " until the end"
        )
        raise InputError("calibration-changed", detail)
    return calibration
