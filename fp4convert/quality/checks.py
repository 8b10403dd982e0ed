"""Judge an artifact by its records, names and scales.

`inspect` and `verify` report these findings.  Few block scales are read whole, of many a sample.
report/catalogue.toml explains the code of a finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.checkpoint.dialects.base import Clues, schemes_of, strings
from fp4convert.checkpoint.dialects.forms import from_layers, parents_of
from fp4convert.checkpoint.dialects.registry import METHODS
from fp4convert.checkpoint.linears import find_unread_codes, judge_stored, names_stored
from fp4convert.checkpoint.misnamed import find_misnamed
from fp4convert.checkpoint.missing_parts import judge_names
from fp4convert.checkpoint.modules import UNSAID, idle_scales
from fp4convert.checkpoint.soundness import stored_scales
from fp4convert.checkpoint.unread import find_beside
from fp4convert.errors import Finding
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.numerics.layout_detection import detect_layout
from fp4convert.numerics.scale_layouts import LAYOUTS
from fp4convert.progress import Phases, are_text, count_text
from fp4convert.quality.engine_check import check_fused
from fp4convert.quality.scale_checks import check_scales
from fp4convert.recipes.draft_layers import is_draft_head
from fp4convert.recipes.patterns import configs_in, matches, sift
from fp4convert.recipes.recipe import Recipe, model_recipe
from fp4convert.recipes.uneven_formats import EXPERTS
from fp4convert.recipes.unread_modules import EMBEDDING, HEADS, TIED_HEAD, find_unread_modules
from fp4convert.storage.checkpoint_files import INDEXES, SINGLES, WEIGHTS
from fp4convert.storage.safetensors import WEIGHT, SafetensorsFrame
from fp4convert.storage.source import Source

# Of block scales: read whole up to the first number, else about the second.
ALL_NBYTES, SAMPLE_NBYTES = 64 << 20, 48 << 20
# Of a repository on the Hub: a download of seconds, whatever its size.
REMOTE_NBYTES, REMOTE_MODULES = 16 << 20, 96
MATRIX = 2  # dimensions
DRAFT_HEAD = (
    "it drafts tokens for another model, and no engine serves it alone: name it as the speculative"
    " model beside that one"
)
EXPERT_CLASSES = ("Expert", "MoE", "Moe")  # parts of names of classes that hold linear layers
# Last names of modules that are linear layers in every model.
LINEARS = HEADS | {
    *("o_proj", "out_proj", "down_proj", "q_proj", "k_proj", "v_proj", "fc1", "fc2"),
    *("qkv", "qkv_proj", "gate_up_proj", "c_attn", "c_proj", "linear_fc1", "linear_fc2"),
    *("q_a_proj", "q_b_proj", "kv_b_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_z"),
}
UNKNOWN = "unknown to fp4convert: nobody tried it"  # whether an engine loads it
# Findings that a source refutes where its values fit.
GUESSED = ("scale-dtype", "global-scale-reciprocal", "global-scale-range")


class Judged(NamedTuple):
    """The findings on an artifact by its records, names and scales.

    refuted   findings by scales alone that a fitting source refutes
    detected  the layout of its block scales; None if unknown
    read      the modules with block scales that were read
    scales    global scales by module
    """

    findings: tuple[Finding, ...]
    refuted: tuple[Finding, ...]
    detected: str | None
    read: Sequence[str]
    scales: Mapping[str, float]


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Tell whether no finding is an error."""
    return all(finding.level != "error" for finding in findings)


def fault_word(codes: Iterable[str], word: str) -> str:
    """Return the word for errors of these codes; the unknown is no fault."""
    return UNKNOWN if set(codes) == {"engine-unknown"} else word


