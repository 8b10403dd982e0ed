"""Take a request of quantize apart: recipe, linear layers, scales.

A request and a source become a recipe, the linear layers and their scales; these become a plan,
which makers carry out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import ALWAYS_FOUR, dialect_named
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.checkpoint.linears import Linears, find_linears
from fp4convert.checkpoint.record import folds_recorded
from fp4convert.conversion.artifact_job import CARD_LEFT, own_card
from fp4convert.conversion.recorded_options import options_recorded
from fp4convert.errors import ChoiceError, InputError
from fp4convert.numerics.formats import (
    AWQ,
    DAMPING,
    FORMATS,
    GPTQ,
    IMPORTANCE,
    METHODS,
    PASSES,
    UNAIDED,
    Format,
    check_rule,
    format_named,
)
from fp4convert.options.arguments import check_keep_dtype, check_word, chosen_adapter
from fp4convert.options.writing import ACTIVATION_BITS, CACHES, VIAS, QuantizeOptions
from fp4convert.planning.activation_scales import bounded_scales, choose_scales, measured_scales
from fp4convert.planning.engine_facts import engine_warnings
from fp4convert.planning.plan import Plan
from fp4convert.planning.quantize_plan import Cache, Scalars
from fp4convert.recipes.draft_layers import JOINT, find_drafts, is_draft_head
from fp4convert.recipes.options import DRAFTS, KEEP, one_of
from fp4convert.recipes.recipe import Recipe, Target, build_recipe
from fp4convert.recipes.rules import FoldUse
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.open import as_file_of
from fp4convert.storage.source import Source, read_whole, uncollected

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration
    from fp4convert.checkpoint.adapters.peft import Adapter

MOST_PASSES = 100  # a larger number is a typing error
# How names of formats begin that other tools make.
OTHER_FORMATS = re.compile(r"(mx)?fp[68]|u?int\d|w\d+a\d+|nf4|i?q\d|awq|gptq")


def _own_folds(source: Source) -> tuple[FoldUse, ...]:
    """Read where the source's own weights hold factors, if it is an artifact."""
    if not source.has_file(RECORD):
        return ()
    return folds_recorded(parse_json_object(read_whole(source, RECORD), RECORD))


def _in_its_file(source: Source, options: QuantizeOptions) -> Source:
    """View a source as the kind of file that the dialect is stored in."""
    return as_file_of(source, dialect_named(str(options.dialect)).TRAITS.container)


def source_as_asked(source: Source, options: QuantizeOptions) -> Source:
    """View a source as the dialect's kind of file, with --pad-for-tp's zeros.

    Raises  what pad_for_ranks raises; InputError for options that need its own sizes
    """
    source = _in_its_file(source, options)
    if options.pad_for_tp is None:
        return source
    given = {
        "--calibration": options.calibration,
        "--lora": options.lora,
        "--global-scale": options.global_scale,
        "--base": options.base,
    }
    from fp4convert.planning.tensor_parallel import OPTION, pad_for_ranks

    for option, value in given.items():
        if value:
            detail = f"{option} is for the source's own sizes, and {OPTION} changes them"
            raise InputError("pad-option", f"{detail}; expected one of them")
    block_size = format_named(str(options.format)).block_size
    return pad_for_ranks(source, options.pad_for_tp, max(block_size, 1))


class Request(NamedTuple):
    """A source and what is to become of it: all that a plan is made of.

    recorded  options that the bytes depend on, as our record says them; of no plan, with zeros for
              the hashes that a plan tells
    checks    of a plan: raise InputError, or say what a person should know of it
    goal      losses that choose formats of modules, as our record says it; None for weights alone
    """

    source: Source
    recipe: Recipe
    linears: Linears
    scalars: Scalars
    recorded: Callable[[Plan | None], dict[str, object]]
    checks: tuple[Callable[[Plan], Iterable[str]], ...] = ()
    goal: Mapping[str, object] | None = None

    def linears_under(self, recipe: Recipe) -> Linears:
        """Return the linear layers, changed as the method of a recipe wants."""
        calibration = self.scalars.calibration
        if calibration is None or recipe.target.method != AWQ:
            return self.linears
        from fp4convert.planning.fold_plan import fold_layers

        is_unscaled = self.scalars.inputs.is_constant
        checkpoint = self.source.checkpoint
        folded = fold_layers(checkpoint, recipe, self.linears, calibration, is_unscaled)
        folds = tuple(dict.fromkeys((*self.linears.folds, *folded.uses)))
        return replace(folded.linears, folds=folds, notes=folded.notes)


