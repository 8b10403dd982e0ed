"""A model family: a tiny checkpoint with its true names, and, written by hand, what becomes
four-bit and shares a scale.

A line of `quantized` is a scale group: `{a,b}` and `{0-3}` stand for one line each, `(a b)` for the
members of one group.
`model.layers.{0-1}.self_attn.(q_proj k_proj v_proj)` is two groups of three modules.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import INDEX, read_json, read_tensors

from fp4convert.numerics import codec
from fp4convert.numerics.formats import FP4_FORMATS
from fp4convert.numerics.matrices import Quantized

Tensors = dict[str, Any]
SHARDS = 3
PARTS = ("weight_packed", "weight_scale", "weight_global_scale")
DTYPES = {"d2t": "int64", "t2d": "bool"}  # of draft heads: from their words to the model's, back
SIDECARS = {
    "chat_template.jinja": "{% for message in messages %}<|{{ message.role }}|>{{ "
    "message.content }}{% endfor %}\n",
    "tokenizer.json": '{"version": "1.0",  "model": {"type": "BPE", "vocab": {}, "merges": []}}',
    "configuration_tiny.py": "raise RuntimeError('no tool may run what it converts')\n",
    "assets/README.txt": "two  spaces, an umlaut \u00fc and no newline at the end",
}


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor that holds one matrix, or several of one shape, for each of the experts.

    tensors         names, in the notation above
    members         the matrices of one expert, in the order of their rows
    is_transposed   each expert is (in, out), not (out, in)
    is_interleaved  row 0 is of the first member, row 1 of the second
    experts         how many there are, in a tensor of two dimensions where they stand below each
                    other
    """

    tensors: str
    members: tuple[str, ...]
    is_transposed: bool = False
    is_interleaved: bool = False
    named: str = "{parent}.{expert}.{member}"
    experts: int = 0

    def views(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        """(module, its matrix as (out, in)) for every matrix; what is written to it is written to
        the stack.
        """
        parent = name.removesuffix(".weight").rpartition(".")[0]
        for expert, held in enumerate(
            tensor.unflatten(0, (self.experts, -1)) if self.experts else tensor
        ):
            matrix = held.T if self.is_transposed else held
            rows = len(matrix) // len(self.members)
            for place, member in enumerate(self.members):
                part = (
                    slice(place, None, len(self.members))
                    if self.is_interleaved
                    else slice(place * rows, (place + 1) * rows)
                )
                yield self.named.format(parent=parent, expert=expert, member=member), matrix[part]


@dataclass(frozen=True, slots=True)
class Family:
    """One row: how a checkpoint is made, and what is expected of its conversion.

    model       transformers' class, or nothing where none reads the checkpoint
    config      its sizes; all of them differ, so that what is turned round no longer fits
    published   makes of the tensors that transformers saves those that are published
    model_type  the published one, where transformers' class has another
    runs        "artifact": transformers computes the four-bit weights; "restored": it reads what
                `dequantize` writes
    extra       tensors that the model's class leaves alone, such as layers for multi-token
                prediction: name -> shape
    beside      how all of these names begin
    """

    name: str
    model: str
    config: Mapping[str, Any]
    quantized: tuple[str, ...]
    stacks: tuple[Stack, ...] = ()
    published: Callable[[Tensors], Tensors] = dict
    model_type: str = ""
    runs: str = "artifact"
    extra: Mapping[str, tuple[int, ...]] | None = None
    beside: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The modules that become four-bit; those of one tuple share a global scale."""
        return [group for line in self.quantized for group in groups_of(line)]


def groups_of(line: str) -> list[tuple[str, ...]]:
    """The groups that one line stands for."""
    pieces = re.split(r"(\{[^}]*\}|\([^)]*\))", line)
    choices = [_choices(piece) if piece.startswith("{") else [piece] for piece in pieces]
    groups = []
    for chosen in itertools.product(*choices):
        members = [piece[1:-1].split() if piece.startswith("(") else [piece] for piece in chosen]
        groups.append(tuple("".join(parts) for parts in itertools.product(*members)))
    return groups


def modules_of(*lines: str) -> list[str]:
    """Every module that those lines speak of."""
    return [module for line in lines for group in groups_of(line) for module in group]


def _choices(braced: str) -> list[str]:
    chosen: list[str] = []
    for word in braced[1:-1].split(","):
        numbers = re.fullmatch(r"(\d+)-(\d+)", word)
        chosen += map(str, range(int(numbers[1]), int(numbers[2]) + 1)) if numbers else [word]
    return chosen


def build(family: Family, folder: Path) -> Path:
    """The folder, now with the family's checkpoint, as it is published: in three shards, neighbours
    in different ones.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    if family.model:
        kind = getattr(transformers, family.model)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            kind(kind.config_class(**family.config)).bfloat16().save_pretrained(folder)
        tensors = family.published(read_tensors(folder))
        for file in folder.glob("*.safetensors"):
            file.unlink()
    for name, shape in (family.extra or {}).items():
        tensors[name] = torch.ones(shape, dtype=getattr(torch, DTYPES.get(name, "bfloat16")))
    for name, tensor in tensors.items():
        _season(name, tensor)
    _write_config(family, folder)
    write_shards(tensors, folder)
    for name, text in SIDECARS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _write_config(family: Family, folder: Path) -> None:
    config = read_json(folder / "config.json") if family.model else dict(family.config)
    if family.model_type:
        config["model_type"] = family.model_type
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _season(name: str, tensor: Any) -> None:
    """Random values of its own for each tensor, norms near one, and in each matrix a zero block, a
    tiny one and an outlier.
    """
    import torch

    if not tensor.is_floating_point():
        return
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(tensor.shape, generator=random)
    if tensor.dim() < 2:
        tensor += (0.1 * noise).to(tensor.dtype)  # the model's own, so that a norm stays one
        return
    tensor.copy_(0.08 * noise)
    matrices = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
    for number, matrix in enumerate(matrices):
        if matrix.dim() == 2 and min(matrix.shape) >= 32:
            matrix[0, :32] = 0
            matrix[1, :32] *= 1e-4
            matrix[-1 - number % 16, 5 + number] = -0.3 - 0.05 * number


def write_shards(tensors: Tensors, folder: Path) -> None:
    """Safetensors files and their index; of names in alphabetical order each third one is in the
    same file.
    """
    from safetensors.torch import save_file

    names = sorted(tensors)
    weight_map = {}
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        held = {name: tensors[name].contiguous() for name in names[number::SHARDS]}
        save_file(held, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / INDEX).write_text(json.dumps(index))


def matrices(family: Family, tensors: Tensors) -> Tensors:
    """Module -> its matrix as (out, in) in those tensors, of every one that becomes four-bit; a
    view, to be written to.
    """
    views: Tensors = {}
    stacked: set[str] = set()
    for stack in family.stacks:
        for (name,) in groups_of(stack.tensors):
            views |= dict(stack.views(name, tensors[name]))
            stacked.add(name)
    modules = {module for group in family.groups for module in group}
    return {
        module: views[module] if module in views else tensors[f"{module}.weight"]
        for module in modules
    }


def kept(family: Family, tensors: Tensors) -> Tensors:
    """The tensors that arrive untouched."""
    gone = {name for stack in family.stacks for (name,) in groups_of(stack.tensors)}
    gone |= {f"{module}.weight" for group in family.groups for module in group}
    return {name: tensor for name, tensor in tensors.items() if name not in gone}


def encoded(family: Family, tensors: Tensors) -> dict[str, Quantized]:
    """Module -> its NVFP4 codes and scales by the reference codec, with one amax for each group; as
    divisors.
    """
    weights = {
        module: matrix.float().numpy() for module, matrix in matrices(family, tensors).items()
    }
    values = {}
    for group in family.groups:
        amax = max(float(np.abs(weights[module]).max()) for module in group)
        for module in group:
            values[module] = _as_divisor(
                codec.quantize(weights[module], FP4_FORMATS["nvfp4"], "amax", amax)
            )
    return values


def _as_divisor(value: Quantized) -> Quantized:
    """The same with the global scale as compressed-tensors stores it: one over it, rounded once."""
    assert value.global_scale is not None
    return replace(
        value, global_scale=float(np.float32(1) / np.float32(value.global_scale)), kind="divisor"
    )


def spelled(values: Mapping[str, Quantized]) -> Tensors:
    """The tensors of those modules as compressed-tensors stores them."""
    import torch

    tensors: Tensors = {}
    for module, value in values.items():
        rows, columns = value.shape
        packed = torch.frombuffer(bytearray(value.packed), dtype=torch.uint8).reshape(
            rows, columns // 2
        )
        block_scales = torch.frombuffer(
            bytearray(value.block_scales), dtype=torch.float8_e4m3fn
        ).reshape(rows, columns // 16)
        stored = (packed, block_scales, torch.tensor([value.global_scale], dtype=torch.float32))
        tensors |= {f"{module}.{part}": tensor for part, tensor in zip(PARTS, stored, strict=True)}
    return tensors


def decoded(family: Family, tensors: Tensors) -> Tensors:
    """The checkpoint in bfloat16, with every four-bit matrix replaced by what the reference codec
    makes of it.
    """
    import torch

    values = encoded(family, tensors)
    result = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).clone()
        for name, tensor in tensors.items()
    }
    for module, matrix in matrices(family, result).items():
        matrix.copy_(torch.from_numpy(codec.dequantize(values[module])))  # rounded once
    return result


