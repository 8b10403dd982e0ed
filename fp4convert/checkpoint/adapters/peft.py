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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS
from fp4convert.errors import InputError
from fp4convert.numerics.codec import FLOAT_DTYPES, Float32s
from fp4convert.recipes.patterns import matches
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.open import open_source, read_reference
from fp4convert.storage.safetensors import read_header
from fp4convert.storage.source import Access, Source, read_whole, stopping

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIXES = ("base_model.model.", "base_model.")
WHOLE_LAYER = re.compile(r"\.(?:base_layer|modules_to_save)(?=\.)")  # in names of whole tensors
LORA_NAMES = re.compile(
    r"(.+)\.(?:lora_(?P<layer>[AB])\.weight|lora_embedding_(?P<table>[AB])|lora_B\.(?P<bias>bias))"
)
ODD = re.compile(r"\.(lora_\w+|token_adapter|trainable_tokens\w*)\b")  # of other kinds
DEFAULT = 8  # rank and alpha
ALONE = "Merge it with PEFT (merge_and_unload, save_pretrained) and quantize the result."
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
        *("fan_in_fan_out", "lora_bias", "init_lora_weights"),
    }
)
# Meanings of other keys.
KINDS = {
    "use_dora": "DoRA, which also scales the rows",
    "use_qalora": "QALoRA, which pools the inputs",
    "alora_invocation_tokens": "aLoRA, which acts after certain tokens alone",
    "layer_replication": "layers that stand several times",
    "target_parameters": "LoRA of parameters, whose pairs do not name theirs",
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


class LoraPair(NamedTuple):
    """Low-rank factors of one module; the change is scaling * B A.

    is_embedding  the change is transposed, and rounded to the weight's dtype before it is added
    """

    a: Float32s
    b: Float32s
    scaling: float
    is_embedding: bool = False


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
        config, weights = _read_files(source, reference)
    settings = parse_json_object(config, f"{source.name}/{CONFIG}", has_constants=True)
    _refuse_kinds(settings, source.name)
    tensors = dict(_read_tensors(weights, f"{source.name}/{WEIGHTS}"))
    scalings = _Scalings(settings, scale, f"{source.name}/{CONFIG}")
    files = {CONFIG: config, WEIGHTS: weights}
    base, checkpoint = settings.get("base_model_name_or_path"), source.checkpoint
    return Adapter(
        source.name,
        checkpoint.repo,
        checkpoint.revision,
        base if isinstance(base, str) and base else None,
        scale,
        {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        *_sort(source.name, tensors, scalings),
        is_transposed=bool(settings.get("fan_in_fan_out")),
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


def _read_files(source: Source, reference: str) -> tuple[bytes, bytes]:
    """Read the two files of an adapter."""
    for file in (CONFIG, WEIGHTS):
        if source.has_file(file):
            continue
        if file == WEIGHTS and source.has_file(PICKLE):
            detail = f"{reference} has its weights in {PICKLE}, which runs code when it is loaded"
            step = "Load it with PEFT in a sandbox, and save it again: save_pretrained."
            raise InputError("pickle", f"{detail}; expected {WEIGHTS}", step)
        detail = f"{reference} has no {file}; expected an adapter as PEFT saves it"
        raise InputError("adapter-files", detail)
    return read_whole(source, CONFIG), read_whole(source, WEIGHTS)


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


def _read_tensors(data: bytes, where: str) -> Iterator[tuple[str, Float32s]]:
    """Yield the tensors of a safetensors file as float32, without prefixes."""
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
        yield ref.name.removeprefix(prefix), values


def _sort(
    adapter: str, tensors: Mapping[str, Float32s], scalings: _Scalings
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
    pairs = {module: _pair(adapter, module, both, scalings) for module, both in sides.items()}
    added = {
        module: values * np.float32(pairs[module].scaling) for module, values in biases.items()
    }
    return pairs, added, whole


def _pair(name: str, module: str, sides: Mapping[str, Float32s], scalings: _Scalings) -> LoraPair:
    """Make a pair of its two sides; InputError where they do not fit."""
    is_embedding = sides.keys() == {"embedding_A", "embedding_B"}
    shapes = ", ".join(f"{side} {list(values.shape)}" for side, values in sorted(sides.items()))
    if sides.keys() != {"A", "B"} and not is_embedding:
        detail = f"{name}: {module} has {shapes}; expected lora_A and lora_B"
        raise InputError("adapter-tensors", detail, tensor=module)
    a, b = (values for _, values in sorted(sides.items()))
    if a.ndim != MATRIX_DIMENSIONS and a.ndim == b.ndim:
        detail = f"{name}: {module} has {shapes}, factors of a convolution; expected matrices"
        raise InputError("adapter-kind", detail, ALONE, module)
    rank = scalings.rank_of(module)
    if (a.ndim, b.ndim) != (MATRIX_DIMENSIONS,) * 2 or not len(a) == b.shape[1] == rank:
        detail = f"{name}: {module} has {shapes}; expected A [{rank}, columns], B [rows, {rank}]"
        detail += f", for {CONFIG} says that its rank is {rank}"
        raise InputError("adapter-tensors", detail, tensor=module)
    return LoraPair(a, b, scalings.of(module), is_embedding)


class _Scalings(NamedTuple):
    """Finds ranks and scalings by adapter_config.json, as PEFT does.

    Of patterns, the first that fits the end of a module's name counts.
    """

    settings: Mapping[str, Any]
    scale: float
    where: str

    def rank_of(self, module: str) -> int:
        rank = self._find("rank_pattern", "r", module)
        if type(rank) is not int or rank < 1:
            detail = f"{self.where}: the rank of {module} is {rank!r}; expected a whole number"
            raise InputError("adapter-tensors", detail, tensor=module)
        return rank

    def of(self, module: str) -> float:
        """Return the scaling of a module, times that of the command line."""
        alpha = self._find("alpha_pattern", "lora_alpha", module)
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            detail = f"{self.where}: lora_alpha of {module} is {alpha!r}; expected a number"
            raise InputError("adapter-tensors", detail, tensor=module)
        rank = self.rank_of(module)
        own = alpha / math.sqrt(rank) if self.settings.get("use_rslora") else alpha / rank
        return float(own * self.scale)

    def _find(self, patterns: str, default: str, module: str) -> Any:
        declared = self.settings.get(patterns) or {}
        if not isinstance(declared, dict):
            detail = f"{self.where}: {patterns} is {str(declared)[:100]!r}"
            expected = "expected numbers by patterns of modules"
            raise InputError("adapter-tensors", f"{detail}; {expected}")
        for pattern, value in declared.items():
            if matches(rf"re:(.*\.)?({pattern})$", module):
                return value
        return self.settings.get(default, DEFAULT)