def take_apart(source: Source, options: QuantizeOptions) -> Request:
    """Read recipe, linear layers and scales; leave the options behind.

    Raises  InputError for anything that the options or the source have wrong
    """
    source = _in_its_file(source, options)
    recipe, linears, scalars = _understand(source, options)
    linears = replace(linears, folds=_own_folds(source))
    if linears.folds and options.lora:
        detail = f"{source.name} is quantized, and its weights hold factors of folds (AWQ)"
        detail = f"{detail}, which --lora was not trained beside; expected weights without them"
        raise InputError("adapter-folded", detail)
    calibration, goal = scalars.calibration, None
    is_fitted = (options.target_size, options.target_bits) != (None, None)
    if is_fitted and calibration and calibration.loss_formats:
        # A size in bytes would change the size.
        goal = {"bits": options.target_bits, "minimized": calibration.loss_kind}
    if options.base is not None:
        from fp4convert.checkpoint.grafted import graft, open_base

        source, linears = graft(source, linears, open_base(options.base, options.access()))
    recorded = partial(options_recorded, options, source, recipe.target)
    checks = tuple(_checks(source, scalars, options, is_fitted))
    return Request(source, recipe, linears, scalars, recorded, checks, goal)


def _checks(
    source: Source, scalars: Scalars, options: QuantizeOptions, is_fitted: bool
) -> Iterator[Callable[[Plan], Iterable[str]]]:
    """Yield the checks of a plan that a request needs."""
    if scalars.calibration:
        from fp4convert.planning.method_needs import check_statistics

        yield partial(check_statistics, calibration=scalars.calibration, is_fitted=is_fitted)
    if not options.engine:  # else the engine's own rows decide
        yield partial(engine_warnings, checkpoint=source.checkpoint)
    if own_card(source):
        yield lambda plan: [CARD_LEFT]
    if padding := source.checkpoint.padding:
        from fp4convert.planning.tensor_parallel import refuse_bad_splits

        def check_splits(plan: Plan) -> Iterable[str]:
            refuse_bad_splits(plan, int(options.pad_for_tp or 0))
            return [padding.note]

        yield check_splits
    if not source.is_streamed:  # from a Hub each would be a request: the run tells
        yield _check_carried


def _check_carried(plan: Plan) -> Iterable[str]:
    """Check the scales of blocks that are taken over, if there are any."""
    if any(step.action == "transcode" for step in plan.steps):
        from fp4convert.conversion.carried_blocks import check_carried

        check_carried(plan)
    return ()


