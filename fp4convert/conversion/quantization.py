"""What each command asks for, checked and planned; and the records that make the result an artifact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from fp4convert.artifact import REPORT, Artifact
from fp4convert.backends import open_backend
from fp4convert.cache_scales import check_word, plan_cache
from fp4convert.calibration_file import Calibration
from fp4convert.carrying import Carrier, describe_carried, stored_blocks, taken_over
from fp4convert.dialects import Dialect, dialect_named, dialect_to_write
from fp4convert.ending import as_text
from fp4convert.errors import InputError
from fp4convert.folds import uses_of
from fp4convert.formats import FLOAT_TYPES, Blocks, dtype_named, format_named, row_panels
from fp4convert.input_scales import Constant, Measured, choose_scales
from fp4convert.job import Job, Result, begin, carry_out
from fp4convert.linears import Linears, find_linears
from fp4convert.makers import Dequantizer, Quantizer, Transcoder
from fp4convert.manifest import Manifest
from fp4convert.merging import Merged, merge_folds
from fp4convert.methods import FOLDING, open_statistics, reopened, rule_of, with_statistics
from fp4convert.output import OutputFolder
from fp4convert.plan import Scalars, plan_quantize
from fp4convert.recipe import Choice, Recipe, Target, build_recipe, model_recipe
from fp4convert.recipe_rules import FormatRule
from fp4convert.record import RECORD, Contents, folds_recorded, make_record, unquantized
from fp4convert.respelling import plan_dequantize, plan_transcode
from fp4convert.smoothing import Smoother
from fp4convert.sources import Source, uncollected
from fp4convert.sources.naming import index_file
from fp4convert.stacking import find_stacks, rules_of
from fp4convert.tasks import Plan
from fp4convert.template import Framed, place_modules
from fp4convert.workers import Settings

ENGINE_RECORDS = frozenset(  # of any dialect: a source's own would contradict ours
    {RECORD, "hf_quant_config.json", REPORT}
)


@dataclass(frozen=True, slots=True)
class Request:
    """What `quantize` is asked for, in a user's words; recipe.py and plan.py say what each means."""

    format: str
    dialect: str = "compressed-tensors"
    scale_rule: str | None = None
    activations: int = 16
    input_scale: str | float | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    recipe: str | None = None
    stack_order: str | None = None
    stack_rows: str | None = None
    keep_packed: bool = False
    via: str | None = None
    calibration: str | None = None
    method: str = "rtn"
    kv_cache: str | None = None


def prepare_quantize(source: Source, request: Request, formats: tuple[FormatRule, ...] = ()) -> Plan:
    """The plan that `quantize` carries out; InputError for anything that the request or the source has wrong.

    formats  of modules, before those of the recipe: a choice that was made to fit a size
    """
    asked = understand(source, request)
    plan = asked.plan(source, formats)
    if asked.calibration:
        plan = with_statistics(plan, asked.calibration)
    for module, q in () if source.is_streamed else stored_blocks(plan):  # from a Hub each would be a request: the run tells
        _refuse_odd_scale(module, q)
        _check_scalars(module, q, None, _dialect_of(plan))
    return plan


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, understood: all that a plan is made of, and the calibration that it names."""

    recipe: Recipe
    linears: Linears
    scalars: Scalars
    calibration: Calibration | None

    def plan(self, source: Source, formats: tuple[FormatRule, ...] = ()) -> Plan:
        """The plan, with these formats of modules before the recipe's."""
        recipe = replace(self.recipe, formats=(*formats, *self.recipe.formats))
        with uncollected():
            merged = self._merged(source, recipe)
            plan = plan_quantize(source.checkpoint, recipe, merged.linears, self.scalars)
        return replace(plan, folds=uses_of(merged.folds), warnings=(*plan.warnings, *merged.notes))

    def _merged(self, source: Source, recipe: Recipe) -> Merged:
        """The linear layers under the folds of the method; as they are where it has none."""
        target = recipe.target
        if self.calibration is None or target.method not in FOLDING:
            return Merged(self.linears, (), ())
        if target.via:
            detail = f"--via {target.via} rounds weights before anything else, and --method {target.method} multiplies them first"
            raise InputError("method-via", f"{detail}; expected one of them", "Leave --via out.")
        smoother = Smoother(target, self.calibration, not isinstance(self.scalars.inputs, Constant))
        return merge_folds(source.checkpoint, recipe, self.linears, dialect_to_write(target), smoother.factors)


