"""List the commands: options, work and drawing, loaded when one runs."""

from fp4convert.cli.options import Command
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

# Of a command that only looks, a person is not asked how the Hub is read.
LOOKING = frozenset({"memory"})
CONVERT, CHECK, PREPARE, HELP = "Convert", "Check", "Prepare", "Help"
COMMANDS: dict[str, Command] = {  # in the order and under the headings of --help
    "quantize": Command(
        QuantizeOptions,
        CONVERT,
        "commands.convert:quantize",
        "draw_results:draw_result",
        preview="commands.convert:preview_quantize",
    ),
    "dequantize": Command(
        DequantizeOptions, CONVERT, "commands.convert:dequantize", "draw_results:draw_result"
    ),
    "transcode": Command(
        TranscodeOptions, CONVERT, "commands.convert:transcode", "draw_results:draw_result"
    ),
    "merge": Command(MergeOptions, CONVERT, "commands.convert:merge", "draw_results:draw_merged"),
    "inspect": Command(
        InspectOptions,
        CHECK,
        "commands.quality:inspect",
        "draw_quality:draw_artifact",
        verdict="healthy",
        hidden=LOOKING,
    ),
    "verify": Command(
        VerifyOptions,
        CHECK,
        "commands.quality:verify",
        "draw_quality:draw_verification",
        verdict="passed",
        hidden=LOOKING,
    ),
    "compare": Command(
        CompareOptions,
        CHECK,
        "commands.quality:compare",
        "draw_quality:draw_comparison",
        verdict="passed",
        hidden=LOOKING,
    ),
    "reproduce": Command(
        ReproduceOptions,
        CHECK,
        "commands.reproduction:reproduce",
        "draw_results:draw_reproduced",
        verdict="reproduced",
        hidden=frozenset({"force"}),
    ),
    "attest": Command(
        AttestOptions, CHECK, "commands.attestation:attest", "draw_results:draw_attested"
    ),
    "evaluate": Command(
        EvaluateOptions,
        CHECK,
        "commands.evaluation:evaluate",
        "draw_quality:draw_evaluation",
        verdict="passed",
    ),
    "analyze": Command(
        AnalyzeOptions, PREPARE, "commands.quality:analyze", "draw_quality:draw_study"
    ),
    "calibrate": Command(
        CalibrateOptions, PREPARE, "commands.calibration:calibrate", "draw_quality:draw_calibrated"
    ),
    "prune": Command(
        PruneOptions,
        PREPARE,
        "commands.convert:prune",
        "draw_results:draw_result",
        preview="commands.convert:preview_prune",
    ),
    "recipes": Command(
        RecipesOptions, HELP, "commands.reference:recipes", "draw_results:draw_recipes"
    ),
    "explain": Command(
        ExplainOptions, HELP, "commands.reference:explain", "draw_results:draw_explained"
    ),
    "doctor": Command(DoctorOptions, HELP, "cli.doctor:doctor", "draw_results:draw_examination"),
}