def write_values(source: Path, tensors: Tensors, folder: Path) -> Path:
    """The folder, now with that checkpoint's model and other values, as ordinary weights."""
    folder.mkdir()
    config = {
        key: value
        for key, value in read_json(source / "config.json").items()
        if key != "quantization_config"
    }
    (folder / "config.json").write_text(json.dumps(config))
    if (source / "generation_config.json").exists():
        shutil.copy(source / "generation_config.json", folder)
    write_shards(tensors, folder)
    return folder


def load(family: Family, folder: Path, dtype: str = "bfloat16", **options: Any) -> Any:
    """The model that transformers makes of a folder; the test fails where a tensor of it was
    missing or of another shape.
    """
    import torch
    import transformers

    kind = getattr(transformers, family.model)
    if family.model_type:  # else its names are not known for those of the class
        options["config"] = kind.config_class(
            **{**read_json(folder / "config.json"), "model_type": kind.config_class.model_type}
        )
    model, info = kind.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True, **options
    )
    assert [
        name
        for name in info.pop("unexpected_keys")
        if not family.extra or not name.startswith(family.beside)
    ] == []
    assert not any(info.values()), info
    if model.config.get_text_config().tie_word_embeddings:
        assert (
            model.get_output_embeddings().weight.data_ptr()
            == model.get_input_embeddings().weight.data_ptr()
        )
    return model.eval()


def logits(family: Family, folder: Path, **options: Any) -> Any:
    """What transformers computes, from a folder that `load` accepts."""
    return logits_of(family, load(family, folder, **options))


def logits_of(family: Family, model: Any) -> Any:
    """What a model computes of a few tokens."""
    import torch

    inputs = {"input_ids": torch.arange(1, 33).reshape(2, 16)}
    if family.name == "whisper":
        random = torch.Generator().manual_seed(0)
        features = torch.randn((2, 16, 48), generator=random).bfloat16()
        inputs = {"input_features": features, "decoder_input_ids": inputs["input_ids"]}
    with torch.no_grad():
        return model(**inputs).logits
