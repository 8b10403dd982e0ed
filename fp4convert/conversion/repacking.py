"""Plan and carry out dequantize and transcode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fp4convert.checkpoint.artifact import Artifact, params_unquantized
from fp4convert.checkpoint.dialects.base import Dialect
from fp4convert.checkpoint.dialects.forms import ACTIVATIONS_FP4, ACTIVATIONS_FP8, Form
from fp4convert.checkpoint.dialects.registry import dialect_named
from fp4convert.checkpoint.dialects.target_forms import (
    dialect_to_write,
    module_form,
    usual_activations,
)
from fp4convert.checkpoint.encodings.base import scales_not_finite
from fp4convert.checkpoint.encodings.fp4 import find_fp4
from fp4convert.checkpoint.encodings.fp8 import find_fp8
from fp4convert.checkpoint.expert_stacks import find_stacks, rules_of, rules_of_gguf
from fp4convert.checkpoint.linears import find_linears, others_of
from fp4convert.checkpoint.record import (
    ADAPTER,
    BASE,
    DECODED,
    OPTIONS,
    PADDING,
    TRANSCODED,
    describe_groups,
    folds_recorded,
)
from fp4convert.checkpoint.soundness import refuse_unsound
from fp4convert.checkpoint.unread import INPUT_FACTORS
from fp4convert.conversion.artifact_job import (
    CARD_LEFT,
    ENGINE_RECORDS,
    artifact_job,
    dialect_of,
    index_text,
    own_card,
)
from fp4convert.conversion.carried_blocks import (
    check_block_scales,
    check_scalars,
    describe_carried,
    refuse_odd_scale,
)
from fp4convert.conversion.recorded_options import refuse_harmed
from fp4convert.errors import ChoiceError, InputError
from fp4convert.execution.carry_out import carry_out
from fp4convert.execution.job import Job
from fp4convert.execution.settings import Result, Settings
from fp4convert.makers.maker import Tools
from fp4convert.numerics.backends import open_backend
from fp4convert.numerics.formats import FLOAT_TYPES, FP4_FORMATS, Format, dtype_named, format_named
from fp4convert.options.arguments import check_keep_dtype
from fp4convert.options.rewriting import TranscodeOptions
from fp4convert.planning.gguf_template import PLACELESS, name_replaced, place_modules
from fp4convert.planning.kept_dtype import held_form, unheld
from fp4convert.planning.kv_cache_scales import carry_cache
from fp4convert.planning.plan import Plan
from fp4convert.planning.repack_plan import (
    Transcoding,
    plan_dequantize,
    plan_transcode,
    refuse_other_matrices,
)
from fp4convert.planning.steps import refuse_forgotten
from fp4convert.progress import are_text
from fp4convert.quality.scale_checks import (
    are_equal,
    check_other_scales,
    find_shared_scales,
    read_global_scales,
)
from fp4convert.recipes.recipe import Target, model_recipe
from fp4convert.storage.joined import JoinedSource
from fp4convert.storage.json_text import as_text, unquantized
from fp4convert.storage.source import Source, refusing


def prepare_dequantize(source: Source, artifact: Artifact | None, dtype: str) -> Plan:
    """Plan what `dequantize` carries out.

    artifact  what the source is, where some of its modules have four bits
    Raises    InputError for an unknown dtype, an artifact with errors, or weights that nothing
              here reads
    """
    if artifact:
        for module in artifact.modules:
            refuse_odd_scale(module, artifact.decode(module))
        _refuse_other_scales(artifact)
    recipe = model_recipe(source.checkpoint.config)
    linears = find_linears(source, recipe)
    rules = [*rules_of_gguf(linears.of.values(), recipe)]
    idle, notes = [ref.name for ref in linears.idle], []
    if artifact:
        rules = [*rules_of(artifact, recipe), *rules]
        idle += [ref.name for module in artifact.modules.values() for ref in module.companions]
        idle += artifact.cache_scales
        if PADDING in artifact.record:
            notes.append(
                "the zeros that the artifact has for ranks of tensor parallelism stay, in weights"
                " and config.json; the model computes the same"
            )
    stacks, doubts = find_stacks(linears.of.values(), tuple(dict.fromkeys(rules)))
    packed = [linear for linear in linears.of.values() if linear.coding.is_packed]
    packed += linears.vectors.values()
    plan = plan_dequantize(source.checkpoint, packed, stacks, dtype, idle)
    card = [CARD_LEFT] if own_card(source) else []
    return replace(plan, warnings=(*plan.warnings, *doubts, *notes, *card))


def dequantize(source: Source, plan: Plan, output: Path, settings: Settings) -> Result:
    """Write ordinary weights again, with the values that engines compute.

    plan    of prepare_dequantize
    Raises  DeviceError for a device that is not there; NumericError beyond fp16's range;
            OutputError as open_output does
    """
    refuse_harmed(source, output, settings)
    texts = {**params_unquantized(source), **index_text(plan)}
    last = plan.shards[-1].file
    if all(shard.frame.container == "safetensors" for shard in source.checkpoint.shards):
        last, dtype = "config.json", FLOAT_TYPES[dtype_named(plan.target.format)].config_name
        texts[last] = as_text(unquantized(_widen_dtypes(source.checkpoint.config, dtype)))
    replaced = ENGINE_RECORDS | texts.keys() | own_card(source)
    job = Job(source, plan, texts, None, last, replaced, "dequantize")
    # Values are twice to seven times as long as codes: a GPU would send back more than it gets.
    device = "cpu" if settings.device == "auto" else settings.device
    return carry_out(job, Tools(source, open_backend(device)), output, settings)


def prepare_transcode(
    artifact: Artifact, options: TranscodeOptions, donor: Source | None = None
) -> Plan:
    """Plan what `transcode` carries out.

    donor   a GGUF file, whose frame the result gets
    Raises  InputError for what cannot be said without a change, or an artifact with errors
    """
    refuse_unsound(artifact)
    _refuse_other_scales(artifact)
    _refuse_corrections(artifact, str(options.dialect))
    check_keep_dtype(options.keep_dtype, options.dialect)
    made = _cast_to(artifact, options.format)
    target = _target_of(artifact, options, made)
    contents = _contents_of(artifact, target, made)._replace(keep_dtype=options.keep_dtype)
    spelling = _dialect_of(target)
    with refusing(artifact.source):
        for module, packed in artifact.modules.items():
            if made in (None, packed.form.format):
                q = artifact.decode(module)
                check_scalars(module, q, artifact.input_scale(module), spelling)
                check_block_scales(module, q, spelling)
    replaced: dict[str, str] = {}
    if donor is None:
        caches, notes = carry_cache(artifact, spelling)
        notes = (*notes, *([CARD_LEFT] if own_card(artifact.source) else []))
        plan = plan_transcode(artifact.source.checkpoint, contents, target, caches=caches)
    else:
        plan, replaced = _plan_framed(artifact, contents, target, donor)
        lost = [
            name for name, reason in {**replaced, **plan.left_out}.items() if reason == PLACELESS
        ]
        what = f"{are_text(len(lost), 'tensor')} left out, for the GGUF file has no place for them"
        notes = (f"{what}, the first {lost[0]!r}",) if lost else ()
    return replace(
        plan,
        warnings=(*plan.warnings, *notes, *_losses(artifact, plan, made)),
        stacks=rules_of(artifact, model_recipe(artifact.source.checkpoint.config)),
        folds=folds_recorded(artifact.record),
        options=_options_recorded(artifact, options),
        left_out={**replaced, **plan.left_out},
    )


def _plan_framed(
    artifact: Artifact, contents: Transcoding, target: Target, donor: Source
) -> tuple[Plan, dict[str, str]]:
    """Plan an artifact's modules in the frame of a GGUF file.

    Returns  also the tensors of the artifact that the file's own replace, and why
    """
    if dialect_named(str(target.dialect)).TRAITS.container != "gguf":
        detail = f"--template is not for dialect {target.dialect}, only for gguf"
        raise InputError("template", detail, "Leave it out.")
    _check_unit_scales(artifact, donor)
    refuse_other_matrices(artifact.source.checkpoint, contents)
    framed = JoinedSource(donor, artifact.source, has_sidecars=False).checkpoint
    with refusing(artifact.source), refusing(donor):
        placed = place_modules(artifact, contents.others, donor)
        replaced = name_replaced(artifact, contents.others, donor)
    plan = plan_transcode(framed, contents, target, placed)
    refuse_forgotten(artifact.tensors.values(), plan.tasks, {**replaced, **plan.left_out}, {})
    return plan, replaced


def _dialect_of(target: Target) -> Dialect:
    """Return the dialect to write; blame no option that transcode lacks."""
    try:
        return dialect_to_write(target)
    except ChoiceError as error:
        if error.code != "dialect-activations":
            raise
        detail = f"the artifact is for {target.activations}-bit activations of {target.format}"
        detail = f"{detail}, which dialect {target.dialect} cannot record"
        step = "Choose another --dialect; or quantize it again: fp4convert quantize ARTIFACT."
        raise InputError(error.code, detail, step) from None


def _options_recorded(artifact: Artifact, options: TranscodeOptions) -> dict[str, object] | None:
    """Return the options of quantize and of all later transcodes, if known."""
    known = artifact.record.get(OPTIONS)
    if not isinstance(known, dict):
        return None
    earlier = known.get(TRANSCODED, [])
    names = ("dialect", "format", "scale_layout", "keep_dtype")
    told = {name: getattr(options, name) for name in names}
    told["template"] = options.template is not None or None
    step = {name: value for name, value in told.items() if value is not None}
    return {**known, TRANSCODED: [*(earlier if isinstance(earlier, list) else ()), step]}


def _cast_to(artifact: Artifact, word: str | None) -> Format | None:
    """Return the format that four-bit modules are cast to; None for their own."""
    if word is None:
        return None
    made = format_named(word, FP4_FORMATS)
    for module, packed in artifact.modules.items():
        fmt = packed.form.format
        if fmt is not made and fmt.has_global_scale:
            detail = f"{fmt.name} cannot be carried into {made.name}: its block scales are not"
            raise InputError("not-lossless", f"{detail} powers of two", tensor=module)
    if artifact.others and not artifact.modules:
        words = describe_groups(artifact.groups)
        detail = f"{words} cannot be carried into {made.name}: it would be rounded again"
        step = "Leave --format out; or round it: fp4convert quantize."
        raise InputError("not-lossless", detail, step)
    return made


def _target_of(artifact: Artifact, options: TranscodeOptions, made: Format | None) -> Target:
    """Make the target: the first format, and what our record says of how."""
    forms, record = artifact.forms, artifact.record
    fmt = made or forms[0].format
    recorded = str(record.get("scale_rule"))
    is_same = made is None or made is forms[0].format
    rule = recorded if is_same and recorded in fmt.scale_rules else None
    bits = _activations(artifact, fmt, made)
    if fmt.is_fp8:
        bits = usual_activations(fmt, options.dialect)
    target = Target(fmt.name, options.dialect, rule, bits, options.scale_layout, forms[0].kv_cache)
    target = target._replace(
        method=_text_in(record, "method"),
        calibration=_text_in(record, "calibration"),
        keep_dtype=options.keep_dtype or _text_in(record, "keep_dtype"),
    )
    damping, passes = record.get("damping"), record.get("passes")
    if type(damping) is float and type(passes) is int:
        target = target._replace(damping=damping, passes=passes)
    return target


def _activations(artifact: Artifact, fmt: Format, made: Format | None) -> int:
    """Return the most bits of a format's activations; 16 for a cast."""
    if made and any(packed.form.format is not made for packed in artifact.modules.values()):
        return 16
    return max((form.activations for form in artifact.forms if form.format is fmt), default=16)