def understand(source: Source, request: Request) -> Asked:
    """What is asked for, for that source; InputError for anything that the request or the source has wrong."""
    calibration = open_statistics(request.method, request.scale_rule, request.calibration)
    measured = Measured(calibration) if calibration else None
    recipe = _recipe_for(source, request, calibration)
    if calibration:
        calibration.check(source)
    inputs = choose_scales(source, recipe.format, request.activations, request.input_scale, measured)
    with uncollected():
        linears = find_linears(source, recipe)
        return Asked(recipe, linears, Scalars(inputs, measured, plan_cache(source, linears, recipe, calibration)), calibration)


def _recipe_for(source: Source, request: Request, calibration: Calibration | None) -> Recipe:
    """The recipe; InputError for what no format, dialect or recipe has."""
    fmt = format_named(request.format)
    check_word(request.kv_cache)
    traits = dialect_to_write(Target(fmt.name, request.dialect, kv_cache=request.kv_cache)).TRAITS
    reads_any = traits.global_scale_kind and all(shard.frame.reads_global_scales for shard in source.checkpoint.shards)
    is_unit = fmt.has_global_scale and not reads_any
    if request.via not in (None, "fp8"):
        raise InputError("unknown-via", f"--via {request.via!r} is not known; expected fp8", "Leave it out.")
    rule = rule_of(request.method, request.scale_rule)
    target = Target(fmt.name, request.dialect, rule, request.activations, kv_cache=request.kv_cache)
    sha256 = calibration.sha256 if calibration else None
    target = replace(target, has_unit_scale=is_unit, via=request.via, method=request.method, calibration=sha256)
    stacks = (request.stack_order, request.stack_rows)
    choice = Choice(request.recipe, request.include, request.exclude, *stacks, request.keep_packed)
    return build_recipe(target, source.checkpoint.config, choice)


def quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_quantize; the artifact's record is written last.

    Raises DeviceError for a device that is not there; OutputError as open_output does; NumericError, after all sound shards
    are written, where weights are NaN or Inf: then neither index nor records are written.
    """
    worker = Quantizer(source, plan.target, open_backend(settings.device), reopened(plan))
    with worker.working():
        result = carry_out(artifact_job(source, plan), worker, output, settings)
    if settings.share or not any(step.action == "transcode" for step in plan.steps):
        return result
    return replace(result, carried=describe_carried(taken_over(plan), _dialect_of(plan).TRAITS.global_scale_kind))


def manifest_of(source: Source, plan: Plan) -> Manifest:
    """What the output folder of `quantize` remembers."""
    return artifact_job(source, plan).manifest()


def name_files(source: Source, plan: Plan) -> list[str]:
    """Every file that `quantize` writes."""
    manifest = manifest_of(source, plan)
    return [*manifest.files, manifest.last]


def begin_quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> OutputFolder:
    """The output folder with the plan in it, for other processes to join; raises what quantize does before it works."""
    return begin(artifact_job(source, plan), output, settings)


def prepare_dequantize(source: Source, artifact: Artifact | None, dtype: str) -> Plan:
    """The plan that `dequantize` carries out.

    artifact  what the source is, where some of its modules have four bits
    Raises    InputError for an unknown dtype, an artifact with errors, or weights that nothing here reads
    """
    if artifact:
        for module in artifact.modules:
            _refuse_odd_scale(module, artifact.decode(module))
    recipe = model_recipe(source.checkpoint.config)
    linears = find_linears(source, recipe)
    stacks, notes = find_stacks(linears.of.values(), rules_of(artifact, recipe) if artifact else ())
    packed = [linear for linear in linears.of.values() if linear.coding.is_packed]
    idle = [ref.name for ref in linears.idle]
    if artifact:
        idle += [ref.name for module in artifact.modules.values() for ref in module.companions]
        idle += artifact.cache_scales(artifact.spelling)
    plan = plan_dequantize(source.checkpoint, packed, stacks, dtype, idle)
    return replace(plan, warnings=(*plan.warnings, *notes))


def dequantize(source: Source, artifact: Artifact | None, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_dequantize: ordinary weights again, with the values that engines compute.

    Raises DeviceError for a device that is not there; NumericError beyond fp16's range; OutputError as open_output does.
    """
    config = _with_dtype(source.checkpoint.config, FLOAT_TYPES[dtype_named(plan.target.format)].config_name)
    config = unquantized(config)
    texts = index_text(plan)
    last = plan.shards[-1].file
    if all(shard.frame.container == "safetensors" for shard in source.checkpoint.shards):
        last = "config.json"
        texts[last] = as_text(config)
    job = Job(source, plan, texts, None, last, ENGINE_RECORDS | texts.keys())
    return carry_out(job, Dequantizer(source, open_backend(settings.device)), output, settings)