def judge(
    artifact: Artifact,
    source: Source | None,
    read: Sequence[str],
    sampled: Sequence[str],
    phases: Phases,
) -> Judged:
    """Judge an artifact by its records, names and scales.

    source   the original weights, which decide more than statistics
    read     modules to read block scales of
    sampled  modules by which the layout is detected and the source compared
    phases   receives the progress
    Raises   InputError for a source without these modules
    """
    recipe = model_recipe(artifact.source.checkpoint.config, dialect=artifact.dialect)
    findings = [*artifact.findings, *_check_names(artifact, recipe), *check_fused(artifact, recipe)]
    findings = findings if source is None else [*_excuse(findings, source, recipe)]
    nbytes = scale_nbytes(artifact)
    phases.begin("scales", sum(nbytes[module] for module in read))
    scale_findings, scales = check_scales(artifact, read, phases.report)
    findings += scale_findings
    # The layout by statistics, and by the source where there is one.
    detected = detect_layout(stored_scales(artifact, sampled), artifact.scale_layout)
    layout, differing = None, list[Finding]()
    if source is not None:
        from fp4convert.quality.source_match import match_source

        layout, differing = match_source(artifact, source, sampled, phases)
    if layout is None and detected and detected != artifact.scale_layout:
        detail = f"block scales are declared {artifact.scale_layout} and are {detected}"
        detail += " by statistics; engines would compute garbage. --source decides"
        findings.append(Finding("error", "scale-layout", None, detail))
    if source is None:
        return Judged(tuple(findings), (), detected, read, scales)
    # A source that fits refutes what was guessed by scales alone.
    fits = all(one.level != "error" or one.code == "weights-underflow" for one in differing)
    refuted = tuple(finding for finding in findings if fits and finding.code in GUESSED)
    held = (finding for finding in findings if not fits or finding.code not in GUESSED)
    return Judged((*held, *differing), refuted, layout or detected, read, scales)


def _excuse(findings: Iterable[Finding], source: Source, recipe: Recipe) -> Iterator[Finding]:
    """Make warnings of missing modules that the source lacks, too."""
    known = source.checkpoint
    names = [ref.name for ref in known.tensors]
    alike = {one.tensor for one in judge_names(names, {}, known.config, recipe).faults}
    for finding in findings:
        if finding.code == "module-missing" and finding.tensor in alike:
            detail = f"{finding.detail}; the source lacks it, too"
            yield Finding("warning", "module-missing", finding.tensor, detail)
        else:
            yield finding


def check_headers(artifact: Artifact) -> Iterator[Finding]:
    """Check that the package safetensors reads every shard as we do.

    Shards on the Hub are not there to be opened.
    """
    if artifact.source.is_streamed:
        return
    from fp4convert.storage.shard_writer import difference_from_package

    for shard in artifact.source.checkpoint.shards:
        if isinstance(shard.frame, SafetensorsFrame) and shard.frame.is_stored:
            with artifact.source.open_file(shard.file) as stream:
                difference = difference_from_package(Path(stream.name), shard.tensors)
            if difference:
                yield Finding("error", "safetensors-differs", None, f"{shard.file} {difference}")


def choose_modules(artifact: Artifact, is_full: bool) -> list[str]:
    """Choose the modules to read block scales of: all, or a sample."""
    modules, nbytes_of = sorted(artifact.modules), scale_nbytes(artifact)
    if artifact.scale_layout not in LAYOUTS:  # codes lie among the scales, and are read with them
        for module, packed in artifact.modules.items():
            nbytes_of[module] *= packed.form.format.block_size // 2 + 1
    nbytes, count = sum(nbytes_of.values()), len(modules)
    at_once, left, most = REMOTE_NBYTES, REMOTE_NBYTES, REMOTE_MODULES
    if not artifact.source.is_streamed:
        at_once, left, most = ALL_NBYTES, SAMPLE_NBYTES, count
    if is_full or (nbytes <= at_once and count <= most):
        return modules
    chosen, stride = [], max(math.ceil(nbytes / left), math.ceil(count / most))
    for first in range(0, count, stride):
        fitting = (one for one in modules[first : first + stride] if nbytes_of[one] <= left)
        if chosen_one := next(fitting, None):
            chosen.append(chosen_one)
            left -= nbytes_of[chosen_one]
    return chosen or [min(modules, key=lambda module: nbytes_of[module])]


def scale_nbytes(artifact: Artifact) -> dict[str, int]:
    """Count the bytes of block scales by module, without padding."""
    return {
        module: packed.shape[0] * packed.shape[1] // packed.form.format.block_size
        for module, packed in artifact.modules.items()
    }