def _contents_of(artifact: Artifact, target: Target, made: Format | None) -> Transcoding:
    """Find the form of every quantized module in the target's dialect."""
    traits = dialect_named(str(target.dialect)).TRAITS
    fp8 = find_fp8(artifact.clues, artifact.packed)
    unrecorded = {
        module: linear
        for module, linear in fp8.items()
        if len(linear.refs) > 1 and not linear.coding.is_at_home
    }
    staying = fp8.keys() - unrecorded.keys()
    unscaled = frozenset(ref.name for module in staying for ref in fp8[module].refs)
    others = {**unrecorded, **others_of(artifact)}
    becoming = {module: made or one.form.format for module, one in artifact.modules.items()}
    step = "Choose one of these dialects; or dequantize the artifact, and quantize the result."
    forms: dict[str, Form] = {}
    for fmt in (four := {*becoming.values()}):
        if len(four) > 1 and not four <= set(traits.mixes):
            odd = next(module for module, own in becoming.items() if own not in traits.mixes)
            raise unheld(find_fp4(artifact)[odd], target, step, four)
        bits = _activations(artifact, fmt, made)
        form = module_form(target._replace(activations=bits), fmt.name)
        forms |= {module: form for module, own in becoming.items() if own is fmt}
    if traits.container == "gguf" and four:  # which has no place for them: they become floats
        return Transcoding(artifact, others, forms, unscaled=unscaled)
    eight = {packed.form.format for packed in artifact.others.values()}
    eight |= {one.coding.format for one in unrecorded.values() if one.coding.format}
    for module, linear in others.items():
        packed = artifact.others.get(module)
        bits = packed.form.activations if packed else ACTIVATIONS_FP8
        own = held_form(linear, target._replace(activations=bits), four | eight)
        if own is None:
            raise unheld(linear, target, step, four | eight)
        forms[module] = own
    return Transcoding(artifact, others, forms, unscaled=unscaled)


