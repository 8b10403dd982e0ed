"""Compare what an engine holds after loading with the tensors of the artifact, byte for byte.

Engines fuse: queries, keys and values are one parameter, so are gate and up, and all experts of a
layer. What each parameter must hold is composed here from the artifact's own tensors alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

POISON = 0xA5
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),  # and keys for both: BOTH
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "wk_weights_proj": ("wk", "weights_proj"),
}
BOTH = ("q_proj", "k_proj", "k_proj")  # of layers whose values are their keys
EXPERTS = re.compile(r"(.+\.experts)(?:\.\w+)?\.w(13|2)_(\w+)")
# Of gpt-oss: a tensor for all experts.
BIASES = ("_bias",)
STACKED = {
    **{"weight": ("_blocks", ""), "weight_scale": ("_scales",)},
    **{"bias": BIASES, "weight_bias": BIASES},
}
# The two halves of w13, and w2; without a gate w13 is up alone.
GATED = (("gate_proj", "up_proj"), ("w1", "w3"), ("up_proj",)), (("down_proj",), ("w2",))
MADE_LATER = re.compile(r"_blockscale_swizzled$")  # SGLang makes it of what was loaded
INPUT = re.compile(r"input_(global_)?scale$")


def numberless(words: str) -> str:
    """Write N for the numbers of layers and experts in names."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "N", words)


def rotated(config: Any) -> dict[str, int]:
    """Return heads of the projections of Llama 4's text, whose rows engines order anew."""
    if config.model_type != "llama4":
        return {}
    text, stem = config.text_config, "language_model.*."
    return {f"{stem}q_proj": text.num_attention_heads, f"{stem}k_proj": text.num_key_value_heads}


@dataclass
class Judged:
    """What comparing found, by parameter; an artifact is exact where only `exact` has something."""

    exact: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    nbytes: int = 0

    @property
    def faults(self) -> list[str]:
        """All that is wrong, once for all layers and experts."""
        kinds = {"differs": self.differs, "unset": self.unset, "unread": self.unread}
        told = [f"{kind} {numberless(each)}" for kind, found in kinds.items() for each in found]
        return list(dict.fromkeys(told if self.exact else [*told, "nothing compared"]))


class Artifact:
    """The tensors of a folder, under the names that the engine gives their modules.

    renamed      patterns and what stands for them, tried in order
    is_up_first  the engine says that it wants up before gate in w13
    rotated      globs on projections whose rows the engine orders for its rotary embedding, and
                 their heads
    """

    is_up_first = False
    rotated: Mapping[str, int] = {}

    def __init__(self, folder: Path, renamed: tuple[tuple[str, str], ...]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                    own = name
                    for pattern, word in renamed:
                        own = re.sub(pattern, word, own)
                    if own in self.tensors:
                        raise ValueError(f"{name}: a second tensor is named {own}")
                    self.tensors[own] = opened.get_tensor(name)

    @property
    def quantizes_inputs(self) -> bool:
        """Whether four-bit modules have a scale of inputs; FP8 ones beside them always do."""
        scaled = {INPUT.sub("weight", name) for name in self.tensors if INPUT.search(name)}
        packed = {name.removesuffix("_packed") for name in self.tensors if self.is_packed(name)}
        return not scaled.isdisjoint(packed)

    def is_packed(self, name: str) -> bool:
        return self.tensors[name].dtype == torch.uint8

    def holds(self, name: str) -> tuple[torch.Tensor, list[str]] | None:
        """Return what a parameter must hold and the tensors it is made of; None: it is not said."""
        for names in self._sources(name):
            if all(each in self.tensors for row in names for each in row):
                rows = [_joined([self._ordered(each) for each in row]) for row in names]
                used = [each for row in names for each in row]
                return torch.stack(rows) if len(rows) > 1 else rows[0], used
        return None

    def _ordered(self, name: str) -> torch.Tensor:
        """Return a tensor; of a rotated projection the even rows of each head before the odd."""
        tensor, module = self.tensors[name], name.rpartition(".")[0]
        found = [heads for glob, heads in self.rotated.items() if fnmatchcase(module, glob)]
        if not found or tensor.dim() != 2:
            return tensor
        (heads,) = found
        return tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)

    def _sources(self, name: str) -> Iterator[list[list[str]]]:
        """Return lists of names that may make up the parameter, a row for each expert."""
        yield [[name]]
        parent, _, rest = name.rpartition(".")
        module, _, fused = parent.rpartition(".")
        if fused in PARTS:
            yield [[f"{module}.{part}.{rest}" for part in PARTS[fused]]]
        if fused == "qkv_proj":
            yield [[f"{module}.{part}.{rest}" for part in BOTH]]
        if found := re.fullmatch(r"(.+)\.\w+\.([kv])_scale", name):  # of the cache
            yield [[f"{found[1]}.{found[2]}_proj.{found[2]}_scale"]]
            yield [[f"{found[1]}.{found[2]}_scale"]]
        if found := EXPERTS.fullmatch(name):
            pattern = re.compile(re.escape(found[1]) + r"\.(\d+)\.")
            numbers = sorted({int(of[1]) for each in self.tensors if (of := pattern.match(each))})
            stack = f"{found[1]}.{'gate_up' if found[2] == '13' else 'down'}_proj"  # gpt-oss
            for ending in STACKED.get(found[3], ()):
                yield [[f"{stack}{ending}"]]
            endings = (found[3], "weight_packed") if found[3] == "weight" else (found[3],)
            for parts, ending in itertools.product(GATED[found[2] == "2"], endings):
                order = parts[::-1] if self.is_up_first else parts
                rows = [
                    [f"{found[1]}.{each}.{part}.{ending}" for part in order] for each in numbers
                ]
                if rows:
                    yield rows


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Lay matrices below each other, and single numbers beside each other."""
    if len(tensors) == 1:
        return tensors[0]
    if all(tensor.numel() == 1 for tensor in tensors):
        return torch.stack([tensor.reshape(()) for tensor in tensors])
    return torch.cat(tensors)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, which it shares with it where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def marked_memory() -> Iterator[None]:
    """Let torch.empty() give NaN and the greatest integers, so that what is never set is known."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poison(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Fill all parameters with one byte; return what they held, which may be a default."""
    before = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        filled = torch.full((parameter.data.nbytes,), POISON, dtype=torch.uint8)
        parameter.data.copy_(filled.view(parameter.dtype).reshape(parameter.shape))
    return before