def _check_names(artifact: Artifact, recipe: Recipe) -> Iterator[Finding]:
    """Check names: of quantized modules, kept modules and missing parts."""
    traits = artifact.spelling.TRAITS
    yield from _check_beside(artifact)
    yield from _check_unread(artifact)
    # Tensors that the index of the checkpoint leaves out.
    if omitted := artifact.source.checkpoint.unindexed:
        detail = f"{are_text(len(omitted), 'tensor')} not in the index, the first {omitted[0]!r}"
        detail += ": engines that follow it do not load them"
        yield Finding("error", "index-omits", None, detail)
    # Modules that the recipes of the model's family would keep.
    for module in sift(recipe.kept_patterns, artifact.packed):
        kind = recipe.kind_of(module)
        if kind == "router":
            detail = "it is a router, which few engines read quantized, and which loses most by it"
            yield Finding("warning", "router-quantized", module, detail)
        elif kind == "tower":
            detail = "it is part of a vision or audio tower, which most engines keep"
            yield Finding("warning", "tower-quantized", module, detail)
    misnamed = find_misnamed(artifact.source.checkpoint)
    config = {} if misnamed else artifact.source.checkpoint.config
    judged = judge_stored(artifact, config, recipe)
    yield from _check_modules_read(artifact, recipe, judged.is_embedding)
    if traits.ignores_by_name:
        yield from _check_kept_names(artifact, recipe, judged.is_embedding)
    yield from _check_targets(artifact)
    if all(finding.code != "unfinished" for finding in artifact.findings):
        if is_draft_head(names_stored(artifact)):
            yield Finding("note", "draft-head", None, DRAFT_HEAD)
        if misnamed and misnamed.is_wrapped:
            yield Finding("error", "wrapped-names", misnamed.tensor, misnamed.detail)
        elif misnamed:
            yield Finding("error", "foreign-names", misnamed.tensor, misnamed.detail)
        yield from judged.findings
    # Scales beside four-bit modules that nothing declares.
    with_global = [form for form in artifact.forms if form.format.has_global_scale]
    has_inputs = all(form.has_input_scale for form in with_global)
    if idle := idle_scales(artifact.modules, artifact.cache_scales, has_inputs):
        detail = f"{len(idle)} scales of four-bit modules, the first {idle[0]}: {UNSAID}"
        yield Finding("note", "scales-idle", None, f"{detail}; transcode leaves them out")


def _check_modules_read(
    artifact: Artifact, recipe: Recipe, is_embedding: Mapping[str, bool]
) -> Iterator[Finding]:
    """Find quantized modules that engines build as ordinary ones.

    is_embedding  as the model's class has weights; of others names decide
    """
    quantized = {module: (one.shape, one.form.format) for module, one in artifact.packed.items()}
    config = artifact.source.checkpoint.config
    holds = artifact.spelling.TRAITS.holds_embeddings
    for module, code, what in find_unread_modules(quantized, recipe, config, holds, is_embedding):
        if code == EMBEDDING:
            yield Finding("warning", "embedding-quantized", module, f"it is {what}")
        elif code == TIED_HEAD:
            yield Finding("warning", "tied-head-quantized", module, f"it is {what}")
        else:
            yield Finding("warning", "plain-quantized", module, f"it is {what}")
    table = artifact.spelling.TRAITS.fp8
    for module, each in artifact.others.items():
        if not (table and table.input_scale and table.has_input_scale(each.form)):
            continue
        is_scaled = each.stem + table.input_scale in artifact.tensors
        # Of a table rows are looked up: it has no activations. Layers inside an embedding have.
        is_named = recipe.kind_of(f".{module.rpartition('.')[2]}") == "embedding"
        if not is_scaled and not is_embedding.get(module + WEIGHT, is_named):
            detail = "it is FP8 with one scale, and has no scale of activations: engines that"
            detail += " quantize them would compute garbage"
            yield Finding("warning", "input-scale-missing", module, detail)


def _check_unread(artifact: Artifact) -> Iterator[Finding]:
    """Report tensors of codes that fp4convert does not read or check.

    An error for a stack with scales under names that no engine of the dialect looks for. Nothing is
    reported beside another error, which says more.
    """
    told = any(one.level == "error" or one.code == "stack-unread" for one in artifact.findings)
    unread = [] if told else find_unread_codes(artifact)
    if not unread:
        return
    endings: dict[str, list[str]] = {ref.name: [] for ref in unread if len(ref.shape) > MATRIX}
    for beside in find_beside(artifact.tensors, endings):
        if beside.is_scale:
            endings[beside.weight].append(beside.ending)
    known = artifact.spelling.TRAITS.suffixes
    foreign = [name for name, found in endings.items() if found and not set(found) & set(known)]
    first = artifact.tensors[foreign[0]] if foreign else unread[0]
    detail = f"{len(unread)} tensors hold codes that fp4convert does not read, such as"
    detail += f" {first.name!r} ({first.dtype} {list(first.shape)}); they were not checked"
    if foreign:
        detail += f", and engines of dialect {artifact.dialect} look for no scales of their names"
    yield Finding("error" if foreign else "warning", "stack-unread", None, detail)


