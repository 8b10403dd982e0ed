"""Join the options, the work and the drawing of every command.

What a command needs is imported when it runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fp4convert.cli.options import Command, Shown
from fp4convert.commands.options import (
    AnalyzeOptions,
    AttestOptions,
    CalibrateOptions,
    CompareOptions,
    EvaluateOptions,
    InspectOptions,
    MergeOptions,
    ReproduceOptions,
    VerifyOptions,
)
from fp4convert.conversion.options import (
    DequantizeOptions,
    PruneOptions,
    QuantizeOptions,
    TranscodeOptions,
)
from fp4convert.recipes.options import Option


@dataclass(eq=False, repr=False)
class ExplainOptions:
    """Explain a finding or an error by its code.

    What it means, where it comes from, what to do. Without CODE the subjects are listed; with a
    subject its codes are, one in a line.

    Example: fp4convert explain global-scale-reciprocal
    """

    code: Annotated[
        str | None,
        Option(
            "Code of a finding or an error, such as scale-layout; or a subject, such as hub.",
            is_argument=True,
            is_code=True,
        ),
    ] = None


@dataclass(eq=False, repr=False)
class DoctorOptions:
    """Show what this machine offers: GPUs, compiler, disk.

    Example: fp4convert doctor
    """


@dataclass(eq=False, repr=False)
class RecipesOptions:
    """List the recipes: modes, and families of models.

    Modes are yours to pick; a family says what is kept in its models.

    Example: fp4convert recipes deepseek
    """

    name: Annotated[
        str | None,
        Option(
            "Show one recipe, or a TOML file of your own.",
            is_argument=True,
            is_recipe=True,
        ),
    ] = None


def _quantize(options: QuantizeOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.quantize.run(options).as_json(), draw_results.draw_result)


def _preview_quantize(options: QuantizeOptions) -> Shown:
    from fp4convert.cli import draw_plan
    from fp4convert.commands import convert

    plan = convert.preview_quantize.run(options)
    return Shown(plan, draw_plan.draw_plan, error=plan.get("error"))


def _dequantize(options: DequantizeOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.dequantize.run(options).as_json(), draw_results.draw_result)


def _transcode(options: TranscodeOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.transcode.run(options).as_json(), draw_results.draw_result)


def _prune(options: PruneOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.prune.run(options).as_json(), draw_results.draw_result)


def _preview_prune(options: PruneOptions) -> Shown:
    from fp4convert.cli import draw_plan
    from fp4convert.commands import convert

    plan = convert.preview_prune.run(options)
    return Shown(plan, draw_plan.draw_plan, error=plan.get("error"))


def _merge(options: MergeOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.merge.run(options), draw_results.draw_merged)


def _inspect(options: InspectOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    document = quality.inspect.run(options)
    return Shown(document, draw_quality.draw_artifact, document["healthy"])


def _verify(options: VerifyOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    document = quality.verify.run(options).as_json()
    return Shown(document, draw_quality.draw_verification, document["passed"])


def _compare(options: CompareOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    document = quality.compare.run(options)
    return Shown(document, draw_quality.draw_comparison, document["passed"])


def _reproduce(options: ReproduceOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import reproduction

    document = reproduction.reproduce.run(options)
    return Shown(document, draw_results.draw_reproduced, document["reproduced"])


def _attest(options: AttestOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import attestation

    return Shown(attestation.attest.run(options), draw_results.draw_attested)


def _evaluate(options: EvaluateOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import evaluation

    document = evaluation.evaluate.run(options).as_json()
    return Shown(document, draw_quality.draw_evaluation, document["passed"])


def _analyze(options: AnalyzeOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import analysis

    return Shown(analysis.analyze.run(options), draw_quality.draw_study)


def _calibrate(options: CalibrateOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import calibration

    return Shown(calibration.calibrate.run(options).as_json(), draw_quality.draw_calibrated)


def _explain(options: ExplainOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.report import text

    if options.code is None:
        return Shown(text.explain_all(), draw_quality.draw_subjects)
    if text.is_subject(options.code):
        return Shown(text.explain_all(options.code), draw_quality.draw_codes)
    return Shown(text.explain(options.code), draw_quality.draw_code)


def _doctor(options: DoctorOptions) -> Shown:
    from fp4convert.cli import doctor, draw_results

    return Shown(doctor.examine(Path()), draw_results.draw_examination)


def _recipes(options: RecipesOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.recipes import toml_files

    if options.name is None:
        return Shown(toml_files.describe_known(), draw_results.draw_recipes)
    return Shown(toml_files.describe(options.name), draw_results.draw_recipe)


# Of a command that only looks, a person is not asked how the Hub is read.
LOOKING = frozenset({"memory", "transport"})
CONVERT, CHECK, PREPARE, HELP = "Convert", "Check", "Prepare", "Help"
COMMANDS: dict[str, Command[Any]] = {  # in the order and under the headings of --help
    "quantize": Command(QuantizeOptions, _quantize, CONVERT, _preview_quantize),
    "dequantize": Command(DequantizeOptions, _dequantize, CONVERT),
    "transcode": Command(TranscodeOptions, _transcode, CONVERT),
    "merge": Command(MergeOptions, _merge, CONVERT),
    "inspect": Command(InspectOptions, _inspect, CHECK, hidden=LOOKING),
    "verify": Command(VerifyOptions, _verify, CHECK, hidden=LOOKING),
    "compare": Command(CompareOptions, _compare, CHECK, hidden=LOOKING),
    "reproduce": Command(ReproduceOptions, _reproduce, CHECK, hidden=frozenset({"force"})),
    "attest": Command(AttestOptions, _attest, CHECK),
    "evaluate": Command(EvaluateOptions, _evaluate, CHECK),
    "analyze": Command(AnalyzeOptions, _analyze, PREPARE),
    "calibrate": Command(CalibrateOptions, _calibrate, PREPARE),
    "prune": Command(PruneOptions, _prune, PREPARE, _preview_prune),
    "recipes": Command(RecipesOptions, _recipes, HELP),
    "explain": Command(ExplainOptions, _explain, HELP),
    "doctor": Command(DoctorOptions, _doctor, HELP),
}