@dataclass(frozen=True, slots=True)
class TranscodeRequest:
    """What `transcode` is asked for.

    format        the artifact's own where None; nvfp4 for an MXFP4 artifact
    scale_layout  the dialect's own where None
    """

    dialect: str
    format: str | None = None
    scale_layout: str | None = None


def prepare_transcode(artifact: Artifact, request: TranscodeRequest, donor: Source | None = None) -> Plan:
    """The plan that `transcode` carries out; InputError for what cannot be said without a change, or an artifact with errors.

    donor  a GGUF file, whose frame the result gets
    """
    artifact.refuse_unsound()
    made = format_named(request.format or artifact.format.name)
    is_same = made is artifact.format
    if not is_same and artifact.format.has_global_scale:
        detail = f"{artifact.format.name} cannot be carried into {made.name}: its block scales are no powers of two"
        raise InputError("not-lossless", detail, "Dequantize it, and quantize the result.")
    recorded = str(artifact.record.get("scale_rule"))
    rule = recorded if is_same and recorded in made.scale_rules else None
    activations = artifact.form.activations if is_same else 16
    target = Target(made.name, request.dialect, rule, activations, request.scale_layout, artifact.form.kv_cache)
    method, calibration = (_word(artifact.record.get(key)) for key in ("method", "calibration"))
    target = replace(target, method=method, calibration=calibration)
    spelling = dialect_to_write(target)
    for module in artifact.modules if is_same else ():
        _refuse_odd_scale(module, artifact.decode(module))
        _check_scalars(module, artifact.decode(module), artifact.input_scale(module), spelling)
        _check_block_scales(artifact, module, spelling)
    if donor is None:
        renamed = artifact.cache_scales(spelling)
        plan = plan_transcode(artifact.source.checkpoint, artifact.modules, target, renamed=renamed)
        return _as_before(artifact, plan)
    if spelling.TRAITS.container != "gguf":
        raise InputError("template", f"--template means nothing for dialect {request.dialect}; it is for gguf", "Leave it out.")
    _check_unit_scales(artifact, donor)
    framed = Framed(donor, artifact.source).checkpoint
    return _as_before(artifact, plan_transcode(framed, artifact.modules, target, place_modules(artifact, donor)))


def _check_unit_scales(artifact: Artifact, donor: Source) -> None:
    """InputError where llama.cpp reads no global scale for the donor's architecture, and a module has one."""
    if all(shard.frame.reads_global_scales for shard in donor.checkpoint.shards):
        return
    for module in artifact.modules:
        if artifact.decode(module).global_scale not in (None, 1.0):
            detail = f"{module} has a global scale other than 1, which llama.cpp passes over for models of this architecture"
            next_step = "Quantize the GGUF file itself: fp4convert quantize FILE.gguf --dialect gguf."
            raise InputError("dialect-global-scale", detail, next_step, module)


def _as_before(artifact: Artifact, plan: Plan) -> Plan:
    """The plan, with how the source's stacks were read, and what a cast loses beside values."""
    stacks = rules_of(artifact, model_recipe(artifact.source.checkpoint.config))
    plan = replace(plan, stacks=stacks, folds=folds_recorded(artifact.record))
    if artifact.form.activations == plan.target.activations:
        return plan
    lost = "activations become 16-bit: four-bit ones of nvfp4 need input scales, which an mxfp4 artifact does not have"
    return replace(plan, warnings=(*plan.warnings, lost))


