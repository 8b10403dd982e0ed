"""Read the LoRA adapters of kohya, Diffusers and mlx-lm.

One file, without adapter_config.json; of X without alpha the scaling is 1:
  X.lora_down.weight    (rank, columns), X.lora_up.weight (rows, rank), X.alpha []: W + alpha / rank
                        up down.  kohya's sd-scripts and musubi-tuner write X as a module with _ in
                        place of dots, behind lora_unet_ or lora_te_
  X.lora_A.weight       the same, X.lora_B.weight: Diffusers and trainers for ComfyUI; Diffusers has
                        alphas in the header's lora_adapter_metadata
A folder with adapter_config.json of mlx-lm, and adapters.safetensors:
  X.lora_a              (columns, rank), X.lora_b (rank, rows): W + scale (lora_a lora_b)^T, the
                        product rounded to the dtype of W first; of experts (experts, rank, columns)
                        and (experts, rows, rank)
Source: sd-scripts, networks/merge_lora.py; Diffusers 0.42, loaders/lora_base.py; mlx-lm 0.32,
tuner/lora.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fp4convert.checkpoint.adapters.pairs import ALONE, LoraPair, Scalings, make_pair
from fp4convert.checkpoint.dialects.base import json_object
from fp4convert.checkpoint.dialects.stacks import STACK_DIMENSIONS
from fp4convert.errors import InputError
from fp4convert.numerics.codec import Float32s
from fp4convert.storage.json_text import parse_json_object

MLX_KEYS = ("fine_tune_type", "lora_parameters")  # of adapter_config.json
MLX_WEIGHTS = "adapters.safetensors"
DIFFUSERS_NOTE = "lora_adapter_metadata"
# Prefixes of kohya's names, and what they stand for in files of one part and of all.
KOHYA = {
    "lora_unet_": ("model.diffusion_model.", ""),
    "lora_te_": ("cond_stage_model.transformer.", "text_encoders.clip_l.transformer.", ""),
    "lora_te1_": ("conditioner.embedders.0.transformer.", "text_encoders.clip_l.transformer.", ""),
    "lora_te2_": ("text_encoders.clip_g.transformer.", ""),
    "lora_te3_": ("text_encoders.t5xxl.transformer.", ""),
}
ENCODERS = ("lora_te", "text_encoder", "te.", "te1.", "te2.")  # begin names of text encoders
SIDE = re.compile(r"(.+)\.lora(?:_(?P<a>down|A)|_(?P<b>up|B))(?:\.default)?\.weight")
# Changes that are no product of two factors, by the names of their tensors.
OTHER_KINDS = {
    r"\.hada_w\d": "LoHa (LyCORIS)",
    r"\.lokr_w\d": "LoKr (LyCORIS)",
    r"\.dora_scale$|\.lora_magnitude_vector": "DoRA, which also scales the rows",
    r"\.m$": "DoRA of mlx-lm, which also scales the rows",
    r"\.oft_|\.boft_": "OFT, which rotates the weights",
    r"\.[ab][12]\.weight$": "GLoRA (LyCORIS)",
    r"\.on_input$": "(IA)^3 (LyCORIS)",
    r"\.lora_mid\.": "LoCon with a core between its factors (LyCORIS)",
    r"\.(diff|diff_b|w_norm|b_norm|set_weight)$": "whole differences of weights",
}


def read_single(
    name: str, tensors: Mapping[str, Float32s], notes: Mapping[str, str], scale: float
) -> dict[str, LoraPair]:
    """Return the pairs of one file of kohya, Diffusers or ComfyUI.

    notes  of its header
    Raises InputError for other kinds
    """
    sides: dict[str, dict[str, Float32s]] = defaultdict(dict)
    alphas: dict[str, float] = {}
    for tensor, values in tensors.items():
        refuse_other_kinds(name, tensor)
        if match := SIDE.fullmatch(tensor):
            sides[match[1]]["A" if match["a"] else "B"] = values
        elif tensor.endswith(".alpha") and values.size == 1:
            alphas[tensor.removesuffix(".alpha")] = float(values.reshape(-1)[0])
        else:
            detail = f"{name}: {tensor} is no factor of LoRA; expected pairs of lora_down and"
            raise InputError(
                "adapter-kind", f"{detail} lora_up, or lora_A and lora_B", ALONE, tensor
            )
    declared = parse_json_object(notes.get(DIFFUSERS_NOTE, "{}").encode(), DIFFUSERS_NOTE)
    pairs = {}
    for module, both in sides.items():
        part, _, inner = module.partition(".")
        settings = {key.removeprefix(f"{part}."): value for key, value in declared.items()}
        rank = len(both["A"]) if "A" in both else 0
        scaling = scale * alphas.get(module, rank) / max(rank, 1)
        if "lora_alpha" in settings and module not in alphas:
            scaling = Scalings(settings, scale, f"{name}: {DIFFUSERS_NOTE}").of(inner)
        pairs[module] = make_pair(name, module, both, rank)._replace(scaling=scaling)
    return pairs


def refuse_other_kinds(name: str, tensor: str) -> None:
    """Raise InputError for a tensor of an adapter that is not plain LoRA."""
    for pattern, kind in OTHER_KINDS.items():
        if re.search(pattern, tensor):
            detail = f"{name}: {tensor} belongs to {kind}; expected plain LoRA"
            raise InputError("adapter-kind", detail, ALONE, tensor)


def read_mlx(
    name: str, tensors: Mapping[str, Float32s], settings: Mapping[str, Any], scale: float
) -> tuple[dict[str, LoraPair], dict[str, Float32s]]:
    """Return the pairs of mlx-lm's adapter, and tensors of a full one."""
    if settings.get("fine_tune_type") == "full":
        return {}, dict(tensors)
    own = json_object(settings.get("lora_parameters")).get("scale")
    if not isinstance(own, int | float):
        detail = f"{name}: lora_parameters has no scale; expected a number, as mlx-lm writes it"
        raise InputError("adapter-tensors", detail)
    pairs: dict[str, LoraPair] = {}
    for tensor, left in tensors.items():
        refuse_other_kinds(name, tensor)
        module, _, side = tensor.rpartition(".")
        right = tensors.get(f"{module}.lora_b")
        if side not in ("lora_a", "lora_b") or right is None or f"{module}.lora_a" not in tensors:
            detail = f"{name}: {tensor} has no other factor; expected lora_a and lora_b"
            raise InputError("adapter-tensors", detail, tensor=tensor)
        if side == "lora_b":
            continue
        made = {module: (left.T, right.T)}
        if left.ndim == STACK_DIMENSIONS:  # experts, which checkpoints have apart
            parent, _, leaf = module.replace("switch_mlp", "experts").rpartition(".")
            made = {
                f"{parent}.{n}.{leaf}": both for n, both in enumerate(zip(left, right, strict=True))
            }
        for each, (a, b) in made.items():
            pair = make_pair(name, each, {"A": a, "B": b}, len(a))
            pairs[each] = pair._replace(scaling=float(own * scale), is_rounded_first=True)
    return pairs, {}
