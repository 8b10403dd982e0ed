"""Write notes for people on a source, its adapter and its result."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fp4convert.checkpoint.dialects.base import Traits
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import ALWAYS_FOUR, is_mark
from fp4convert.checkpoint.dialects.stacks import STACK_DIMENSIONS
from fp4convert.checkpoint.encodings.base import Linear, is_fp8
from fp4convert.checkpoint.linears import Linears
from fp4convert.checkpoint.missing_parts import Judgement, fault_text
from fp4convert.checkpoint.record import ADAPTER
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES, Format
from fp4convert.planning.decisions import Verdict
from fp4convert.planning.kept_dtype import word_of
from fp4convert.planning.steps import Draft, Task, module_of
from fp4convert.progress import are_text, count_text
from fp4convert.recipes.recipe import Recipe, Target
from fp4convert.recipes.rules import is_expert_stack
from fp4convert.recipes.unread_modules import find_unread_modules
from fp4convert.storage.checkpoint_files import WEIGHTS
from fp4convert.storage.source import Checkpoint

if TYPE_CHECKING:
    from fp4convert.calibration.statistics import Calibration
    from fp4convert.checkpoint.artifact import Artifact
    from fp4convert.checkpoint.unreadable import Aside

GGUF_STACK = "_exps."  # in the name of a stack of experts in a GGUF file
MISTRALS = "consolidated"  # how the names begin of files in Mistral's form
LOST_BY_RTN = "9 dB"  # of an adapter on average, as docs/special.md measures it
NO_CONFIG = (
    "the source has no config.json, or an empty one; the one written holds only the quantization"
    " record"
)


def notes_on(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield notes on a source that hold for every result."""
    if omitted := checkpoint.unindexed:
        yield (
            f"{are_text(len(omitted), 'tensor')} not in the index, the first {omitted[0]!r}; they"
            " are taken all the same"
        )
    copies = [file for file in checkpoint.left_out if file.startswith(MISTRALS)]
    if copies:
        yield f"{copies[0]!r} is left out: Mistral's own copy of the weights, under its own names"
    left_out = [file for file in checkpoint.left_out if file not in copies]
    if unnamed := [file for file in left_out if file.endswith(WEIGHTS)]:
        yield (
            f"{count_text(len(unnamed), 'file')} of weights, the first {unnamed[0]!r}: left out,"
            " the index does not name them"
        )
    left_out = [file for file in left_out if file not in unnamed]
    if len(left_out) == 1:
        yield f"1 file holds weights in another form and is left out: {left_out[0]!r}"
    elif left_out:
        yield (
            f"{len(left_out)} files hold weights in another form and are left out, the first"
            f" {left_out[0]!r}"
        )
    if beside := [file for file in checkpoint.sidecars if file.endswith(WEIGHTS)]:
        yield (
            f"{count_text(len(beside), 'file')} of weights in folders of the source, the first"
            f" {beside[0]!r}: copied as they are"
        )
    programs = [file for file in checkpoint.sidecars if file.endswith(".py")]
    if programs or "auto_map" in checkpoint.config:
        yield (
            f"the model has custom code ({', '.join(programs) or 'elsewhere'}): copied, never run;"
            " engines will ask to trust it"
        )


def notes_on_names(judged: Judgement) -> Iterator[str]:
    """Yield what names and sizes say of a source, as `inspect` will."""
    if judged.note:
        yield judged.note
    if strange := judged.unexplained:
        yield (
            f"{count_text(len(strange), 'tensor')} unexplained, the first {strange[0].name!r}:"
            f" {strange[0].reason}, and no encoding has taken it; copied as they are"
        )
    yield from map(fault_text, judged.faults)


def note_unscaled(linears: Linears) -> Iterator[str]:
    """Name matrices of FP8 without scales among others.

    A whole file that was cast has none (flux1-dev-fp8); elsewhere a scale was lost.
    """
    bare = [one.module for one in linears.of.values() if is_fp8(one) and len(one.refs) == 1]
    if bare and 2 * len(bare) < len(linears.of):
        yield (
            f"{count_text(len(bare), 'module')} in FP8 without scales, the first {bare[0]!r}: the"
            " codes are taken for the values, which is wrong where a scale was lost"
        )


def note_carried(aside: Mapping[str, Aside]) -> Iterator[str]:
    """Name excluded modules that nothing here can read."""
    if modules := sorted({module_of(name) for name in aside}):
        yield (
            f"{are_text(len(modules), 'excluded module')} carried bit for bit, and unread, the"
            f" first {modules[0]!r}: {next(iter(aside.values())).why}"
        )


def note_stacks(checkpoint: Checkpoint, consumed: Collection[str]) -> Iterator[str]:
    """Name stacks of experts that stay."""
    experts = [
        ref.name
        for ref in checkpoint.tensors
        if len(ref.shape) == STACK_DIMENSIONS
        and ref.dtype in FLOAT_TYPES
        and (is_expert_stack(ref.name, ref.shape) or GGUF_STACK in ref.name)
        and ref.name not in consumed
    ]
    if experts:
        yield (
            f"{len(experts)} stacks of expert matrices are not quantized, the first {experts[0]!r}"
        )


