"""Join the options, the work and the drawing of every command.

What a command needs is imported when it runs.
"""

from pathlib import Path
from typing import Any

from fp4convert.cli.options import Command, Shown
from fp4convert.commands.checks import checked
from fp4convert.options.looking import (
    AnalyzeOptions,
    AttestOptions,
    DoctorOptions,
    ExplainOptions,
    InspectOptions,
    RecipesOptions,
    ReproduceOptions,
    VerifyOptions,
)
from fp4convert.options.measuring import CalibrateOptions, CompareOptions, EvaluateOptions
from fp4convert.options.rewriting import (
    DequantizeOptions,
    MergeOptions,
    PruneOptions,
    TranscodeOptions,
)
from fp4convert.options.writing import QuantizeOptions


def _quantize(options: QuantizeOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.quantize(checked(options)).as_json(), draw_results.draw_result)


def _preview_quantize(options: QuantizeOptions) -> Shown:
    from fp4convert.cli import draw_plan
    from fp4convert.commands import convert

    plan = convert.preview_quantize(checked(options))
    return Shown(plan, draw_plan.draw_plan, error=plan.get("error"))


def _dequantize(options: DequantizeOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.dequantize(checked(options)).as_json(), draw_results.draw_result)


def _transcode(options: TranscodeOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.transcode(checked(options)).as_json(), draw_results.draw_result)


def _prune(options: PruneOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.prune(checked(options)).as_json(), draw_results.draw_result)


def _preview_prune(options: PruneOptions) -> Shown:
    from fp4convert.cli import draw_plan
    from fp4convert.commands import convert

    plan = convert.preview_prune(checked(options))
    return Shown(plan, draw_plan.draw_plan, error=plan.get("error"))


def _merge(options: MergeOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import convert

    return Shown(convert.merge(checked(options)), draw_results.draw_merged)


def _inspect(options: InspectOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    document = quality.inspect(checked(options))
    return Shown(document, draw_quality.draw_artifact, document["healthy"])


def _verify(options: VerifyOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    document = quality.verify(checked(options)).as_json()
    return Shown(document, draw_quality.draw_verification, document["passed"])


def _compare(options: CompareOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import quality

    document = quality.compare(checked(options))
    return Shown(document, draw_quality.draw_comparison, document["passed"] is not False)


def _reproduce(options: ReproduceOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import reproduction

    document = reproduction.reproduce(checked(options))
    return Shown(document, draw_results.draw_reproduced, document["reproduced"])


def _attest(options: AttestOptions) -> Shown:
    from fp4convert.cli import draw_results
    from fp4convert.commands import attestation

    return Shown(attestation.attest(checked(options)), draw_results.draw_attested)


def _evaluate(options: EvaluateOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import evaluation

    document = evaluation.evaluate(checked(options)).as_json()
    return Shown(document, draw_quality.draw_evaluation, document["passed"] is not False)


def _analyze(options: AnalyzeOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import analysis

    return Shown(analysis.analyze(checked(options)), draw_quality.draw_study)


def _calibrate(options: CalibrateOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.commands import calibration

    return Shown(calibration.calibrate(checked(options)).as_json(), draw_quality.draw_calibrated)


def _explain(options: ExplainOptions) -> Shown:
    from fp4convert.cli import draw_quality
    from fp4convert.report import explanations

    if options.code is None:
        return Shown(explanations.explain_all(), draw_quality.draw_subjects)
    if explanations.is_subject(options.code):
        return Shown(explanations.explain_all(options.code), draw_quality.draw_codes)
    return Shown(explanations.explain(options.code), draw_quality.draw_code)


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
