"""Make the site's gallery: each family's commands and plan, by asking for the plans: `make site`.

A command stands there where its plan can be made; plans are of tiny checkpoints with the family's
true names (tests/support/families.py), sizes of the shapes of published models.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "docs"), str(ROOT / "tests" / "support")]
from engine_tables import table  # noqa: E402
from families import FAMILIES  # noqa: E402
from family import Family, build  # noqa: E402
from fp4_sources import MAKERS  # noqa: E402
from tiny_models import offline, read_json  # noqa: E402
from true_shapes import (  # noqa: E402
    LLAMA_8B,
    LLAMA_70B,
    MISTRAL_7B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_CODER_480B,
    deepseek_v3,
    write_holes,
)

import fp4convert  # noqa: E402
from fp4convert.conversion.engine_choice import choose_options  # noqa: E402
from fp4convert.engines.files import Preset, known_engines  # noqa: E402
from fp4convert.options.writing import QuantizeOptions  # noqa: E402
from fp4convert.recipes.toml_files import FAMILIES as INDEX  # noqa: E402
from fp4convert.recipes.toml_files import known_file  # noqa: E402

NO_ENGINE = "No engine is known to load it in four bits; the plan is that of `--format mxfp4`."
HEAD = """# Recipes gallery

One section for each model family that the tests convert: the command for each engine, what it
quantizes and what it keeps. Made by `make site` from `configs/` and from the plans of tiny
checkpoints with each family's true names.

- A command stands here when its plan can be made, and `configs/engines` says that the engine loads
  what it writes. Whether your version of the engine has the model is the engine's matter; how far
  each engine was tried is in [Engines](engines.md).
- `./Model` is a folder or `ORG/NAME`. For llama.cpp the source is a GGUF file, whatever the family:
  `fp4convert quantize model-bf16.gguf --format mxfp4 --dialect gguf`.
- Counts are of the tiny checkpoints (mostly two layers). The plan of your model:
  `fp4convert quantize ./Model --format nvfp4 --dry-run`. All recipes: `fp4convert recipes`.
"""
NEWEST = """Plans of these model types, of transformers 5.23's classes under the published names,
were read one by one: routers, norms, embeddings, gates, convolutions and towers stay, fused layers
share a scale, stacks are read. Those with a section above are also converted by the tests. The
recipe is that of the type itself; a model inside it, as Qwen3.5 in MiniCPM-V, brings its own."""
LANGUAGE = ("vllm", "sglang", "tensorrt-llm", "transformers", "mlx")
DIFFUSION = ("comfyui", "diffusers")
NO_CLASS = ("kimi_k2",)  # transformers has none of that name
PACKED = {"gpt_oss": "gpt_oss-mxfp4", "deepseek_v4": "deepseek_v4-fp4"}  # as they are published
PUBLISHED = {
    "Llama-3.1-8B": ("llama", LLAMA_8B.tensors),
    "Llama-3.1-70B": ("llama", LLAMA_70B.tensors),
    "Mistral-7B-v0.3": ("mistral", MISTRAL_7B.tensors),
    "Qwen3-8B": ("qwen3", QWEN3_8B.tensors),
    "Qwen3-30B-A3B": ("qwen3_moe", QWEN3_30B_A3B.tensors),
    "Qwen3-Coder-480B-A35B": ("qwen3_moe", QWEN3_CODER_480B.tensors),
    "DeepSeek-V3, in bf16": ("deepseek_v3", deepseek_v3),
}
# Model types of text of the last year whose plans, of transformers 5.23's classes, were read.
READ = (
    *("apertus", "arcee", "axk1", "axk2", "bailing_hybrid", "bamba", "beam", "bitnet", "blt"),
    *("cohere2_moe", "cwm", "deepseek_v32", "doge", "dots1", "dots3_note", "embedding_gemma2"),
    *("ernie4_5", "ernie4_5_vl_moe", "exaone4", "exaone4_5", "exaone_moe", "falcon_h1"),
    *("flex_olmo", "flint", "gemma4_unified", "glm4", "glm46v", "glm4v", "glm_ocr", "glmga"),
    *("granite_docling", "granite_swa", "granitemoe_swa", "hrm_text", "hy_v3", "hy_v4"),
    *("hyperclovax", "hyperclovax_vision_v2", "inkling2", "inkling_mm_model", "internlm3"),
    *("iquestcoder", "jais2", "jamba", "kimi_k25", "kimi_linear", "kolibri1", "laguna", "lfm3"),
    *("lfm3_vl", "mellum", "mimo_v2_flash", "minicpm3", "minicpm_ocr", "minicpmv4_6"),
    *("minicpmv4_7", "minimax_m3_vl", "ministral", "ministral3", "mistral3", "mistral4"),
    *("mistral_large4", "moss_transcribe_diarize", "muse_glimmer", "muse_glimmer_assistant"),
    *("muse_spark", "nanochat", "nemotron_h", "nemotron_h_omni", "olmo3", "olmo_hybrid"),
    *("paddleocr_vl", "phi4_multimodal", "qianfan_ocr", "qwen3_asr", "recurrent_gemma"),
    *("seed_oss", "smollm3", "solar_open", "step3p7", "t5gemma", "t5gemma2", "unlimited_ocr"),
    *("vaultgemma", "vibevoice", "vibevoice_asr", "voxtral", "voxtral_realtime", "youtu"),
    *("zamba2", "zaya"),
)
SHOWN = tuple(family for family in FAMILIES if "-" not in family.name)  # others are variants


def _of_whole_blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    """Double the widths of MLPs, as published models have them in whole blocks of both formats."""
    made = dict(config)
    for key, value in config.items():
        if isinstance(value, Mapping):
            made[key] = _of_whole_blocks(value)
        elif "intermediate_size" in key or key.endswith("ffn_hidden_size"):
            made[key] = 2 * value if isinstance(value, int) else value
    return made


def section(family: Family) -> str:
    """Write the section of one family."""
    with tempfile.TemporaryDirectory() as folder, offline():
        source = Path(folder) / "Model"
        if family.name in PACKED:
            MAKERS[PACKED[family.name]](source)
        elif family.model:
            build(replace(family, config=_of_whole_blocks(family.config)), source)
        else:  # its shapes are given, and a config has to fit them
            build(family, source)
        config = read_json(source / "config.json")
        kind = config.get("_class_name") or config["model_type"]
        recipe = tomllib.loads(INDEX.read_text(encoding="utf-8")).get(kind, "default")
        plans = dict(_plans(family, source, recipe))
        shown = [plan for *_, plan in plans.values()][:1] or [
            fp4convert.preview_quantize(source, format="mxfp4", warn=lambda text: None)
        ]
    about = known_file(recipe).about
    lines = [f"## {family.name}", "", f"`{kind}`, recipe `{recipe}`: {about}", ""]
    rows = [(engine, f"`{command}`", f"`{words}`") for engine, command, words, _ in plans.values()]
    lines += table(("engine", "command", "which is"), rows) if rows else [NO_ENGINE]
    lines += ["", *table(("modules", "count", "becomes", "why"), list(_rows(shown[0]))), ""]
    return "\n".join([*lines, *_sizes(family.name)])


def _plans(
    family: Family, source: Path, recipe: str
) -> Iterator[tuple[str, tuple[str, str, str, dict[str, Any]]]]:
    """Make the plan of each engine's command; leave out those refused."""
    is_diffusion = not family.model and "_class_name" in family.config
    for engine in known_engines():
        if engine.key not in (DIFFUSION if is_diffusion else LANGUAGE):
            continue
        if engine.key == "transformers" and (not family.model or family.name in NO_CLASS):
            continue
        with suppress(fp4convert.InputError):
            if engine.key == "comfyui":  # of whose single files there is none here
                (choice,) = engine.presets
                chosen = QuantizeOptions(source, format=choice.format, dialect=choice.dialect)
            else:
                chosen = choose_options(QuantizeOptions(source, engine=engine.key))
            made = {"format": chosen.format, "dialect": chosen.dialect}
            made |= {"activations": chosen.activations, "exclude": chosen.exclude}
            plan = fp4convert.preview_quantize(source, **made, warn=lambda text: None)
            words = Preset(str(chosen.dialect), str(chosen.format), chosen.activations or 16).words
            named = f" --recipe {recipe}" if engine.key == "comfyui" else ""
            name = "model.safetensors" if engine.key == "comfyui" else "./Model"
            command = f"fp4convert quantize {name} --for {engine.key}{named}"
            yield engine.key, (engine.name, command, words, plan)