def _check_unit_scales(artifact: Artifact, donor: Source) -> None:
    """Refuse global scales if llama.cpp reads none for the architecture."""
    if all(shard.frame.reads_global_scales for shard in donor.checkpoint.shards):
        return
    for module in artifact.modules:
        if artifact.decode(module).global_scale not in (None, 1.0):
            detail = f"{module} has a global scale other than 1, which llama.cpp ignores for models"
            detail = f"{detail} of this architecture"
            step = "Quantize the GGUF file itself: fp4convert quantize FILE.gguf --dialect gguf."
            raise InputError("dialect-global-scale", detail, step, module)


def _refuse_other_scales(artifact: Artifact) -> None:
    """Raise InputError where scales of FP8, MXFP8 or int4 are NaN or infinite."""
    for finding in check_other_scales(artifact):
        if finding.code == "scale-not-finite":
            raise scales_not_finite(str(finding.tensor), finding.detail)


def _refuse_corrections(artifact: Artifact, other: str) -> None:
    """Raise InputError where codes alone are not the weights."""
    factors = (one.stem + INPUT_FACTORS for one in artifact.modules.values())
    if name := next((name for name in factors if name in artifact.tensors), None):
        detail = (
            f"{name} multiplies the inputs of four-bit codes (AWQ), and no dialect written here"
        )
        detail += " holds it; expected codes that are the weights themselves"
        step = f"Round it anew: fp4convert quantize ARTIFACT --format nvfp4 --dialect {other}."
        raise InputError("not-lossless", detail, step, name)
    for name in (artifact.dialect, other):
        if dialect_named(name).TRAITS.correction:
            detail = f"dialect {name} holds low-rank corrections, and codes of what these leave"
            expected = "expected dialects whose codes are the weights themselves"
            next_step = f"Dequantize it, and quantize the result with --dialect {other}."
            raise InputError("not-lossless", f"{detail}; {expected}", next_step)


