"""List the commands: options, work and drawing, loaded when one runs."""

from fp4convert.cli.options import Command

# Of a command that only looks, a person is not asked how the Hub is read.
LOOKING = frozenset({"memory"})
CONVERT, CHECK, PREPARE, MORE = "Convert", "Check", "Prepare", "More"
COMMANDS: dict[str, Command] = {  # in the order and under the headings of --help
    "quantize": Command(
        "writing:QuantizeOptions",
        CONVERT,
        "commands.convert:quantize",
        "draw_results:draw_result",
        preview="commands.convert:preview_quantize",
    ),
    "dequantize": Command(
        "rewriting:DequantizeOptions",
        CONVERT,
        "commands.convert:dequantize",
        "draw_results:draw_result",
    ),
    "transcode": Command(
        "rewriting:TranscodeOptions",
        CONVERT,
        "commands.convert:transcode",
        "draw_results:draw_result",
    ),
    "push": Command(
        "rewriting:PushOptions", CONVERT, "commands.upload:push", "draw_results:draw_pushed"
    ),
    "inspect": Command(
        "looking:InspectOptions",
        CHECK,
        "commands.quality:inspect",
        "draw_quality:draw_artifact",
        verdict="healthy",
        hidden=LOOKING,
    ),
    "verify": Command(
        "looking:VerifyOptions",
        CHECK,
        "commands.quality:verify",
        "draw_quality:draw_verification",
        verdict="passed",
        hidden=LOOKING,
    ),
    "evaluate": Command(
        "measuring:EvaluateOptions",
        CHECK,
        "commands.evaluation:evaluate",
        "draw_quality:draw_evaluation",
        verdict="passed",
    ),
    "compare": Command(
        "measuring:CompareOptions",
        CHECK,
        "commands.quality:compare",
        "draw_quality:draw_comparison",
        verdict="passed",
        hidden=LOOKING,
    ),
    "explain": Command(
        "looking:ExplainOptions", CHECK, "commands.reference:explain", "draw_results:draw_explained"
    ),
    "calibrate": Command(
        "measuring:CalibrateOptions",
        PREPARE,
        "commands.calibration:calibrate",
        "draw_quality:draw_calibrated",
    ),
    "merge": Command(
        "rewriting:MergeOptions", MORE, "commands.convert:merge", "draw_results:draw_merged"
    ),
    "analyze": Command(
        "looking:AnalyzeOptions", MORE, "commands.quality:analyze", "draw_quality:draw_study"
    ),
    "prune": Command(
        "rewriting:PruneOptions",
        MORE,
        "commands.convert:prune",
        "draw_results:draw_result",
        preview="commands.convert:preview_prune",
    ),
    "reproduce": Command(
        "looking:ReproduceOptions",
        MORE,
        "commands.reproduction:reproduce",
        "draw_results:draw_reproduced",
        verdict="reproduced",
        hidden=frozenset({"force"}),
    ),
    "attest": Command(
        "looking:AttestOptions", MORE, "commands.attestation:attest", "draw_results:draw_attested"
    ),
    "recipes": Command(
        "looking:RecipesOptions", MORE, "commands.reference:recipes", "draw_results:draw_recipes"
    ),
    "doctor": Command(
        "looking:DoctorOptions", MORE, "cli.doctor:doctor", "draw_results:draw_examination"
    ),
}