def _refuse_odd_scale(module: str, q: Blocks) -> None:
    """InputError where a global scale is no positive number, which would make every value of its module wrong."""
    if q.global_scale is not None and not 0 < q.global_scale < math.inf:
        detail = f"{module}: its global scale is {q.global_scale}; expected a positive number"
        raise InputError("global-scale", detail, "See: fp4convert inspect.", module)


def _check_scalars(module: str, q: Blocks, input_scale: float | None, spelling: Dialect) -> None:
    """InputError where the dialect cannot say a module's global scale or input scale."""
    try:
        for _ in spelling.encode_scalars(module, q, input_scale):
            pass
    except InputError as error:
        message = error.message if module in error.message else f"{module}: {error.message}"
        raise InputError(error.code, message, error.next_step, module) from None


def _check_block_scales(artifact: Artifact, module: str, spelling: Dialect) -> None:
    """InputError where engines of the dialect would read a block scale as another number."""
    highest = spelling.TRAITS.highest_scale.get(artifact.format)
    if highest is None:
        return
    q, sayable = artifact.decode(module), bytes(range(highest + 1))
    panels = (q.rows(first, last) for first, last in row_panels(q.shape))
    if count := sum(len(bytes(rows.block_scales).translate(None, sayable)) for rows in panels):
        detail = f"{module} has {count} block scales with a sign, or that are NaN; engines would read them as other numbers"
        raise InputError("dialect-block-scale", detail, "See: fp4convert inspect --full.", module)


def transcode(artifact: Artifact, plan: Plan, output: Path, settings: Settings, donor: Source | None = None) -> Result:
    """Carry out a plan of prepare_transcode: the same codes and block scales under other names.

    Raises OutputError as open_output does.
    """
    source = Framed(donor, artifact.source) if donor else artifact.source
    job = artifact_job(source, plan, _origin_of(artifact))
    carrier = Carrier(artifact, format_named(plan.target.format))
    carried = describe_carried(carrier.each(), _dialect_of(plan).TRAITS.global_scale_kind)
    result = carry_out(job, Transcoder(artifact, source, carrier, plan.target), output, settings)
    return replace(result, carried=carried)


def _origin_of(artifact: Artifact) -> dict[str, object]:
    """Where an artifact's record says that its weights come from."""
    recorded = artifact.record.get("source")
    known = recorded if isinstance(recorded, dict) else {}
    return {key: _word(known.get(key)) for key in ("repo", "revision")}


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def artifact_job(source: Source, plan: Plan, origin: dict[str, object] | None = None) -> Job:
    """The conversion whose result is an artifact: shards, then the records that engines read, last our own.

    origin  of the weights; None where it is the source
    """
    spelling = _dialect_of(plan)
    groups = plan.groups
    records = spelling.records(groups, plan.ignored)
    config = unquantized(source.checkpoint.config)
    if "config.json" in records or (config and spelling.TRAITS.container == "safetensors"):
        records["config.json"] = {**config, **records.get("config.json", {})}
    texts = {**index_text(plan), **{file: as_text(record) for file, record in records.items()}}
    producer = {"name": "fp4convert", "version": version("fp4convert")}
    here: dict[str, object] = {"repo": source.checkpoint.repo, "revision": source.checkpoint.revision}
    record = make_record(
        plan.target, Contents(groups, plan.ignored, plan.shapes, plan.stacks, plan.folds), producer, origin or here
    )
    return Job(source, plan, texts, record, RECORD, ENGINE_RECORDS | texts.keys())


def _with_dtype(config: dict[str, object], dtype: str) -> dict[str, object]:
    """The config with every declared dtype widened to hold `dtype` too: engines load all weights in the declared one."""
    known = {kind.config_name for kind in FLOAT_TYPES.values()}
    widened: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            widened[key] = _with_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value in known and value != dtype:
            widened[key] = FLOAT_TYPES["F32"].config_name
        else:
            widened[key] = value
    return widened


def _dialect_of(plan: Plan) -> Dialect:
    if plan.target.dialect is None:
        raise RuntimeError("a plan to dequantize has no dialect")
    return dialect_named(plan.target.dialect)


def index_text(plan: Plan) -> dict[str, str]:
    """The index of several shards, or of one whose name says that there are others."""
    files = [shard.file for shard in plan.shards]
    is_alone = len(files) == 1 and "-of-" not in files[0]
    return {} if is_alone else {index_file(files): as_text(plan.index)}