def _understand(source: Source, options: QuantizeOptions) -> tuple[Recipe, Linears, Scalars]:
    """Read the recipe, the linear layers and their scales."""
    adapter = _adapter_for(options)
    _check_settings(options)
    if str(options.activations) not in ACTIVATION_BITS:
        expected = f"expected {one_of(ACTIVATION_BITS)}"
        detail = f"--activations {options.activations} is not known; {expected}"
        raise InputError("bad-activations", detail, "Leave it out.")
    if options.format in FORMATS:
        _refuse_idle_for(FORMATS[options.format], options)
    if options.dialect in ALWAYS_FOUR:
        _refuse_statistics(options)
    file, calibration = options.calibration, None
    method = UNAIDED[0] if adapter and file is None else str(options.method)
    if file is not None or method != METHODS[0] or options.scale_rule == IMPORTANCE:
        from fp4convert.planning.method_needs import open_statistics

        statistics = None if file is None else os.fspath(file)
        calibration = open_statistics(method, options.scale_rule, statistics)
    recipe = _recipe_for(source, options, calibration)
    key = adapter.key if adapter else None
    recipe = replace(recipe, target=recipe.target._replace(adapter=key))
    if calibration:
        from fp4convert.calibration.fingerprint import check_source

        check_source(calibration, source, adapter=key)
    inputs = measured_scales(calibration) if calibration and calibration.has_largest else None
    if options.input_scale is not None:
        form = Form(recipe.format, recipe.target.activations)
        inputs = choose_scales(source, form, options.input_scale, key, calibration)
    weights = None
    if options.global_scale is not None:
        from fp4convert.planning.global_scales import open_global_scales

        given = os.fspath(options.global_scale)
        weights = open_global_scales(given, recipe.format, recipe.target)
    with uncollected():
        linears = find_linears(source, recipe)
        if options.draft == KEEP and is_draft_head(linears.of):
            _refuse_kept_head(source.name, recipe)
        recipe = replace(recipe, asked_draft=options.draft)
        if recipe.takes_drafts:
            recipe = replace(recipe, drafts=find_drafts(linears.of, recipe))
        if adapter:
            from fp4convert.checkpoint.adapters.merging import merge_adapter

            linears = merge_adapter(linears, adapter, source.checkpoint)
        cache = Cache()
        if options.kv_cache:
            from fp4convert.planning.kv_cache_scales import plan_cache

            cache = plan_cache(source, linears, recipe, calibration)
        inputs = inputs or bounded_scales(source, recipe.folds, linears)
        return recipe, linears, Scalars(inputs, calibration, cache, weights)


def _refuse_kept_head(name: str, recipe: Recipe) -> NoReturn:
    """Refuse to keep all that there is."""
    detail = (
        f"{name}: nothing becomes {recipe.format.name}: --draft {KEEP}, and all of it drafts tokens"
        f" for another model ({JOINT!r} beside its layers); expected at least one linear layer"
    )
    next_step = f"Leave --draft {KEEP} out, or serve the head as it is: engines load both."
    raise ChoiceError("no-linears", detail, next_step)


def _adapter_for(options: QuantizeOptions) -> Adapter | None:
    """Read the adapter, which no method may drown that changes weights, too."""
    adapter = chosen_adapter(options.lora, options.lora_scale, options.access())
    words = {"--method": options.method == AWQ and AWQ, "--via": options.via}
    for option, word in words.items():
        if adapter and word:
            detail = f"{option} {word} changes the weights, too, and would drown what --lora merges"
            raise InputError("adapter-option", f"{detail}; expected one of them")
    return adapter


