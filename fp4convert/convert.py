"""A whole conversion: carry out a plan, shard by shard, and write the records that make the result an artifact.

No decisions here: the plan made them all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fp4convert.artifact import RECORD, Artifact, make_record
from fp4convert.backends import open_backend
from fp4convert.dialects import Dialect, check_input_scale, dialect_named, dialect_to_write, form_of, is_reversible
from fp4convert.errors import InputError, NumericError
from fp4convert.formats import FLOAT_TYPES, format_named
from fp4convert.output import OutputFolder, Purpose, TaskWriter, open_output
from fp4convert.plan import DTYPES, plan_dequantize, plan_quantize, plan_transcode
from fp4convert.recipe import Target, build_recipe
from fp4convert.sources import INDEX, Source
from fp4convert.tasks import Plan, Task
from fp4convert.workers import Dequantizer, Quantizer, Settings, Transcoder, UnsoundShardError, Worker, count_kept, fill_shard

RECORDS = frozenset({RECORD, "hf_quant_config.json"})  # of any dialect: a source's own would contradict ours
QUANTIZATION_KEYS = frozenset({"quantization_config", "quantization", "expert_dtype"})  # of config.json, in any dialect
CLEAR_ENOUGH = frozenset({"record-status", "record-strategy"})  # engines stumble over it; what the weights are is not in doubt
BASE_NBYTES = 100 << 20  # the interpreter with its packages


@dataclass(frozen=True, slots=True)
class Request:
    """What `quantize` is asked for, in a user's words; recipe.py and plan.py say what each means."""

    format: str
    dialect: str = "compressed-tensors"
    scale_rule: str | None = None
    activations: int = 16
    input_scale: float | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished conversion tells; the keys of --json."""

    output: str
    format: str
    dialect: str | None
    scale_rule: str | None
    device: str
    source_bytes: int
    output_bytes: int
    seconds: float
    tensors: dict[str, int]
    digest: str
    carried: dict[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """The document; `carried` where something was transcoded."""
        return {key: value for key, value in asdict(self).items() if key != "carried" or value is not None}


def prepare_quantize(source: Source, request: Request) -> Plan:
    """The plan that `quantize` carries out; InputError for anything that the request or the source has wrong."""
    fmt = format_named(request.format)
    dialect_to_write(Target(fmt.name, request.dialect))
    input_scale = check_input_scale(fmt, request.activations, request.input_scale)
    target = Target(fmt.name, request.dialect, request.scale_rule, request.activations, input_scale)
    recipe = build_recipe(target, source.checkpoint.model_types, (request.include, request.exclude))
    return plan_quantize(source.checkpoint, recipe)


def quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_quantize; the artifact's record is written last.

    Raises InputError for a device that is not there; OutputError as open_output does; NumericError, after all sound shards
    are written, where weights are NaN or Inf: then neither index nor records are written.
    """
    worker = Quantizer(source, plan.target, open_backend(settings.device))
    return _carry_out(_artifact_job(source, plan), worker, output, settings, partial(_write_record, plan))


def prepare_dequantize(artifact: Artifact, dtype: str) -> Plan:
    """The plan that `dequantize` carries out; InputError for an unknown dtype or an artifact with errors."""
    _refuse_unsound(artifact)
    return plan_dequantize(artifact.source.checkpoint, artifact.modules, dtype)


