"""Read a LoRA adapter in PEFT's layout; refuse other kinds.

adapter_config.json     kind, rank and alpha, by patterns of modules where they differ
adapter_model.safetensors:
  M.lora_A.weight       (rank, columns) floats, and M.lora_B.weight (rows, rank): W + s B A
  M.lora_B.bias         (rows,), where lora_bias is set: the layer's bias grows by s times it
  M.lora_embedding_A    (rank, entries), and M.lora_embedding_B (width, rank): W + s (B A)^T
  anything else         a tensor that takes the place of the model's: modules_to_save, biases
Names begin with base_model.model.; s = alpha / rank, or alpha / sqrt(rank) with use_rslora.
Source: PEFT 0.21, peft/tuners/lora (layer.py, config.py) and peft/utils/save_and_load.py.
merging.py applies the pairs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from fp4convert.checkpoint.adapters.other_layouts import MLX_WEIGHTS, read_mlx, read_single
from fp4convert.checkpoint.adapters.pairs import ALONE, LoraPair, Scalings, make_pair
from fp4convert.checkpoint.dialects.base import strings
from fp4convert.errors import InputError
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.open import open_source, read_reference
from fp4convert.storage.safetensors import SafetensorsFrame, read_header
from fp4convert.storage.source import Access, Source, read_whole, stopping

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIXES = ("base_model.model.", "base_model.")
WHOLE_LAYER = re.compile(r"\.(?:base_layer|modules_to_save)(?=\.)")  # in names of whole tensors
LORA_NAMES = re.compile(
    r"(.+)\.(?:lora_(?P<layer>[AB])\.weight|lora_embedding_(?P<table>[AB])|lora_B\.(?P<bias>bias))"
)
ODD = re.compile(r"\.(lora_\w+|token_adapter|trainable_tokens\w*)\b")  # of other kinds
# Keys of adapter_config.json that change no merged weight, or repeat facts of the tensors.
SILENT = frozenset(
    {
        *("task_type", "inference_mode", "auto_mapping", "peft_version", "base_model_class"),
        *("base_model_name_or_path", "revision", "parent_library", "ensure_weight_tying"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "bias", "lora_dropout", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    }
)
TAKEN = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
        *("fan_in_fan_out", "lora_bias", "init_lora_weights", "target_parameters"),
    }
)
# Meanings of other keys.
KINDS = {
    "use_dora": "DoRA, which also scales the rows",
    "use_qalora": "QALoRA, which pools the inputs",
    "alora_invocation_tokens": "aLoRA, which acts after certain tokens alone",
    "layer_replication": "layers that stand several times",
    "trainable_token_indices": "single rows of an embedding",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow, which chooses among adapters",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "layers of Megatron",
}
# Ways to begin a training that do not change the base model.
BEGINNINGS = ("true", "false", "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory, its names as the model has them.

    name            of its folder or repository
    repo, revision  Hub repository and commit; None for a folder
    base            the model that it was made for, from its config
    scale           of the command line, a factor beside its own scaling
    sha256          of its files, by name
    pairs           by module
    biases          to add to the model's, by module
    tensors         to replace the model's, by name
    is_transposed   fan_in_fan_out: matrices are stored as (in, out)
    parameters      last names of target_parameters
    """

    name: str
    repo: str | None
    revision: str | None
    base: str | None
    scale: float
    sha256: Mapping[str, str]
    pairs: Mapping[str, LoraPair] = field(repr=False)
    biases: Mapping[str, Float32s] = field(repr=False)
    tensors: Mapping[str, Float32s] = field(repr=False)
    is_transposed: bool = False
    parameters: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Return the hash of its files and its scale."""
        contents = json.dumps([dict(sorted(self.sha256.items())), self.scale])
        return hashlib.sha256(contents.encode()).hexdigest()

    def as_record(self) -> dict[str, object]:
        """Return its entry in our own record."""
        return {
            "repo": self.repo,
            "revision": self.revision,
            "sha256": dict(self.sha256),
            "scale": self.scale,
        }


def open_adapter(reference: str, scale: float, access: Access) -> Adapter:
    """Read an adapter from this disk or from the Hub.

    scale    factor beside its own scaling
    access   its token and `tell` are used
    Raises   InputError for an adapter that cannot be merged exactly
    """
    if not (math.isfinite(scale) and scale != 0):
        detail = f"--lora-scale {scale:g}; expected a number other than 0"
        raise InputError("adapter-scale", detail, "Leave it out for the adapter's own scale.")
    place = read_reference(reference)
    own = Access(place.revision, place.subfolder, access.token, tell=access.tell)
    source = open_source(place.reference, own, may_lack=True)
    with stopping(source):
        files = _read_files(source, reference)
    config, checkpoint = files.get(CONFIG), source.checkpoint
    settings = parse_json_object(config, f"{source.name}/{CONFIG}", True) if config else {}
    weights = next(file for file in files if file != CONFIG)
    tensors, notes = _read_tensors(files[weights], f"{source.name}/{weights}")
    biases: dict[str, Float32s] = {}
    whole: dict[str, Float32s] = {}
    if not config:
        pairs = read_single(source.name, tensors, notes, scale)
    elif weights == MLX_WEIGHTS:
        pairs, whole = read_mlx(source.name, tensors, settings, scale)
    else:
        _refuse_kinds(settings, source.name)
        scalings = Scalings(settings, scale, f"{source.name}/{CONFIG}")
        pairs, biases, whole = _sort(source.name, tensors, scalings)
    base, aimed = settings.get("base_model_name_or_path"), settings.get("target_parameters")
    return Adapter(
        source.name,
        checkpoint.repo,
        checkpoint.revision,
        base if isinstance(base, str) and base else None,
        scale,
        {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        pairs,
        biases,
        whole,
        is_transposed=bool(settings.get("fan_in_fan_out")),
        parameters=tuple(name.rpartition(".")[2] for name in strings(aimed)),
    )


def open_recorded(reference: str, record: Mapping[str, object], access: Access) -> Adapter:
    """Open the adapter of an artifact's record, with its scale."""
    known = record.get("adapter")
    if not isinstance(known, dict):
        detail = "the artifact's record tells of no adapter; expected one, for --lora"
        raise InputError("adapter-differs", detail, "Leave --lora out.")
    scale = known.get("scale")
    adapter = open_adapter(reference, scale if isinstance(scale, float | int) else 1.0, access)
    if known.get("sha256") != dict(adapter.sha256):
        detail = f"{reference} is not the adapter that the artifact was made with"
        raise InputError("adapter-differs", f"{detail}; expected files of the same sha256")
    return adapter


