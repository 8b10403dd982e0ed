"""Make a tiny checkpoint of every class that vLLM or SGLang has and transformers builds.

    PYTHONPATH=tests/support python tests/engines/judges/classes.py FOLDER [CLASS...]

A class's own default configuration is shortened and shrunk; what then still builds nothing, or
nothing that engines take, has its settings in classes.toml. FOLDER/CLASS holds the checkpoint, as
transformers saves it, FOLDER/CLASS--DIALECT what fp4convert makes of it and beside it, in
bf16/CLASS--DIALECT, what `dequantize` makes of that again. FOLDER/classes.json says of each class
what was made, or the reason. What is there already is not made again.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import sys
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from families import FAMILIES
from judged_families import JUDGED, source

HERE = Path(__file__).resolve().parent
LISTS = HERE.parents[2] / "configs" / "engines" / "models"
ENGINES = "vllm", "sglang"
MOST_PARAMETERS, MOST_SECONDS = 60_000_000, 120
# Sizes by the words that configurations have for them. All divide by heads, and by blocks of 32.
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embed_dim"), 256),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "emb_dim"), 256),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "v_head_dim", "qk_nope_head_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp"), 512),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 512),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 192),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 192),
    **dict.fromkeys(("shared_intermediate_size", "expert_intermediate_size"), 192),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"), 2
    ),
    **dict.fromkeys(("moe_k",), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_num_shared_experts", "num_dense_layers"), 1),
    **dict.fromkeys(("vocab_size",), 512),
    **dict.fromkeys(("q_lora_rank",), 96),
    **dict.fromkeys(("kv_lora_rank",), 64),
    **dict.fromkeys(("qk_rope_head_dim",), 32),
    **dict.fromkeys(("qk_head_dim",), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim",), 32),
    **dict.fromkeys(("linear_value_head_dim",), 64),
    **dict.fromkeys(("image_size",), 56),
    **dict.fromkeys(("patch_size",), 14),
    **dict.fromkeys(("out_hidden_size", "projection_dim"), 256),
    **dict.fromkeys(("sliding_window", "attention_window"), 64),
    **dict.fromkeys(("vocab_size_per_layer_input", "ngram_vocab_size_base"), 512),
    **dict.fromkeys(("alignment_intermediate_size", "projector_hidden_size"), 512),
    **dict.fromkeys(("hidden_size_per_layer_input",), 64),
    **dict.fromkeys(("text_hidden_size", "ple_embed_dim", "moe_hidden_size"), 256),
}
LAYERS: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers",), 2),
}
KINDS = "layer_types", "mlp_layer_types", "layers_block_type", "attention_types", "block_types"
# CLIP and SigLIP towers have this part in their names, as published; no others have it.
CLIPS = re.compile(r"^(clip|siglip2?)_vision")
VISION = (
    (
        r"^((?:\w+\.)*vision_tower\.)(?=embeddings|encoder|post_layernorm|pre_layrnorm|head\.)",
        r"\1vision_model.",
    ),
)
DIALECTS = "compressed-tensors", "modelopt", "quark"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "compressed-tensors": {"format": "nvfp4", "activations": 16},
    "modelopt": {"format": "nvfp4", "activations": 16},
    "quark": {"format": "mxfp4", "activations": 4},
}


def class_names() -> list[str]:
    """List the classes of both engines that transformers has."""
    import transformers

    names: dict[str, None] = {}
    for engine in ENGINES:
        table = tomllib.loads((LISTS / f"{engine}.toml").read_text())
        names |= dict.fromkeys(table["names"].split())
    return [name for name in names if isinstance(getattr(transformers, name, None), type)]


def own_settings() -> dict[str, dict[str, Any]]:
    return tomllib.loads((HERE / "classes.toml").read_text())


def shrink(config: Any) -> None:
    """Write small sizes in a configuration and those inside it."""
    values = dict(vars(config))
    for name, value in values.items():
        if hasattr(value, "model_type"):
            shrink(value)
        small = SIZES.get(name) or LAYERS.get(name)
        if small and isinstance(value, int) and not isinstance(value, bool) and value > small:
            write(config, name, small)
    heads = values.get("num_attention_heads")
    if isinstance(heads, int) and heads == values.get("num_key_value_heads"):
        write(config, "num_key_value_heads", vars(config)["num_attention_heads"])
    held = vars(config)
    layers = next((held[each] for each in LAYERS if isinstance(held.get(each), int)), 2)
    before = next((values[each] for each in LAYERS if isinstance(values.get(each), int)), 0)
    for name, kinds in values.items():
        if isinstance(kinds, list) and (name in KINDS or len(kinds) == before > layers):
            is_kinds = all(isinstance(kind, str) for kind in kinds)
            write(config, name, each_kind(kinds, layers) if is_kinds else kinds[:layers])
    words = held.get("vocab_size")
    words = words if isinstance(words, int) else SIZES["vocab_size"]
    for number, (name, value) in enumerate(values.items()):
        is_token = name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        if is_token and value >= words:
            write(config, name, words - 1 - number % 200)


def write(config: Any, name: str, value: object) -> None:
    """Set what a configuration lets be set."""
    try:
        setattr(config, name, value)
    except AttributeError:  # it is derived from others
        return


def each_kind(kinds: list[str], layers: int) -> list[str]:
    """Return so many layers, of every kind one where there is room."""
    first = list(dict.fromkeys(kinds))[:layers]
    if not first:
        return []
    return [*first, *([first[-1]] * (layers - len(first)))]


def merge(config: Any, own: Mapping[str, Any]) -> None:
    """Write settings over a configuration; tables go into those inside it."""
    for name, value in own.items():
        inner = getattr(config, name, None)
        if isinstance(value, dict) and hasattr(inner, "model_type"):
            merge(inner, value)
        else:
            write(config, name, value)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def build(name: str, folder: Path, own: Mapping[str, Any]) -> None:
    """Make the checkpoint of a class, with values of its own in every tensor."""
    import torch
    import transformers

    family = next((each for each in FAMILIES if each.model == name and each.name in JUDGED), None)
    if family is not None:
        source(family, folder)
        return
    made_by = getattr(transformers, name)
    kind = made_by.config_class
    given = own.get("given", {})
    config = kind(**given)
    shrink(config)
    merge(config, own.get("config", {}))
    with suppress(Exception):  # what it derives of sizes, where it can be read again
        config = kind.from_dict(config.to_dict())
    config.architectures = [name]
    with torch.device("meta"):
        count = sum(each.numel() for each in made_by(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters after shrinking")
    torch.manual_seed(0)
    model = made_by(config).to(torch.bfloat16)
    for tensor_name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            random = torch.Generator().manual_seed(zlib.crc32(tensor_name.encode()))
            noise = torch.randn(tensor.shape, generator=random)
            if tensor.dim() < 2:
                tensor.add_(0.1 * noise)
            else:
                tensor.copy_(0.08 * noise)
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    rename(part, own.get("renames", ()))
    file = part / "config.json"
    published = json.loads(file.read_text())
    published["architectures"] = [name]
    drop_layers(published)
    over(published, own.get("published", {}))
    file.write_text(json.dumps(published, indent=1))
    part.rename(folder)


def rename(folder: Path, renames: Sequence[Sequence[str]]) -> None:
    """Give tensors the names of published files, where transformers saves others."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    inner = config.get("vision_config") or {}
    is_clip = CLIPS.match(str(inner.get("model_type")))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        named = {}
        for name, tensor in tensors.items():
            published = name
            for pattern, word in (*(VISION if is_clip else ()), *renames):
                published = re.sub(pattern, word, published)
            named[published] = tensor
        if named.keys() != tensors.keys():
            save_file(named, file, metadata={"format": "pt"})