def _losses(artifact: Artifact, plan: Plan, made: Format | None) -> Iterator[str]:
    """Say what engines lose by the other spelling, or by a cast."""
    if dialect_of(plan).TRAITS.shares_scales and not artifact.spelling.TRAITS.shares_scales:
        scales = read_global_scales(artifact, artifact.modules)
        differing = [one for one in find_shared_scales(artifact, scales) if not are_equal(one)]
        if differing:
            first = " and ".join(differing[0])
            yield (
                f"{len(differing)} groups have different global scales, the first {first}: engines"
                " that fuse them use only one; for these quantize the weights"
            )
    yield from _other_activations(artifact, plan)
    four = (one.form for one in artifact.modules.values() if one.form.format is not made)
    if made and any(form.activations == ACTIVATIONS_FP4 for form in four):
        yield (
            "activations become 16-bit: four-bit ones of nvfp4 need input scales, which an mxfp4"
            " artifact does not have"
        )


def _other_activations(artifact: Artifact, plan: Plan) -> Iterator[str]:
    """Tell where a dialect gives modules other bits of activations."""
    found: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for step in plan.steps:
        packed = artifact.others.get(step.module)
        if packed and step.form and step.form.activations != packed.form.activations:
            bits = packed.form.activations, step.form.activations
            found[step.form.word, *bits].append(step.module)
    for (word, own, other), modules in found.items():
        where = f"{len(modules)} modules of {word}, the first {modules[0]!r}"
        yield (
            f"activations become {other}-bit instead of {own}-bit in engines, for {where}: dialect"
            f" {plan.target.dialect} says no other of them"
        )


def transcode(
    artifact: Artifact, plan: Plan, output: Path, settings: Settings, donor: Source | None = None
) -> Result:
    """Write the same codes and block scales under other names.

    plan    of prepare_transcode
    Raises  OutputError as open_output does
    """
    refuse_harmed(artifact.source, output, settings)
    source = artifact.source
    if donor:
        source = JoinedSource(donor, source, has_sidecars=False)
    record, recorded = artifact.record, artifact.record.get("source")
    # Where the record says that the weights come from.
    known = recorded if isinstance(recorded, dict) else {}
    names = ("repo", "revision", *(known.keys() & {"file"}))
    origin: dict[str, object] = {name: _text_in(known, name) for name in names}
    job = replace(artifact_job(source, plan, origin), action="transcode")
    if job.record:
        told = {key: record[key] for key in (ADAPTER, BASE, PADDING) if key in record}
        steps = [step for step in plan.steps if step.action == "dequantize"]
        if decoded := sorted(output.name for step in steps for output in step.outputs):
            told[DECODED] = decoded
        job = replace(job, record={**job.record, **told})
    carried = describe_carried(plan, artifact.source, artifact.modules)
    result = carry_out(job, Tools(source, open_backend("cpu")), output, settings)
    return replace(result, carried=carried)


def _text_in(record: Mapping[str, object], key: str) -> str | None:
    value = record.get(key)
    return value if isinstance(value, str) else None


def _widen_dtypes(config: dict[str, object], dtype: str) -> dict[str, object]:
    """Widen the dtypes of a config, in which engines load all weights."""
    known = {kind.config_name for kind in FLOAT_TYPES.values()}
    widened = {
        key: _widen_dtypes(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)  # transformers takes one for each of several parts, too
        if isinstance(value, str) and value in known and value != dtype:
            widened[key] = FLOAT_TYPES["F32"].config_name
    return widened
