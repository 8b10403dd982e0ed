"""Build a model without weights, and fill it part by part.

Which stored tensor belongs where, and what is merged or split on the way, is asked of transformers'
own loader, family by family.  Packed weights go in as the floats that they stand for.  Code that
comes with a checkpoint is never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp4convert.calibration.experts import find_experts
from fp4convert.checkpoint.adapters.merging import merge_adapter
from fp4convert.checkpoint.adapters.pairs import ALONE
from fp4convert.checkpoint.adapters.peft import Adapter
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.expert_stacks import ExpertStack, artifact_of, find_stacks, rules_of
from fp4convert.checkpoint.linears import Linears, find_linears
from fp4convert.errors import InputError, describe_missing
from fp4convert.numerics.formats import FLOAT_TYPES, MXFP4
from fp4convert.process import reuse_freed_memory
from fp4convert.recipes.recipe import Recipe, model_recipe
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

TORCH_DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
REASON_LENGTH = 200  # of the words of another package in a message
NEXT = (
    "Calibrate with the tools of its authors; quantize without --calibration needs no model code."
)
CHECK_CONFIG = "Check config.json: architectures and sizes."


class Seat(NamedTuple):
    """Where a linear layer of the checkpoint is in the model.

    path       of the module that multiplies with it
    parameter  its name there: weight, or gate_up_proj and the like of a stack of experts
    expert     which one of the stack; None for a layer of its own
    """

    path: str
    parameter: str
    expert: int | None


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is read when transformers' loader slices it."""

    read: Callable[[], torch.Tensor]

    def __getitem__(self, part: object) -> torch.Tensor:
        return self.read()


@dataclass(slots=True)
class Skeleton:
    """A model without values, but for the parts that are filled.

    model    of transformers, in eval mode
    layers   path of a layer -> its number; each is filled and run by itself: members of the model's
             lists, of text, of vision, of an encoder and a decoder
    linears  of the source, by module
    seats    module -> its place in the model; absent for modules that the model does not have
    stored   parameter of the model -> names in the checkpoint that it is made of
    tensors  name in the checkpoint -> its reader
    device   of filled parts
    """

    model: Any
    layers: dict[str, int]
    linears: Mapping[str, Linear]
    seats: dict[str, Seat]
    stored: dict[str, list[str]]
    tensors: dict[str, Lazy]
    device: torch.device
    _mapping: list[Any]

    def module(self, path: str) -> Any:
        """Return the module of that path; the model itself for none."""
        return self.model.get_submodule(path)

    def fill(self, path: str, is_deep: bool = True) -> None:
        """Give the parameters of a module their values.

        is_deep  those of the modules inside it, too
        Raises   InputError where the checkpoint lacks one, or has it in another shape
        """
        kind = f"{type(self.model).__name__} of transformers"
        names = self.state(path, is_deep).keys()
        wanted = [key for name in names for key in self.stored.get(name, ())]
        if wanted:
            from transformers.core_model_loading import convert_and_load_state_dict_in_model
            from transformers.modeling_utils import LoadStateDictConfig

            places = {"": self.device}
            config = LoadStateDictConfig(device_map=places, weight_mapping=self._mapping)
            state = {key: self.tensors[key] for key in wanted}
            found, _ = convert_and_load_state_dict_in_model(self.model, state, config)
            problems = [*found.mismatched_keys, *found.conversion_errors.items(), *found.error_msgs]
            if problems:
                detail = f"weights do not fit {kind}: {str(problems[0])[:200]}"
                raise InputError("calibration-weights", detail, CHECK_CONFIG)
        # A tied parameter is the one that the checkpoint stores for both.
        tied = self.model.all_tied_weights_keys
        for name in names & tied.keys():
            (owner, _, own), (home, _, there) = name.rpartition("."), tied[name].rpartition(".")
            if self.module(owner)._parameters[own].is_meta and name not in self.stored:
                if self.module(home)._parameters[there].is_meta:
                    self.fill(home, is_deep=False)
                self.module(owner)._parameters[own] = self.module(home)._parameters[there]
        empty = sorted(name for name, tensor in self.state(path, is_deep).items() if tensor.is_meta)
        if empty:
            detail = f"the checkpoint has no weights for {empty[0]!r}, which {kind} needs"
            raise InputError("calibration-weights", detail, CHECK_CONFIG, empty[0])

    def state(self, path: str, is_deep: bool) -> dict[str, torch.Tensor]:
        """Gather parameters and persistent buffers by name in the model."""
        module = self.module(path)
        return {
            ".".join(filter(None, (path, inner, name))): tensor
            for inner, part in (module.named_modules() if is_deep else [("", module)])
            for name, tensor in {**part._parameters, **part._buffers}.items()
            if tensor is not None and name not in part._non_persistent_buffers_set
        }

    def empty(self, path: str, is_deep: bool = True) -> None:
        """Take the values of a module's parameters away."""
        module = self.module(path)
        for part in module.modules() if is_deep else (module,):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = _frozen(torch.empty_like(parameter, device="meta"))

    def nbytes(self, path: str) -> int:
        """Count the bytes of the parameters below a path."""
        return sum(parameter.nbytes for parameter in self.module(path).parameters())

    def layer_above(self, path: str) -> str | None:
        """Return the layer that a path is in, or is; None outside of all."""
        parts = path.split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((name for name in above if name in self.layers), None)


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def open_skeleton(
    source: Source,
    folder: Path,
    device: torch.device,
    is_exact: bool = False,
    adapter: Adapter | None = None,
) -> Skeleton:
    """Build the model of a source's config.json, without weights.

    folder    where config.json is, and nothing that could be run
    is_exact  packed experts are held in float32 where bfloat16 would round what they stand for
    adapter   that its weights are merged with
    Raises    InputError for models that transformers does not know, and for those whose layers
              cannot be told apart
    """
    model = _build_model(folder, device)
    recipe = model_recipe(source.checkpoint.config)
    found = find_linears(source, recipe)
    found = merge_adapter(found, adapter, source.checkpoint) if adapter else found
    dtypes = {module: _dtype_of(linear, is_exact) for module, linear in found.of.items()}
    tensors, homes = _plan_reads(source, found, recipe, dtypes)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    # The parameter that each tensor of the checkpoint is loaded into; others are left out.
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    targets: dict[str, str] = {}
    stored: dict[str, list[str]] = {}
    for name in tensors:
        target, _ = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, _ = rename_source_key(name, [], [], prefix, state)
        if target in state:
            targets[name] = target
            stored.setdefault(target, []).append(name)
    seats = {}
    for module, home in homes.items():
        if home in targets:
            path, _, parameter = targets[home].rpartition(".")
            numbers = [int(part) for part in module.split(".") if part.isdecimal()]
            seats[module] = Seat(path, parameter, None if parameter == "weight" else numbers[-1])
    _narrow_experts(model, seats, dtypes)
    layers = _find_layers(model)
    return Skeleton(model, layers, found.of, seats, stored, tensors, device, mapping)