def _rows(plan: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    """List what is quantized by pattern, and what is kept by reason."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for row in plan["patterns"]:
        if row["format"]:
            why = f"one global scale: {row['group'].replace('/', ', ')}" if row["group"] else ""
            yield f"`{row['pattern']}`", row["count"], row["format"].upper(), why
        else:
            kept.setdefault(row["reason"], []).append(row)
    for reason, rows in kept.items():
        patterns = ", ".join(f"`{row['pattern']}`" for row in rows[:3])
        more = f" and {len(rows) - 3} more kinds" if len(rows) > 3 else ""
        yield patterns + more, sum(row["count"] for row in rows), "kept", reason


def _sizes(name: str) -> Iterator[str]:
    """Tell the sizes of published models of a family, by their shapes."""
    rows: list[tuple[object, ...]] = []
    for model, (family, tensors) in PUBLISHED.items():
        if family != name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = write_holes(Path(folder) / "m", family, tensors())
            sizes = []
            for form in ("nvfp4", "mxfp4"):
                plan = fp4convert.preview_quantize(source, format=form, warn=lambda text: None)
                sizes.append(f"{plan['output_bytes'] / 1e9:.1f} GB")
        counts = [
            sum(row["count"] for row in plan["patterns"] if bool(row["format"]) is has_format)
            for has_format in (True, False)
        ]
        rows.append((model, f"{plan['source_bytes'] / 1e9:.1f} GB", *sizes, *counts))
    if rows:
        heads = ("model", "bf16", "NVFP4", "MXFP4", "modules quantized", "tensors kept")
        yield from (*table(heads, rows), "")


def newest() -> str:
    """List the model types of the last year by the recipe that they have."""
    index = tomllib.loads(INDEX.read_text(encoding="utf-8"))
    by_recipe: dict[str, list[str]] = {}
    for kind in READ:
        by_recipe.setdefault(index.get(kind, "default"), []).append(f"`{kind}`")
    rows = [
        (f"`{recipe}`", known_file(recipe).about, ", ".join(kinds))
        for recipe, kinds in sorted(by_recipe.items())
    ]
    lines = ["## The newest text families", "", NEWEST, ""]
    return "\n".join([*lines, *table(("recipe", "which is", "model types"), rows), ""])


def text() -> str:
    """Return the page."""
    return "\n".join([HEAD, *map(section, SHOWN), newest()])
