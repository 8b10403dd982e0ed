"""A whole conversion: carry out a plan, shard by shard, and write the records that make the result an artifact.

No decisions here: the plan made them all.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fp4convert.artifact import RECORD, Artifact
from fp4convert.backends import open_backend, processors
from fp4convert.dialects import dialect_named
from fp4convert.errors import InputError, NumericError
from fp4convert.output import OutputFolder, Purpose, ShardWriter, open_output
from fp4convert.plan import Plan, Task, plan_dequantize
from fp4convert.sources import INDEX, Source
from fp4convert.workers import PANEL_ELEMENTS, Dequantizer, Quantizer, Settings, UnsoundShardError, Worker, fill_shard

CONFIG_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as config.json spells them
BASE_NBYTES = 100 << 20  # the interpreter with its packages


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished conversion tells; the keys of `quantize --json`."""

    output: str
    format: str
    dialect: object
    scale_rule: object
    device: str
    source_bytes: int
    output_bytes: int
    seconds: float
    tensors: dict[str, int]
    digest: str


def quantize(source: Source, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan made by plan_quantize; the artifact's record is written last.

    Raises InputError for a device that is not there; OutputError as open_output does; NumericError, after all sound shards
    are written, where weights are NaN or Inf: then neither index nor records are written.
    """
    recipe = plan.recipe
    if recipe is None:
        raise RuntimeError("this plan does not quantize")
    records = dialect_named(recipe.dialect, recipe.format).records(recipe.format, plan.ignore, plan.quantized)
    texts = _index_text(plan)
    texts |= {file: _json(record) for file, record in records.items()}
    texts["config.json"] = _json({**source.checkpoint.config, "quantization_config": records["config.json"]})
    job = _Job(source, plan, texts, RECORD, frozenset({*texts, RECORD}))

    def conclude(folder: OutputFolder) -> None:
        folder.write_text(RECORD, _json(_record(plan, folder.hashes)))

    return _carry_out(job, Quantizer(source, recipe, open_backend(settings.device)), output, settings, conclude)


def prepare_dequantize(artifact: Artifact, dtype: str) -> Plan:
    """The plan that `dequantize` carries out; InputError for an unknown dtype or an artifact with errors."""
    for finding in artifact.findings:
        if finding.level == "error":
            where = f"{finding.tensor}: " if finding.tensor else ""
            detail = f"the artifact is not sound: {finding.code}: {where}{finding.detail}"
            raise InputError("unsound-artifact", detail, "See: fp4convert inspect.", finding.tensor)
    return plan_dequantize(artifact.source.checkpoint, artifact.modules, dtype)


def dequantize(artifact: Artifact, plan: Plan, output: Path, settings: Settings) -> Result:
    """Carry out a plan of prepare_dequantize: ordinary weights again, with the values that engines compute.

    Raises InputError for a device that is not there; NumericError beyond fp16's range; OutputError as open_output does.
    """
    source = artifact.source
    config = _with_dtype(source.checkpoint.config, str(plan.target["format"]))
    config.pop("quantization_config", None)
    texts = {**_index_text(plan), "config.json": _json(config)}
    replaced = frozenset({*texts, RECORD, *artifact.spelling.records(artifact.format, (), ())})
    job = _Job(source, plan, texts, "config.json", replaced)
    return _carry_out(job, Dequantizer(artifact, open_backend(settings.device)), output, settings)


def describe(plan: Plan, workers: int = 0) -> dict[str, object]:
    """The document of `quantize --dry-run --json`; memory is what workers hold beside mapped pages."""
    threads = workers or processors()
    widest = max((step.shape[1] for step in plan.steps if step.shape), default=0)
    return {
        "format": plan.target["format"],
        "dialect": plan.target["dialect"],
        "source_bytes": plan.source_bytes,
        "output_bytes": plan.output_bytes,
        "peak_memory_bytes": BASE_NBYTES + threads * max(PANEL_ELEMENTS, widest),
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

    def purpose(self) -> Purpose:
        shards = self.source.checkpoint.shards
        headers = [[shard.file, shard.nbytes, [[ref.name, ref.dtype, ref.shape] for ref in shard.tensors]] for shard in shards]
        identity = {"source": _sha256(headers), "format": self.plan.target["format"], "dialect": self.plan.target["dialect"]}
        maker = f"fp4convert {version('fp4convert')}"
        plan_id = _sha256([maker, self.plan.target, [task.key for task in self.plan.tasks], self.sidecars, self.texts])
        files = (*(task.file for task in self.plan.tasks), *self.sidecars, *self.texts)
        return Purpose(maker, identity, plan_id, files, self.last)


def _carry_out(
    job: _Job,
    worker: Worker,
    output: Path,
    settings: Settings,
    conclude: Callable[[OutputFolder], None] = lambda folder: None,
) -> Result:
    started = time.monotonic()
    if job.source.holds(output):
        detail = f"{output} lies inside the source; expected a folder outside it, so that the source stays as it is"
        raise InputError("output-in-source", detail, "Choose another: -o FOLDER.")
    unsound: dict[str, NumericError] = {}

    def fill(task: Task, writer: ShardWriter) -> bool:
        try:
            fill_shard(task, writer, worker, settings)
        except UnsoundShardError as found:
            unsound.update({str(error.tensor): error for error in found.errors})
            return False
        return True

    with open_output(output, job.purpose(), job.plan.output_bytes, settings.is_forced) as folder:
        folder.write_shards((task for task in job.plan.tasks if not folder.adopt(task)), fill)
        if unsound:
            raise _summary(list(unsound.values()))
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
        format=str(job.plan.target["format"]),
        dialect=job.plan.target["dialect"],
        scale_rule=job.plan.target["scale_rule"],
        device=worker.device,
        source_bytes=job.source.checkpoint.nbytes,
        output_bytes=output_bytes,
        seconds=round(time.monotonic() - started, 3),
        tensors={
            "quantized": actions["quantize"] + actions["dequantize"],
            "copied": actions["copy"],
            "skipped": actions["skip"],
        },
        digest=digest,
    )


def _record(plan: Plan, files: dict[str, str]) -> dict[str, object]:
    """Our quantization_config.json of a finished artifact.

    files  name -> sha256 of every other file of the artifact
    """
    recipe = plan.recipe
    if recipe is None:
        raise RuntimeError("only a plan to quantize has a record")
    fmt = recipe.format
    kind = dialect_named(recipe.dialect).GLOBAL_SCALE_KIND
    return {
        "format": fmt.name,
        "block_size": fmt.block_size,
        "element_dtype": "fp4_e2m1",
        "scale_dtype": fmt.scale_dtype,
        "scale_layout": "linear",
        "scale_padding": None,
        "nibble_order": "low_first",
        "block_axis": -1,
        "global_scale": {"dtype": "fp32", "stored_as": kind} if fmt.has_global_scale else None,
        "activations": 16,
        "dialect": recipe.dialect,
        "scale_rule": recipe.scale_rule,
        "ignore": list(plan.ignore),
        "producer": {"name": "fp4convert", "version": version("fp4convert")},
        "source": {"repo": None, "revision": None},
        "files": dict(sorted(files.items())),
    }


def _summary(errors: list[NumericError]) -> NumericError:
    """One error for all unsound tensors, with the options that complete the run."""
    if errors[0].code != "not-finite":
        return errors[0]
    lines = "\n".join(error.message for error in errors)
    options = " ".join(error.next_step for error in errors)
    return NumericError("not-finite", lines, f"Run the same command again with {options}", errors[0].tensor)


def _with_dtype(config: dict[str, object], dtype: str) -> dict[str, object]:
    """The config with every declared dtype widened to hold `dtype` too: engines load all weights in the declared one."""
    widened: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            widened[key] = _with_dtype(value, dtype)
        elif key in ("dtype", "torch_dtype") and value in CONFIG_DTYPES.values():
            widened[key] = value if value == CONFIG_DTYPES[dtype] else CONFIG_DTYPES["fp32"]
        else:
            widened[key] = value
    return widened


def _index_text(plan: Plan) -> dict[str, str]:
    return {INDEX: _json(plan.index)} if len(plan.tasks) > 1 else {}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