def _build_model(folder: Path, device: torch.device) -> Any:
    """Build the model on the meta device, but for computed buffers."""
    transformers = import_transformers()
    config = _read_config(folder, transformers)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.use_cache = False
    try:
        kind = _known_class(transformers, config.architectures)
        kind = kind or transformers.AutoModelForCausalLM  # by the type of the config
        make = getattr(kind, "_from_config", None) or kind.from_config
        dtype = torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)
        with torch.device("meta"):
            model = make(config, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # of as many kinds
        detail = f"transformers {transformers.__version__} cannot build the model of config.json"
        raise InputError("calibration-model", f"{detail}: {reason_of(error)}", NEXT) from None
    _compute_buffers(model, device)
    model.requires_grad_(False)
    return model.eval()


def _read_config(folder: Path, transformers: Any) -> Any:
    """Read config.json; its architecture may be known where its type is not."""
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # of many kinds: each class of configs checks itself in its own way
        reason = error
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = stored.get("architectures")
    kind = _known_class(transformers, names) if isinstance(names, list) else None
    is_new = stored.pop("model_type", None) not in transformers.CONFIG_MAPPING
    # The code that comes with it may be of the same class, and of another than transformers'.
    codes = {str(code).rpartition(".")[2] for code in (stored.pop("auto_map", None) or {}).values()}
    if kind is not None and is_new and (not codes or kind.__name__ in codes):
        try:
            return kind.config_class(**stored)
        except Exception as error:  # of as many
            reason = error
    detail = f"config.json describes a model that transformers {transformers.__version__} does not"
    why = reason_of(reason).replace(str(folder), "config.json")
    raise InputError("calibration-model", f"{detail} know: {why}", NEXT)


def _known_class(transformers: Any, architectures: Any) -> Any:
    """Return the class of a model by the first of its architectures, or None."""
    kind = getattr(transformers, str(next(iter(architectures or ()), "")), None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else None


def reason_of(error: Exception) -> str:
    """Tell why transformers cannot, in a part of a sentence."""
    words = " ".join(str(error).split())
    if "trust_remote_code" in words or "custom code" in words:
        return "it needs code that comes with the checkpoint, which is never run"
    words = f"it has nothing called {words}" if isinstance(error, KeyError) else words
    return words if len(words) <= REASON_LENGTH else f"{words[:REASON_LENGTH]}..."


def import_transformers() -> Any:
    """Import the package; InputError where it is missing."""
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        needing = "calibrate runs the model, for which it needs the package transformers"
        raise InputError("no-transformers", *describe_missing(needing, "calibrate")) from None
    reuse_freed_memory()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


@torch.no_grad()
def _compute_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint stores, as of rotations."""
    from transformers import PreTrainedModel

    owners: dict[str, Any] = {"": model}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            owners[path] = module
        buffers = module._buffers
        names = [
            name for name in module._non_persistent_buffers_set if buffers.get(name) is not None
        ]
        if not names:
            continue
        for name in names:
            buffers[name] = torch.zeros_like(buffers[name], device=device)
        # The nearest model that the module is in knows how to compute them.
        above = [owner for owner in owners if not owner or f"{path}.".startswith(f"{owner}.")]
        with torch.device(device):
            owners[max(above, key=len)]._init_weights(module)


def _plan_reads(
    source: Source, known: Linears, recipe: Recipe, dtypes: Mapping[str, torch.dtype]
) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Plan the reading of the tensors of an unquantized checkpoint.

    dtypes   of stacks of experts that are put together, by a module of theirs
    Returns  name -> its reader, and module -> name of the tensor that holds it
    """
    linears, homes, found = known.of, {}, {}
    packed: set[str] = set()
    for name, vector in known.vectors.items():
        found[name] = Lazy(partial(_decode, vector, source, vector.refs[0].shape))
    for module, linear in linears.items():
        if not linear.coding.is_packed:
            homes[module] = linear.home.name
            if linear.coding.change:
                found[linear.home.name] = Lazy(partial(_decode_alone, linear, source))
            continue
        packed.update(ref.name for ref in (linear.home, *linear.refs, *linear.idle))
        homes[module] = f"{module}.weight"
        found[homes[module]] = Lazy(partial(_decode, linear, source))
    artifact = artifact_of(linears)
    rules = rules_of(artifact, recipe) if artifact else ()
    for stack in find_stacks(linears.values(), rules)[0]:
        dtype = dtypes[stack.modules[0]]
        found[stack.name] = Lazy(partial(_decode_stack, stack, source, dtype))
        for module in stack.modules:
            found.pop(homes[module], None)
            homes[module] = stack.name
    for ref in source.checkpoint.tensors:
        if ref.name not in packed and ref.dtype in TORCH_DTYPES:
            found.setdefault(ref.name, Lazy(partial(read_tensor, ref, source)))
    return found, homes


def read_tensor(ref: TensorRef, source: Source) -> torch.Tensor:
    """Read a tensor of floats or integers."""
    data = bytearray(ref.nbytes)
    source.read_into(ref, 0, memoryview(data))
    if not data:
        return torch.empty(ref.shape)
    return torch.frombuffer(data, dtype=TORCH_DTYPES[ref.dtype]).reshape(ref.shape)


def _decode(linear: Linear, source: Source, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Decode a linear layer; None for its own shape."""
    shape = linear.shape if shape is None else shape
    weights = linear.coding.weights(linear, source)
    data = bytearray(linear.shape[0] * linear.shape[1] * FLOAT_TYPES[weights.dtype].nbytes)
    weights.copy_rows(0, linear.shape[0], memoryview(data))
    return torch.frombuffer(data, dtype=TORCH_DTYPES[weights.dtype]).reshape(shape)


def _decode_alone(linear: Linear, source: Source) -> torch.Tensor:
    """Decode a matrix that an adapter changes.

    Raises InputError for one of a stack, which is read as a whole
    """
    if linear.stack:
        detail = f"{linear.module} lies in the stack {linear.stack.name}, which is read as a whole"
        expected = "expected an adapter that changes no expert of it"
        raise InputError("adapter-stack", f"{detail}; {expected}", ALONE, linear.module)
    return _decode(linear, source)


def _decode_stack(stack: ExpertStack, source: Source, dtype: torch.dtype) -> torch.Tensor:
    """Decode packed experts to the stack that an unquantized checkpoint has."""
    made = {linear.module: _decode(linear, source).to(dtype) for linear in stack.linears}
    slots = ([made[one.module][one.first : one.last] for one in slot] for slot in stack.slots)
    joined = torch.cat([torch.stack(rows, 1).flatten(0, 1) for rows in slots])
    whole = joined.reshape(stack.shape[0], -1, joined.shape[-1])
    whole = whole.transpose(1, 2) if stack.is_transposed else whole
    return whole.flatten(0, 1) if stack.is_flat else whole


def _dtype_of(linear: Linear, is_exact: bool) -> torch.dtype:
    """Choose the dtype of the experts of a stack in memory.

    It is the stored one; bfloat16 for packed ones, which holds all values of MXFP4.
    """
    stored = linear.refs[0].dtype
    if not linear.coding.is_packed:
        return TORCH_DTYPES[stored]
    return torch.float32 if is_exact and linear.coding.format is not MXFP4 else torch.bfloat16


def _narrow_experts(
    model: Any, seats: Mapping[str, Seat], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Hold stacks of experts, most of a model, in their stored dtype."""
    known = {id(experts.owner) for experts in find_experts(model)}
    for module, seat in seats.items():
        owner = model.get_submodule(seat.path)
        if seat.expert is None or id(owner) not in known:
            continue  # the computation of other stacks is unknown
        parameter = owner._parameters[seat.parameter]
        if parameter.dtype != dtypes[module]:
            owner._parameters[seat.parameter] = _frozen(parameter.to(dtypes[module]))


def _find_layers(model: Any) -> dict[str, int]:
    """Find the layers: the members of the outermost lists of modules."""
    found: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{layer}.") for layer in found)
        if isinstance(module, torch.nn.ModuleList) and not is_inside:
            found += (f"{path}.{name}" for name, _ in module.named_children())
    if not found:
        detail = f"{type(model).__name__} of transformers has no list of layers; expected one"
        raise InputError("calibration-model", detail, NEXT)
    return {path: number for number, path in enumerate(found)}