def note_left_behind(
    linears: Linears, tasks: Iterable[Task], is_written: bool, is_auto: bool, taken: Collection[str]
) -> Iterator[str]:
    """Name scales that only the engine of a packed source uses.

    is_written  the plan writes scales of activations or of a cache
    is_auto     nobody chose scales of activations; chosen ones replace the source's own
    taken       scales of a KV cache that are taken over
    """
    stays = [
        step for task in tasks for step in task.steps if step.action == "copy" and step.is_made
    ]
    kept = {ref.name for step in stays for ref in step.outputs}
    is_given = is_written and not is_auto
    idle = [
        ref.name
        for linear in linears.of.values()
        for ref in (*linear.idle, *linear.refs)
        if _is_of_activations(ref.name.rpartition(".")[2]) and ref.name not in kept and not is_given
    ]
    caches = [ref.name for ref in linears.idle if ref.name not in taken and not is_mark(ref)]
    hint = "; --input-scale SOURCE takes them over" if is_written else ""
    for names, what, more in ((idle, "activation scales", hint), (caches, "KV cache scales", "")):
        if names:
            yield (
                f"{len(names)} {what} of the source are left out, the first {names[0]!r}: they"
                f" belong to how it was quantized{more}"
            )


def _is_of_activations(word: str) -> bool:
    return "input" in word or "activation" in word


def note_unread(
    quantized: Mapping[str, tuple[tuple[int, ...], Format]],
    recipe: Recipe,
    config: Mapping[str, object],
    traits: Traits,
    judged: Judgement,
) -> Iterator[str]:
    """Name quantized modules that engines do not read."""
    found: dict[str, list[str]] = defaultdict(list)
    holds = traits.holds_embeddings
    for one in find_unread_modules(quantized, recipe, config, holds, judged.is_embedding):
        found[one.what].append(one.module)
    for what, modules in found.items():
        others = f" ({count_text(len(modules) - 1, 'other')} too)" if modules[1:] else ""
        yield f"{modules[0]} is {what}{others}"


def note_unread_verdicts(
    verdicts: Mapping[str, Verdict],
    recipe: Recipe,
    config: Mapping[str, object],
    traits: Traits,
    judged: Judgement,
) -> Iterator[str]:
    """Name modules of a plan that engines do not read quantized."""
    quantized = {
        module: (each.linear.shape, each.form.format)
        for module, each in verdicts.items()
        if each.form
    }
    return note_unread(quantized, recipe, config, traits, judged)


def note_unchanged(verdicts: Mapping[str, Verdict], recipe: Recipe) -> Iterator[str]:
    """Note --via without effect, and a plan without quantized modules."""
    made = [verdict for verdict in verdicts.values() if verdict.is_made]
    if recipe.target.via and (
        same := [one for one in made if one.action != "quantize" or is_fp8(one.linear)]
    ):
        if len(same) == len(made):
            detail = "--via fp8 changes nothing: every module is FP8 or in four bits already"
            raise InputError("idle-option", detail, "Leave --via out.")
        yield (
            f"--via fp8 changes nothing for {len(same)} modules that are FP8 or in four bits"
            f" already, the first {same[0].linear.name}"
        )
    if not made:
        yield (
            f"no tensor becomes {recipe.format.name}: every one is kept, for the reasons that"
            " --dry-run lists"
        )


def notes_on_adapter(
    linears: Linears, checkpoint: Checkpoint, target: Target, calibration: Calibration | None
) -> Iterator[str]:
    """Warn of another base model, of other names, of a method that loses it."""
    adapter = linears.adapter
    if adapter is None:
        return
    if checkpoint.repo and adapter.base and checkpoint.repo != adapter.base:
        yield f"{adapter.name} was made for {adapter.base}, and is merged into {checkpoint.repo}"
    old, new = linears.renamed
    if old != new:
        yield (
            f"{adapter.name}: names that begin with {old or 'nothing'!r} are those that begin with"
            f" {new or 'nothing'!r} in the model"
        )
    if calibration and ADAPTER not in calibration.notes:
        yield (
            f"{calibration.path} was made without the adapter, whose inputs are others: calibrate"
            " with --lora, and less is lost (docs/special.md)"
        )
    # Beside low-rank corrections there is no other method.
    if target.method == "rtn" and target.dialect not in ALWAYS_FOUR:
        yield (
            f"--method rtn leaves about {LOST_BY_RTN} less of an adapter than the default does, as"
            " measured (docs/special.md)"
        )


def note_eight_bit_scales(
    unread: Sequence[str], unit: Sequence[str], dialect: str
) -> Iterator[str]:
    """Name input scales of FP8 modules that are left out, or are 1."""
    if unread:
        why = f"dialect {dialect} has no name for them, and its engines measure activations anew"
        yield f"{len(unread)} scales of activations are left out, the first {unread[0]!r}: {why}"
    if unit:
        from fp4convert.planning.input_scale_warnings import describe_unit

        yield (
            f"{count_text(len(unit), 'FP8 module')} without a scale of activations, the first"
            f" {unit[0]!r}; dialect {dialect} wants one: it is 1.0, {describe_unit(is_fp4=False)};"
            " for measured ones quantize the original again with --calibration FILE (fp4convert"
            " calibrate)"
        )


def note_unit_scales(artifact: Artifact, forms: Mapping[str, Form]) -> Iterator[str]:
    """Warn of input scales of 1 that four-bit modules keep."""
    having = [name for name in artifact.modules if name in forms and forms[name].has_input_scale]
    if modules := [name for name in having if artifact.input_scale(name) == 1.0]:
        from fp4convert.planning.input_scale_warnings import warn_of_unit

        yield warn_of_unit(modules, True, "as in the artifact")


def note_expanded(drafts: Sequence[Draft]) -> Iterator[str]:
    """Name matrices that become floats, once for each kind."""
    found: dict[tuple[str, str], list[Linear]] = defaultdict(list)
    for draft in drafts:
        dtype = word_of(draft.specs[0].dtype)
        for linear in draft.step.linears:
            found[linear.coding.word, dtype].append(linear)
    for (word, dtype), linears in found.items():
        what = f"{len(linears)} matrices become {dtype}, the first {linears[0].name!r}"
        yield f"{what}: the dialect has no {word}"
