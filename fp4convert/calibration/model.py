"""Build a model without weights, and fill it part by part.

Which stored tensor belongs where, and what is merged or split on the way, is asked of transformers' own loader, family by
family.  Packed weights go in as the floats that they stand for.  Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.linears import find_linears
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES
from fp4convert.recipes.recipe import Recipe, model_recipe
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Source

IMPLEMENTATION = "fp4convert"  # of attention and of experts: both look at what passes, and compute what the model defines
TORCH_DTYPES = {
    **{"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64},
    **{
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    },
}
REASON_LENGTH = 200  # of the words of another package in a message
BLOCKS = "_blocks"  # ends the name of a stack of MXFP4 codes
NEXT = "Calibrate with the tools of its authors; without a calibration, fp4convert quantize needs no model code."


class Seat(NamedTuple):
    """Where a linear layer of the checkpoint is in the model.

    path       of the module that multiplies with it
    parameter  its name there: weight, or gate_up_proj and the like of a stack of experts
    expert     which one of the stack; None for a layer of its own
    """

    path: str
    parameter: str
    expert: int | None


class Lazy:
    """A tensor that is read when transformers' loader slices it."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, part: object) -> torch.Tensor:
        return self._read()


@dataclass(slots=True)
class Skeleton:
    """A model whose parameters have shapes and no values, but for the parts that are filled.

    model      of transformers, in eval mode
    layers     path of every decoder (or encoder) layer, in their order
    linears    of the source, by module
    seats      module -> where it is in the model; those that the model does not have are absent
    stored     parameter of the model -> names in the checkpoint that it is made of
    tensors    name in the checkpoint -> what reads it
    device     where filled parts are
    """

    model: Any
    layers: tuple[str, ...]
    linears: Mapping[str, Linear]
    seats: dict[str, Seat]
    stored: dict[str, list[str]]
    tensors: dict[str, Lazy]
    device: torch.device
    _mapping: list[Any] = field(default_factory=list)

    def module(self, path: str) -> Any:
        """The module of that path; the model itself for none."""
        return self.model.get_submodule(path)

    def fill(self, path: str, is_deep: bool = True) -> None:
        """Give the parameters of a module, and of those inside it unless only its own are wanted, their values.

        Raises InputError where the checkpoint lacks one, or has it in another shape
        """
        module = self.module(path)
        names = {f"{path}.{name}".lstrip(".") for name, _ in _state(module, is_deep)}
        wanted = [key for name in names for key in self.stored.get(name, ())]
        if wanted:
            self._load({key: self.tensors[key] for key in wanted})
        for name in names & self.model.all_tied_weights_keys.keys():
            self._tie(name, self.model.all_tied_weights_keys[name])
        empty = sorted(
            f"{path}.{name}".lstrip(".")
            for name, tensor in _state(module, is_deep)
            if tensor.is_meta
        )
        if empty:
            detail = f"the checkpoint has no weights for {empty[0]!r}, which {type(self.model).__name__} of transformers needs"
            raise InputError(
                "calibration-weights",
                detail,
                "Check config.json: architectures and sizes.",
                empty[0],
            )

    def _tie(self, name: str, other: str) -> None:
        """Let a parameter be the one that the checkpoint stores for both."""
        (path, _, own), (home, _, there) = name.rpartition("."), other.rpartition(".")
        if self.module(path)._parameters[own].is_meta and name not in self.stored:
            if self.module(home)._parameters[there].is_meta:
                self.fill(home, is_deep=False)
            self.module(path)._parameters[own] = self.module(home)._parameters[there]

    def _load(self, state: dict[str, Lazy]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        config = LoadStateDictConfig(
            device_map={"": self.device}, dtype=None, weight_mapping=self._mapping
        )
        found, _ = convert_and_load_state_dict_in_model(self.model, state, config)
        problems = [*found.mismatched_keys, *found.conversion_errors.items(), *found.error_msgs]
        if problems:
            detail = f"weights do not fit {type(self.model).__name__} of transformers: {str(problems[0])[:200]}"
            raise InputError(
                "calibration-weights", detail, "Check config.json: architectures and sizes."
            )

    def empty(self, path: str, is_deep: bool = True) -> None:
        """Take the values of a module's parameters away."""
        module = self.module(path)
        for part in module.modules() if is_deep else (module,):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = torch.nn.Parameter(
                        torch.empty_like(parameter, device="meta"), requires_grad=False
                    )

    def nbytes(self, path: str) -> int:
        """What the parameters below a path take in memory."""
        return sum(parameter.nbytes for parameter in self.module(path).parameters())

    def layer_of(self, seat: Seat) -> str | None:
        """The layer that a module is in, or None."""
        found = re.match(rf"{re.escape(self.layers[0].rpartition('.')[0])}\.\d+(?=\.|$)", seat.path)
        return found[0] if found else None


def _state(module: Any, is_deep: bool) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name."""
    parts = module.named_modules() if is_deep else [("", module)]
    found = []
    for path, part in parts:
        buffers = {
            k: v for k, v in part._buffers.items() if k not in part._non_persistent_buffers_set
        }
        named = {**part._parameters, **buffers}
        found += [
            (f"{path}.{name}".lstrip("."), tensor)
            for name, tensor in named.items()
            if tensor is not None
        ]
    return found


def open_skeleton(source: Source, folder: Path, device: torch.device) -> Skeleton:
    """The model of a source's config.json, without weights.

    folder  where config.json is, and nothing that could be run
    Raises  InputError for models that transformers does not know, and for those whose layers cannot be told apart
    """
    model = _build(folder, device)
    recipe = model_recipe(source.checkpoint.config)
    linears = find_linears(source, recipe).of
    tensors, homes = _tensors(source, linears, recipe)
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = get_model_conversion_mapping(model)
    targets = _targets(model, tensors, mapping)
    stored: dict[str, list[str]] = defaultdict(list)
    for name, target in targets.items():
        stored[target].append(name)
    seats = {
        module: _seat(targets[home], module) for module, home in homes.items() if home in targets
    }
    _narrow_experts(model, seats, linears)
    return Skeleton(
        model, _layers_of(model), linears, seats, dict(stored), tensors, device, mapping
    )


def _build(folder: Path, device: torch.device) -> Any:
    """The model on the meta device, but for buffers that are computed rather than stored."""
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # of many kinds: each class of configs checks itself in its own way
        detail = f"config.json describes a model that transformers {transformers.__version__} does not know"
        raise InputError("calibration-model", f"{detail}: {reason_of(error)}", NEXT) from None
    if config.is_encoder_decoder:
        detail = f"config.json: {config.model_type} has an encoder and a decoder; expected a model with one chain of layers"
        raise InputError("calibration-model", detail, NEXT)
    config.use_cache = False
    try:
        kind = _class_of(config)
        make = getattr(kind, "_from_config", None) or kind.from_config
        dtype = torch.float32 if device.type == "cpu" else (config.dtype or torch.bfloat16)
        with torch.device("meta"):
            model = make(config, dtype=dtype, attn_implementation="eager")
    except Exception as error:  # of as many kinds
        detail = f"transformers {transformers.__version__} cannot build the model of config.json: {reason_of(error)}"
        raise InputError("calibration-model", detail, NEXT) from None
    _compute_buffers(model, device)
    model.requires_grad_(False)
    return model.eval()


def _class_of(config: Any) -> Any:
    """The model's class by the first of its architectures, or what finds one by the type of the config."""
    import transformers

    name = next(iter(config.architectures or ()), "")
    found = getattr(transformers, str(name), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else transformers.AutoModelForCausalLM


def reason_of(error: Exception) -> str:
    """Why transformers cannot, in a part of a sentence: what its error ends with, or that it would take foreign code."""
    words = " ".join(str(error).split())
    if "trust_remote_code" in words or "custom code" in words:
        return "it needs code that comes with the checkpoint, which is never run"
    words = f"it has nothing called {words}" if isinstance(error, KeyError) else words
    return words if len(words) <= REASON_LENGTH else f"{words[:REASON_LENGTH]}..."


def import_transformers() -> Any:
    """The package; InputError where it is missing."""
    try:
        import transformers
        from transformers.utils import logging
    except ImportError:
        detail = "calibrate runs the model, for which it needs the package transformers; it is not installed"
        raise InputError(
            "no-transformers", detail, "Install it: pip install 'fp4convert[calibrate]'."
        ) from None
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


@torch.no_grad()
def _compute_buffers(model: Any, device: torch.device) -> None:
    """Give values to what a checkpoint does not store: frequencies of rotations, numbers of positions."""
    from transformers import PreTrainedModel

    owners: dict[str, Any] = {"": model}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            owners[path] = module
        names = [
            name
            for name in module._non_persistent_buffers_set
            if module._buffers.get(name) is not None
        ]
        if not names:
            continue
        for name in names:
            module._buffers[name] = torch.zeros_like(module._buffers[name], device=device)
        owner = max(
            (prefix for prefix in owners if f"{path}.".startswith(f"{prefix}." if prefix else "")),
            key=len,
        )
        with torch.device(device):
            owners[owner]._init_weights(module)


def _tensors(
    source: Source, linears: Mapping[str, Linear], recipe: Recipe
) -> tuple[dict[str, Lazy], dict[str, str]]:
    """What every tensor of an unquantized checkpoint would be read by, and module -> the tensor that holds it."""
    homes, found = {}, {}
    stacks: dict[str, list[Linear]] = defaultdict(list)
    for module, linear in linears.items():
        if not linear.coding.is_packed:
            homes[module] = linear.home.name
        elif linear.stack is None:
            homes[module] = f"{module}.weight"
            found[homes[module]] = Lazy(lambda linear=linear: _decoded(linear, source))  # type: ignore[misc]
        else:
            homes[module] = linear.stack.name.removesuffix(BLOCKS)
            stacks[homes[module]].append(linear)
    for name, parts in stacks.items():
        found[name] = Lazy(lambda name=name, parts=parts: _stacked(name, parts, source, recipe))  # type: ignore[misc]
    packed = {
        ref.name
        for one in linears.values()
        if one.coding.is_packed
        for ref in (one.home, *one.refs, *one.idle)
    }
    for ref in source.checkpoint.tensors:
        if ref.name not in packed and ref.dtype in TORCH_DTYPES:
            found.setdefault(ref.name, Lazy(lambda ref=ref: _read(ref, source)))  # type: ignore[misc]
    return found, homes


def _read(ref: TensorRef, source: Source) -> torch.Tensor:
    data = bytearray(ref.nbytes)
    source.read_into(ref, 0, memoryview(data))
    return (
        torch.frombuffer(data, dtype=TORCH_DTYPES[ref.dtype]).reshape(ref.shape)
        if data
        else torch.empty(ref.shape)
    )


def _decoded(linear: Linear, source: Source) -> torch.Tensor:
    weights = linear.coding.weights(linear, source)
    data = bytearray(linear.shape[0] * linear.shape[1] * FLOAT_TYPES[weights.dtype].nbytes)
    weights.copy_rows(0, linear.shape[0], memoryview(data))
    return torch.frombuffer(data, dtype=TORCH_DTYPES[weights.dtype]).reshape(linear.shape)


def _stacked(name: str, parts: list[Linear], source: Source, recipe: Recipe) -> torch.Tensor:
    """Packed experts as the stack that an unquantized checkpoint of the family has."""
    rule = recipe.stack_rule(name)
    if rule is None:
        raise InputError(
            "calibration-model",
            f"{name}: no recipe tells how this stack of experts lies unquantized",
            NEXT,
            name,
        )
    experts = sorted({_expert_of(linear.module) for linear in parts})
    by_module = {linear.module: linear for linear in parts}
    made = []
    for expert in experts:
        rows = [
            _decoded(by_module[rule.module(name, expert, member)], source)
            for member in rule.members
        ]
        whole = torch.stack(rows, 1).flatten(0, 1) if rule.is_interleaved else torch.cat(rows)
        made.append((whole.T if rule.is_transposed else whole).to(torch.bfloat16))
    return torch.stack(made)


def _expert_of(module: str) -> int:
    """The number of an expert: the last one in its name."""
    return int(next(part for part in reversed(module.split(".")) if part.isdecimal()))


def _targets(model: Any, names: Iterable[str], mapping: list[Any]) -> dict[str, str]:
    """Name in the checkpoint -> the parameter of the model that it is loaded into; others are left out."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix, found = model.state_dict(), model.base_model_prefix, {}
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, _ = rename_source_key(name, [], [], prefix, state)
        if target in state:
            found[name] = target
    return found


def _seat(target: str, module: str) -> Seat:
    path, _, parameter = target.rpartition(".")
    return Seat(path, parameter, None if parameter == "weight" else _expert_of(module))


def _narrow_experts(model: Any, seats: Mapping[str, Seat], linears: Mapping[str, Linear]) -> None:
    """Let stacks of experts be held as they are stored: they are most of a model, and each is widened when it computes."""
    for module, seat in seats.items():
        if seat.expert is None or not hasattr(model.get_submodule(seat.path), "has_gate"):
            continue  # of others nobody knows how they compute
        owner, stored = model.get_submodule(seat.path), linears[module].refs[0].dtype
        parameter = owner._parameters[seat.parameter]
        dtype = TORCH_DTYPES[stored] if stored in FLOAT_TYPES else torch.bfloat16
        if parameter.dtype != dtype:
            owner._parameters[seat.parameter] = torch.nn.Parameter(
                parameter.to(dtype), requires_grad=False
            )


def _layers_of(model: Any) -> tuple[str, ...]:
    """Paths of the layers, which are the list of as many modules as config.json says, nearest to the text model."""
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", 0)
    names = {id(module): path for path, module in model.named_modules()}
    decoder = model.get_decoder()
    lists = [
        (path.count("."), names[id(module)])
        for path, module in decoder.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and count
    ]
    nearest = sorted(lists)[:2]
    if not nearest or (len(nearest) == 2 and nearest[0][0] == nearest[1][0]):
        detail = f"{type(model).__name__} of transformers has no one list of {count} layers, one after the other"
        raise InputError("calibration-model", detail, NEXT)
    return tuple(f"{nearest[0][1]}.{number}" for number in range(count))
