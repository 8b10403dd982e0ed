"""Write variants of a family for the recipes of vLLM.

They stand in models/ORG/NAME.yaml of github.com/vllm-project/recipes, and have model_id, precision,
description and vram_minimum_gb there (CONTRIBUTING.md).  Memory depends on the checkpoint, so that
the last is left out, which that site reads as "fits".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from fp4convert.checkpoint.class_table import classes_of
from fp4convert.engines.files import Preset, read_engine
from fp4convert.engines.rows import FOUR_BIT, Contents, Part
from fp4convert.engines.verdicts import judge
from fp4convert.errors import InputError
from fp4convert.recipes.toml_files import chosen_files

# Of artifacts in one format, with experts or without: nvfp4/16, experts-nvfp4/16+nvfp4/16.
UNIFORM = re.compile(r"(?:experts-)?(\w+)/(\d+)(?:\+\1/\2)?")
HEAD = """\
# For models/ORG/NAME.yaml of github.com/vllm-project/recipes; model_id is what you publish.
# vram_minimum_gb: output_bytes of the line with --dry-run --json, times 1.2, in GB.
"""
Variants = dict[str, dict[str, str]]


def vllm_variants(family: str) -> Variants:
    """Return the variants of a family that vLLM itself loaded.

    family  a model type, or a recipe: the model types that it is for
    Raises  InputError for an unknown family, and where vLLM loaded none
    """
    types = (family,) if classes_of(family) else chosen_files(family)[-1].model_types
    dialects = [preset.dialect for preset in read_engine("vllm").presets]
    loaded = [each for model in types for each in _loaded(model)]
    found: Variants = {}
    for preset, classes, versions in sorted(
        loaded, key=lambda each: (FOUR_BIT.index(each[0].format), dialects.index(each[0].dialect))
    ):
        bits = preset.activations
        key = preset.format if bits == 16 else f"{preset.format}_w4a{bits}"
        name = key.upper().replace("_", "-")
        command = f"fp4convert quantize ORG/NAME {preset.words}"
        found.setdefault(
            key,
            {
                "model_id": f"ORG/NAME-{name}",
                "precision": preset.format,
                "description": f"{name} by `{command}`; vLLM {versions} loads it ({classes})",
            },
        )
    if not found:
        detail = f"{family}: no model of it in four bits is known that vLLM loaded"
        raise InputError("engine-refuses", detail, "For others: fp4convert recipes.")
    return found


def _loaded(model: str) -> Iterator[tuple[Preset, str, str]]:
    """List choices, classes and versions of a model type that loaded."""
    engine = read_engine("vllm")
    dialects = {preset.dialect for preset in engine.presets}
    tried = engine.loaded_classes
    for (name, dialect, formats), fault in tried.rows.items() if tried else ():
        uniform = UNIFORM.fullmatch(formats)
        if fault or not uniform or dialect not in dialects or name not in classes_of(model):
            continue
        preset = Preset(dialect, uniform[1], int(uniform[2]))
        words = formats.split("+")
        parts = {Part(*preset[1:3], word.startswith("experts-")) for word in words}
        verdict = judge(engine, Contents(dialect, frozenset(parts), model, (name,)))
        if verdict.loads:
            yield preset, name, verdict.versions


def as_yaml(variants: Variants) -> str:
    """Write variants as that file has them.

    Strings of JSON are strings of YAML.
    """
    lines = ["variants:"]
    for key, variant in variants.items():
        lines.append(f"  {key}:")
        lines += [f"    {name}: {json.dumps(value)}" for name, value in variant.items()]
    return HEAD + "\n".join(lines)