def dequantize(artifact: Artifact, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_dequantize: ordinary weights again, with the values that engines compute.

    Raises InputError for a device that is not there; NumericError beyond fp16's range; OutputError as open_output does.
    """
    source = artifact.source
    config = _with_dtype(source.checkpoint.config, FLOAT_TYPES[DTYPES[plan.target.format]].config_name)
    config = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    texts = {**_index_text(plan), "config.json": _json(config)}
    replaced = RECORDS | texts.keys()
    job = _Job(source, plan, texts, "config.json", replaced)
    return _carry_out(job, Dequantizer(artifact, open_backend(settings.device)), output, settings)


def prepare_transcode(artifact: Artifact, dialect: str, fmt: str | None, scale_layout: str | None = None) -> Plan:
    """The plan that `transcode` carries out; InputError for what cannot be said without a change, or an artifact with errors.

    fmt           the artifact's own where None; nvfp4 for an MXFP4 artifact
    scale_layout  the dialect's own where None
    """
    _refuse_unsound(artifact)
    made = format_named(fmt or artifact.format.name)
    is_same = made is artifact.format
    if not is_same and artifact.format.has_global_scale:
        detail = f"{artifact.format.name} cannot be carried into {made.name}: its block scales are no powers of two"
        raise InputError("not-lossless", detail, "Dequantize it, and quantize the result.")
    recorded = str(artifact.record.get("scale_rule"))
    rule = recorded if is_same and recorded in made.scale_rules else None
    activations = artifact.form.activations if is_same else 16
    target = Target(made.name, dialect, rule, activations, None, scale_layout, artifact.form.kv_cache)
    spelling = dialect_to_write(target)
    if is_same:
        for module in artifact.modules:
            _check_scalars(artifact, module, spelling)
    return plan_transcode(artifact.source.checkpoint, artifact.modules, target)


def _check_scalars(artifact: Artifact, module: str, spelling: Dialect) -> None:
    """InputError where the dialect cannot say a module's global scale or input scale."""
    try:
        for _ in spelling.encode_scalars(module, artifact.decode(module), artifact.input_scale(module)):
            pass
    except InputError as error:
        message = error.message if module in error.message else f"{module}: {error.message}"
        raise InputError(error.code, message, error.next_step, module) from None


def transcode(artifact: Artifact, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_transcode: the same codes and block scales under other names.

    Raises OutputError as open_output does.
    """
    job = _artifact_job(artifact.source, plan)
    carried = describe_carried(artifact, plan)
    result = _carry_out(job, Transcoder(artifact, plan.target), output, settings, partial(_write_record, plan))
    return replace(result, carried=carried)


def describe_carried(artifact: Artifact, plan: Plan) -> dict[str, object]:
    """How many modules keep every bit, and which do not.

    rounded  their global scale or input scale is stored as its reciprocal, and that of the reciprocal is another float32
    lossy    MXFP4 modules with blocks that NVFP4 cannot say; blocks, kept_blocks count those of all
    """
    made = format_named(plan.target.format)
    kind = _dialect_of(plan).GLOBAL_SCALE_KIND
    rounded, lossy, blocks, kept = [], [], 0, 0
    for module in artifact.modules:
        if made is artifact.format:
            stored = [artifact.decode(module).global_scale, artifact.stored_input_scale(module)]
            if kind and kind != artifact.spelling.GLOBAL_SCALE_KIND and not all(map(is_reversible, stored)):
                rounded.append(module)
            continue
        all_blocks, kept_blocks = count_kept(artifact, module)
        blocks, kept = blocks + all_blocks, kept + kept_blocks
        if all_blocks != kept_blocks:
            lossy.append(module)
    changed = len(rounded) + len(lossy)
    document: dict[str, object] = {
        "modules": len(artifact.modules),
        "bit_for_bit": len(artifact.modules) - changed,
        "rounded": rounded,
    }
    return document if made is artifact.format else {**document, "lossy": lossy, "blocks": blocks, "kept_blocks": kept}


def describe_plan(plan: Plan, settings: Settings) -> dict[str, object]:
    """The document of `quantize --dry-run --json`; memory is what workers hold beside mapped pages.

    Raises InputError for a device that is not there.
    """
    backend = open_backend(settings.device)
    widest = max((step.shape[1] for step in plan.steps if step.shape), default=0)
    held_nbytes = backend.held_nbytes(settings.workers or backend.threads, widest)
    return {
        "format": plan.target.format,
        "dialect": plan.target.dialect,
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "peak_memory_bytes": BASE_NBYTES + held_nbytes,
        "peak_disk_bytes": plan.output_bytes,
        "tensors": [
            {
                "name": step.refs[0].name,
                "action": step.action,
                "reason": step.reason,
                "group": step.group,
                "source_bytes": step.source_bytes,
                "output_bytes": step.output_bytes,
            }
            for step in plan.steps
        ],
        "warnings": list(plan.warnings),
    }


def _refuse_unsound(artifact: Artifact) -> None:
    for finding in artifact.findings:
        if finding.level == "error" and finding.code not in CLEAR_ENOUGH:
            where = f"{finding.tensor}: " if finding.tensor else ""
            detail = f"the artifact is not sound: {finding.code}: {where}{finding.detail}"
            raise InputError("unsound-artifact", detail, "See: fp4convert inspect.", finding.tensor)


def _artifact_job(source: Source, plan: Plan) -> _Job:
    """The conversion whose result is an artifact: shards, then the records that engines read, last our own."""
    records = _dialect_of(plan).records(form_of(plan.target), plan.ignored, plan.quantized)
    config = {key: value for key, value in source.checkpoint.config.items() if key not in QUANTIZATION_KEYS}
    if config or "config.json" in records:
        records["config.json"] = {**config, **records.get("config.json", {})}
    texts = {**_index_text(plan), **{file: _json(record) for file, record in records.items()}}
    return _Job(source, plan, texts, RECORD, RECORDS | texts.keys())


def _write_record(plan: Plan, folder: OutputFolder) -> None:
    producer = {"name": "fp4convert", "version": version("fp4convert")}
    record = make_record(plan.target, plan.ignored, plan.shapes, producer, folder.hashes)
    folder.write_text(RECORD, _json(record))


@dataclass(frozen=True, slots=True)
class _Job:
    """One conversion.

    texts     small files of ours, in the order in which they are written after the shards
    last      the file whose presence says that the folder is finished
    replaced  files of the source that do not travel, because ours take their place
    """

    source: Source
    plan: Plan
    texts: dict[str, str]
    last: str
    replaced: frozenset[str]

    @property
    def sidecars(self) -> list[str]:
        return [file for file in self.source.checkpoint.sidecars if file not in self.replaced]

    @property
    def output_nbytes(self) -> int:
        """Everything that will be written, but for the last record."""
        small = sum(len(text.encode("utf-8", "surrogatepass")) for text in self.texts.values())
        return self.plan.output_bytes + small + sum(self.source.file_nbytes(file) for file in self.sidecars)

    def purpose(self) -> Purpose:
        shards = self.source.checkpoint.shards
        headers = [[shard.file, shard.nbytes, [[ref.name, ref.dtype, ref.shape] for ref in shard.tensors]] for shard in shards]
        return Purpose(
            identity={"source": _sha256(headers), "format": self.plan.target.format, "dialect": self.plan.target.dialect},
            traits={
                "the version of fp4convert": version("fp4convert"),
                "the options": _sha256([asdict(self.plan.target), self.plan.quantized, self.texts]),
                "the source's files or their times": _sha256([self.source.checkpoint.stamps, self.sidecars]),
            },
            files=(*(shard.file for shard in self.plan.shards), *self.sidecars, *self.texts),
            last=self.last,
        )


def _carry_out(
    job: _Job,
    worker: Worker,
    output: Path,
    settings: Settings,
    conclude: Callable[[OutputFolder], None] = lambda folder: None,
) -> Result:
    started = time.monotonic()
    for file in job.sidecars:
        if file.partition("/")[0] in {RECORD, *job.texts}:
            raise InputError(
                "file-name", f"{file}: the source has a folder where the result has a file; expected none", "Rename it."
            )
    if job.source.holds(output):
        detail = f"{output} lies inside the source; expected a folder outside it, so that the source stays as it is"
        raise InputError("output-in-source", detail, "Choose another: -o FOLDER.")
    unsound: dict[str, NumericError] = {}

    def fill(task: Task, writer: TaskWriter) -> bool:
        try:
            fill_shard(task, writer, worker, settings)
        except UnsoundShardError as found:
            unsound.update({str(error.tensor): error for error in found.errors})
            return False
        for file in task.sources:
            job.source.check_unchanged(file)
        return True

    with open_output(output, job.purpose(), job.output_nbytes, settings.is_forced) as folder:
        folder.write_shards((task for task in job.plan.tasks if not folder.adopt(task)), fill)
        if unsound:
            raise _summary(list(unsound.values()))
        for shard in job.source.checkpoint.shards:
            job.source.check_unchanged(shard.file)
        for file in job.sidecars:
            with job.source.open_file(file) as stream:
                folder.write_copy(file, stream)
        for file, text in job.texts.items():
            folder.write_text(file, text)
        conclude(folder)
        digest, output_bytes = folder.digest(), folder.nbytes()
    actions = Counter(step.action for step in job.plan.steps)
    return Result(
        output=str(output),
        format=job.plan.target.format,
        dialect=job.plan.target.dialect,
        scale_rule=job.plan.target.scale_rule,
        device=worker.device,
        source_bytes=job.source.checkpoint.nbytes,
        output_bytes=output_bytes,
        seconds=round(time.monotonic() - started, 3),
        tensors={worker.made: actions[worker.action], "copied": actions["copy"], "skipped": actions["skip"]},
        digest=digest,
    )


def _summary(errors: list[NumericError]) -> NumericError:
    """One error for all unsound tensors, with the options that complete the run."""
    lines = "\n".join(error.message for error in errors)
    next_step = errors[0].next_step
    if errors[0].code == "not-finite":
        next_step = f"Run the same command again with {' '.join(error.next_step for error in errors)}"
    return NumericError(errors[0].code, lines, next_step, errors[0].tensor)


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


def _index_text(plan: Plan) -> dict[str, str]:
    """The index of several shards, or of one whose name says that there are others."""
    is_alone = len(plan.shards) == 1 and "-of-" not in plan.shards[0].file
    return {} if is_alone else {INDEX: _json(plan.index)}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