def _recipe_for(
    source: Source, options: QuantizeOptions, calibration: Calibration | None
) -> Recipe:
    """Build the recipe; InputError for what no format, dialect or recipe has."""
    asked_format = str(options.format)
    if asked_format not in FORMATS and OTHER_FORMATS.match(asked_format.lower()):
        raise InputError(
            "unknown-format",
            f"format {asked_format!r} is not known; expected {one_of(FORMATS)}",
            "Use --format nvfp4; llama.cpp's own types (Q4_K_M) are made by its llama-quantize.",
        )
    fmt = format_named(asked_format)
    check_word("--kv-cache", options.kv_cache, CACHES, "unknown-cache")
    check_word("--via", options.via, VIAS, "unknown-via")
    check_word("--draft", options.draft, DRAFTS, "unknown-draft")
    bits = int(options.activations or 0)
    asked = Target(fmt.name, options.dialect, kv_cache=options.kv_cache, activations=bits)
    traits = dialect_to_write(asked).TRAITS
    check_keep_dtype(options.keep_dtype, options.dialect)
    # Engines that read no global scale for this model take it as 1.
    shards = source.checkpoint.shards
    reads_any = traits.global_scale_kind and all(s.frame.reads_global_scales for s in shards)
    has_scales = any(each.has_global_scale for each in (fmt, *traits.mixes))
    is_gptq = calibration is not None and options.method == GPTQ
    has_moments = calibration is not None and calibration.has_moments
    is_weighed = is_gptq or (has_moments and options.method == METHODS[0])
    usual_rule = IMPORTANCE if is_weighed and IMPORTANCE in fmt.scale_rules else None
    target = asked._replace(
        scale_rule=options.scale_rule or usual_rule,
        has_unit_scale=has_scales and not reads_any,
        via=options.via,
        method=options.method,
        calibration=calibration.sha256 if calibration else None,
        keep_dtype=options.keep_dtype,
    )
    if is_gptq:
        damping = DAMPING if options.damping is None else options.damping
        passes = PASSES if options.passes is None else options.passes
        target = target._replace(damping=float(damping), passes=int(passes))
    frame = shards[0].frame if shards else None
    if frame and frame.container == "gguf" and not source.checkpoint.config:
        from fp4convert.recipes.gguf_names import build_for_gguf

        recipe = build_for_gguf(target, source.checkpoint, options)
    else:
        recipe = build_recipe(target, source.checkpoint.config, options)
    return replace(recipe, keeps_packed=options.keep_packed)


def _refuse_idle_for(fmt: Format, options: QuantizeOptions) -> None:
    """Raise InputError for options that mean nothing to eight-bit weights."""
    if not fmt.is_fp8:
        return
    if options.scale_rule is not None:
        check_rule(fmt, options.scale_rule)
    given = {
        "--method": options.method if options.method != METHODS[0] and not options.lora else None,
        "--via": options.via,
        "--base": options.base,
    }
    for option, word in given.items():
        if word is not None:
            detail = f"{option} {word} is for four-bit weights, and the format is {fmt.name}"
            raise InputError("idle-option", detail, f"Leave {option} out.")


def _check_settings(options: QuantizeOptions) -> None:
    """Raise InputError for settings of gptq that cannot be, or have no use."""
    for name, given in (("damping", options.damping), ("passes", options.passes)):
        if given is None:
            continue
        if options.method != GPTQ:
            detail = f"--{name} {given} is for --method gptq, and the method is {options.method}"
            raise InputError("idle-option", detail, f"Leave --{name} out, or add --method gptq.")
        if options.lora and options.calibration is None:
            detail = f"--{name} {given} is for a Gram matrix, and --lora is without a calibration"
            raise InputError("idle-option", detail, f"Leave --{name} out, or add --calibration.")
    damping, passes = options.damping, options.passes
    if damping is not None and not 0 < damping <= 1:
        detail = (
            f"--damping {damping} is no share of H's mean diagonal; expected above 0, at most 1"
        )
        raise InputError("bad-damping", detail, f"Leave it out for {DAMPING}.")
    if passes is not None and not 0 <= passes <= MOST_PASSES:
        detail = f"--passes {passes} is no number of passes; expected 0 to {MOST_PASSES}"
        raise InputError("bad-passes", detail, f"Leave it out for {PASSES}; 0 is plain GPTQ.")


def _refuse_statistics(options: QuantizeOptions) -> None:
    """Refuse data and scales beside corrections, which weights alone tell."""
    given = {
        f"--method {options.method}": options.method != METHODS[0],
        f"--scale-rule {IMPORTANCE}": options.scale_rule == IMPORTANCE,
        "--calibration": options.calibration is not None,
        "--input-scale": options.input_scale is not None,
        "--global-scale": options.global_scale is not None,
        "--via": options.via is not None,
    }
    for option, is_given in given.items():
        if is_given:
            detail = f"{option} has no use beside the low-rank corrections of dialect"
            detail = f"{detail} {options.dialect}, which the weights alone tell"
            raise InputError("idle-option", f"{detail}; expected neither data nor given scales")