def compare(model: torch.nn.Module, artifact: Artifact, before: dict[str, torch.Tensor]) -> Judged:
    """Compare every parameter; those of which the artifact says nothing hold `before` again."""
    judged, used = Judged(), set[str]()
    parameters: dict[str, Any] = dict(model.named_parameters())
    buffers = {name: held for name, held in model.named_buffers() if name in artifact.tensors}
    for name, parameter in {**parameters, **buffers}.items():
        held = artifact.holds(name)
        if held is None:
            if bool((raw(parameter.data) == POISON).all()):
                parameter.data.copy_(before[name])
                if is_marked(before[name]) and not _is_idle(name, parameters, artifact):
                    judged.unset.append(name)
            continue
        wanted, names = held
        used.update(names)
        if _is_same(parameter.data, wanted, name):
            judged.exact.append(name)
            judged.nbytes += wanted.nbytes
        else:
            shapes = f"{list(parameter.shape)}, artifact {list(wanted.shape)}"
            judged.differs.append(f"{name} {parameter.dtype} {shapes}")
    judged.unread = sorted(artifact.tensors.keys() - used)
    return judged


def is_marked(tensor: torch.Tensor) -> bool:
    """True for marked memory, and for the least float, with which vLLM begins to seek a maximum."""
    if not tensor.is_floating_point():
        return bool((tensor == torch.iinfo(tensor.dtype).max).all())
    wide = tensor.float()
    return bool((wide.isnan() | (wide == torch.finfo(torch.float32).min)).all())


def _is_idle(name: str, parameters: dict[str, Any], artifact: Artifact) -> bool:
    """True for what work after loading makes, and for a scale of inputs of weight-only FP4."""
    if MADE_LATER.search(name):
        return True
    if not INPUT.search(name) or artifact.quantizes_inputs:
        return False
    stem = INPUT.sub("weight", name)
    packed = [parameters.get(stem), parameters.get(f"{stem}_packed")]
    return any(each is not None and each.dtype == torch.uint8 for each in packed)


def _is_same(got: torch.Tensor, wanted: torch.Tensor, name: str) -> bool:
    """True where all bytes are the same, or are the same numbers in a wider type.

    What engines do on purpose is undone: padding at the end, a wider type, one number in every
    slot of a fused matrix, or once for gate and up, and the sign and exponential of a state
    space's A.
    """
    if name.endswith(".A"):
        wanted = -torch.exp(wanted.float())
    if wanted.numel() == 1 and got.dim() == 1:
        wanted = wanted.reshape(1).expand(got.shape)
    if wanted.dim() == 2 and got.dim() == 1 and bool((wanted == wanted[:, :1]).all()):
        wanted = wanted[:, 0]
    if got.dim() == wanted.dim() and got.shape != wanted.shape:
        got = got[tuple(slice(0, size) for size in wanted.shape)]
    if got.numel() != wanted.numel():
        return False
    wide = got.dtype.itemsize > 1 and wanted.dtype.itemsize > 1 and got.is_floating_point()
    if got.dtype != wanted.dtype and wide and wanted.is_floating_point():
        wanted = wanted.to(got.dtype)
    return torch.equal(raw(got), raw(wanted))