def _read_files(source: Source, reference: str) -> dict[str, bytes]:
    """Read the config of an adapter, if it has one, and its weights."""
    found = [file for file in (WEIGHTS, MLX_WEIGHTS) if source.has_file(file)]
    has_config = source.has_file(CONFIG)
    if not found and source.has_file(PICKLE):
        detail = f"{reference} has its weights in {PICKLE}, which runs code when it is loaded"
        step = "Load it with PEFT in a sandbox, and save it again: save_pretrained."
        raise InputError("pickle", f"{detail}; expected {WEIGHTS}", step)
    if not has_config:
        found = [shard.file for shard in source.checkpoint.shards]
    if len(found) != 1 or (found == [WEIGHTS] and not has_config):
        named = f"the files {', '.join(found)}" if found else "no weights"
        detail = f"{reference} has {named}, and {'a' if has_config else 'no'} {CONFIG}; expected it"
        detail += f" with {WEIGHTS} (PEFT) or {MLX_WEIGHTS} (mlx-lm), or one file of kohya,"
        detail += " Diffusers or ComfyUI"
        raise InputError("adapter-files", detail, "Name the adapter's folder, or its one file.")
    return {file: read_whole(source, file) for file in (*has_config * [CONFIG], *found)}


def _refuse_kinds(settings: Mapping[str, object], name: str) -> None:
    """Raise InputError for settings beyond plain LoRA."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        detail = f"{name}: peft_type is {kind!r}; expected 'LORA'"
        raise InputError("adapter-kind", detail, ALONE)
    beginning = str(settings.get("init_lora_weights", True)).lower()
    if beginning not in BEGINNINGS:
        detail = f"{name}: init_lora_weights is {beginning!r}, which changes the base model, too"
        step = "Save it for the base model as it is: path_initial_model_for_weight_conversion."
        raise InputError("adapter-kind", f"{detail}; expected one of {BEGINNINGS}", step)
    for key, value in settings.items():
        if value and key not in SILENT | TAKEN:
            meaning = KINDS.get(key, "which fp4convert does not know")
            detail = f"{name}: {key} is set ({meaning}); expected plain LoRA"
            raise InputError("adapter-kind", detail, ALONE)


def _read_tensors(data: bytes, where: str) -> tuple[dict[str, Float32s], Mapping[str, str]]:
    """Return the tensors of a safetensors file as float32, and its metadata.

    Names have no prefixes of PEFT.
    """
    found: dict[str, Float32s] = {}
    header = read_header(where, len(data), lambda start, count: data[start : start + count])
    for ref in header.tensors:
        if ref.dtype not in FLOAT_DTYPES:
            detail = f"{where}: {ref.name} is {ref.dtype}; expected {', '.join(FLOAT_DTYPES)}"
            raise InputError("adapter-tensors", detail, tensor=ref.name)
        stored = np.frombuffer(data[ref.start : ref.start + ref.nbytes], FLOAT_DTYPES[ref.dtype])
        values: Float32s = stored.astype(np.float32).reshape(ref.shape)
        if not np.isfinite(values).all():
            detail = f"{where}: {ref.name} has NaN or Inf; expected finite numbers"
            raise InputError("adapter-tensors", detail, tensor=ref.name)
        prefix = next((each for each in PREFIXES if ref.name.startswith(each)), "")
        found[ref.name.removeprefix(prefix)] = values
    return found, cast(SafetensorsFrame, header.frame).metadata


def _sort(
    adapter: str, tensors: Mapping[str, Float32s], scalings: Scalings
) -> tuple[dict[str, LoraPair], dict[str, Float32s], dict[str, Float32s]]:
    """Sort tensors into pairs, biases and whole tensors."""
    sides: dict[str, dict[str, Float32s]] = {}
    biases, whole = {}, {}
    for name, values in tensors.items():
        match = LORA_NAMES.fullmatch(name)
        if match and match["bias"]:
            biases[match[1]] = values
        elif match:
            side = match["layer"] or f"embedding_{match['table']}"
            sides.setdefault(match[1], {})[side] = values
        elif odd := ODD.search(name):
            detail = f"{adapter}: {name} belongs to {odd[1]}; expected plain LoRA"
            raise InputError("adapter-kind", detail, ALONE, name)
        else:
            whole[WHOLE_LAYER.sub("", name)] = values
    if not tensors:
        detail = f"{adapter}: {WEIGHTS} holds no tensors; expected pairs of lora_A and lora_B"
        raise InputError("adapter-tensors", detail)
    for module in biases.keys() - sides.keys():
        detail = f"{adapter}: {module} has a bias of lora_B and no factors; expected both"
        raise InputError("adapter-tensors", detail, tensor=module)
    is_of_experts = bool(scalings.settings.get("target_parameters"))
    pairs = {}
    for module, both in sides.items():
        pair = make_pair(adapter, module, both, scalings.rank_of(module), is_of_experts)
        pairs[module] = pair._replace(scaling=scalings.of(module))
    added = {
        module: values * np.float32(pairs[module].scaling) for module, values in biases.items()
    }
    return pairs, added, whole