def drop_layers(table: dict[str, Any]) -> None:
    """Leave out what a configuration says of layers that are not there any more."""
    layers = table.get("num_hidden_layers", 0)
    if "per_layer_config" in table:
        own = table["per_layer_config"] or {}
        table["per_layer_config"] = {key: own[key] for key in own if int(key) < layers}
    for inner in table.values():
        if isinstance(inner, dict):
            drop_layers(inner)


def over(table: dict[str, Any], own: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if isinstance(value, dict) and isinstance(table.get(name), dict):
            over(table[name], value)
        else:
            table[name] = value


def convert(name: str, root: Path, dialect: str) -> str:
    """Make an artifact and dequantize it; return the reason where there is none."""
    import fp4convert

    artifact, restored = root / f"{name}--{dialect}", root / "bf16" / f"{name}--{dialect}"
    if not (restored / "config.json").exists():
        for folder in (artifact, restored):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            fp4convert.quantize(root / name, output=artifact, dialect=dialect, **OPTIONS[dialect])
            fp4convert.dequantize(artifact, restored)
        except fp4convert.Fp4Error as error:
            return f"{error.code}: {str(error)[:300]}"
        Path(f"{artifact}.json").write_text(json.dumps(record_of(name, artifact)))
    return ""


def record_of(name: str, artifact: Path) -> dict[str, str]:
    """Say what an artifact is, in the words of configs/engines/loaded."""
    from fp4convert.checkpoint.artifact import open_artifact
    from fp4convert.quality.engine_check import artifact_contents

    contents = artifact_contents(open_artifact(str(artifact)), ())
    said = {"class": name, "dialect": contents.dialect, "formats": contents.formats}
    said |= {"inner": contents.inner} if contents.inner else {}
    return {**said, "digest": digest_of(artifact)}


def digest_of(artifact: Path) -> str:
    """Return the digest of an artifact's files."""
    record = json.loads((artifact / "quantization_config.json").read_text())
    words = "\n".join(f"{name} {value}" for name, value in sorted(record["files"].items()))
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def main(root: Path, wanted: list[str]) -> None:
    """Make everything that is not there; guard each class."""
    (root / "bf16").mkdir(parents=True, exist_ok=True)
    settings, said = own_settings(), root / "classes.json"
    reasons = json.loads(said.read_text()) if said.exists() else {}
    for name in wanted or class_names():
        own = settings.get(name, {})
        reason: dict[str, str] = {}
        try:
            with within(MOST_SECONDS):
                if "skip" in own:
                    raise ValueError(own["skip"])
                if not (root / name).exists():
                    build(name, root / name, own)
                for dialect in DIALECTS:
                    if failed := convert(name, root, dialect):
                        reason[dialect] = failed
        except Exception as error:  # of any kind: configurations that make no model
            reason[""] = f"{type(error).__name__}: {error}"[:300]
        reasons[name] = reason
        print(name, reason or "made", flush=True)
        said.write_text(json.dumps(reasons, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