def _check_beside(artifact: Artifact) -> Iterator[Finding]:
    """Check that engines load no other files of weights.

    vLLM and SGLang load the files of an index, and every *.safetensors of a folder without one
    (filter_duplicate_safetensors_files in weight_utils.py of both); transformers takes the single
    file, and Diffusers, whose file has another name, that one.
    """
    checkpoint = artifact.source.checkpoint
    beside = [file for file in checkpoint.left_out if "/" not in file and file.endswith(WEIGHTS)]
    if not beside:
        return
    detail = f"{count_text(len(beside), 'file')} of weights beside the model's, the first "
    detail += f"{beside[0]!r}: "
    if any(artifact.source.has_file(index) for index in INDEXES):
        detail += "engines leave out what the index does not name"
        yield Finding("warning", "weights-beside", None, detail)
    elif [shard.file for shard in checkpoint.shards] == [SINGLES[0]]:
        detail += "without an index vLLM and SGLang load every *.safetensors of a folder"
        yield Finding("error", "weights-beside", None, detail)


def _check_kept_names(
    artifact: Artifact, recipe: Recipe, is_embedding: Mapping[str, bool]
) -> Iterator[Finding]:
    """Check that records ignore the linear layers that stay.

    A kept module counts as a linear layer if a target fits it, if the record is for every Linear
    and the name is that of a linear layer, or if quantized modules have the same last name.
    """
    if any(finding.code == "ignore-pattern" for finding in artifact.findings):
        return
    leaves = {module.rpartition(".")[2] for module in artifact.packed}
    targets = _targets(artifact.clues)
    linears = frozenset[str]()
    if "Linear" in targets:
        linears = LINEARS | {member for members in recipe.groups for member in members}
        if any(one.get("tie_word_embeddings") for one in configs_in(artifact.clues.config)):
            linears -= HEADS
    is_ignored = artifact.spelling.ignores(artifact.clues)
    for name, ref in artifact.tensors.items():
        if not (name.endswith(WEIGHT) and len(ref.shape) == 2 and ref.dtype in FLOAT_TYPES):
            continue
        module = name.removesuffix(WEIGHT)
        leaf, kind = module.rpartition(".")[2], recipe.kind_of(module)
        if is_ignored(module) or is_embedding.get(name):
            continue
        if kind != "embedding" and (target := _target_of(module, targets)):
            detail = f"it is not quantized, the record's target {target!r} is for it"
            detail += ", and no list ignores it"
        elif leaf in leaves and not leaf.isdigit():
            detail = "it is not quantized, other layers' are, and no record ignores it"
        elif leaf in linears and kind not in ("router", "embedding"):
            detail = "it is not quantized, records are for every Linear, and none ignores it"
        else:
            continue
        detail += ": engines would look for its scales"
        yield Finding("error", "kept-not-ignored", module, detail)


def _check_targets(artifact: Artifact) -> Iterator[Finding]:
    """Check that targets of compressed-tensors cover quantized modules.

    A target is a class, a name or an expression. A target for the parent of experts covers them,
    and prefixes before the layers may differ.
    """
    record = artifact.clues.record
    if record.get("quant_method") != METHODS["compressed-tensors"]:
        return
    targets = _targets(artifact.clues) if schemes_of(record) else []
    if any(_is_class(target) for target in targets):
        return
    spelled = [*targets, *(from_layers(each) for each in targets if not each.startswith("re:"))]

    def is_covered(module: str) -> bool:
        names = [module, from_layers(module)]
        if EXPERTS in module:
            names += parents_of(module)
        return any(_target_of(name, spelled) for name in names)

    bare = [module for module in artifact.packed if not is_covered(module)]
    if bare:
        detail = f"{len(bare)} of {len(artifact.packed)} quantized modules, the first {bare[0]!r},"
        detail += f" have no target in config_groups, which has {targets or 'none'}; engines make"
        detail += " ordinary layers of them, without their weights"
        yield Finding("error", "quantized-not-targeted", bare[0], detail)


def _is_class(target: str) -> bool:
    """Tell whether a target is the class of linear layers, or of experts."""
    is_word = target[:1].isupper() and "." not in target
    return target == "Linear" or (is_word and any(word in target for word in EXPERT_CLASSES))


def _target_of(module: str, targets: Sequence[str]) -> str | None:
    """Find the target for a module, by name or by expression."""
    for target in targets:
        if module == target or (target.startswith("re:") and matches(target, module)):
            return target
    return None


def _targets(clues: Clues) -> list[str]:
    """List the targets of a record: names, expressions after "re:", classes."""
    groups = clues.record.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return ["Linear"] if clues.record or clues.hf_quant_config else []
    found = (group.get("targets") for group in groups.values() if isinstance(group, dict))
    return [target for targets in found for target in strings(targets)]
