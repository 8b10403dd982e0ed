"""Judge artifacts by SGLang's own code, on a CPU.

    PYTHONPATH=.venv-engines/sglang-0.5.23 .venv-engines/bin/python \\
        tests/engines/judges/judge_sglang.py RESULTS.json ARTIFACT...

SGLang reads the configuration, builds the model as on a GPU of capability 10.0 and loads it; before
that all its memory is filled with 0xA5. Nothing is computed.
"""

from __future__ import annotations

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang_stubs

sglang_stubs.install()

import sglang
import sglang.srt.models.registry  # imports all classes, before kernels are chosen
import torch
from by_values import Loaded
from parameters import Artifact, Judged, compare, marked_memory, poison, rotated
from sglang.srt import distributed, runtime_context, server_args
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers import quantization
from sglang.srt.model_loader.loader import (
    DefaultModelLoader,
    _get_quantization_config,
    _initialize_model,
)
from sglang.srt.model_loader.utils import get_model_architecture

from results import judge_all

ONE = (
    *("tp", "pp", "moe_ep", "moe_tp", "moe_dp", "attn_tp", "attn_dp", "attn_cp", "attn_dcp", "dp"),
    "shared_experts_tp",
)
BLACKWELL = "is_sm100_supported", "is_blackwell_supported"  # functions that ask for the GPU
# What published checkpoints call a tensor, and what SGLang's classes call it, by model_type.
TOWER = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.visual\.", "visual."),
    (r"^(visual.*)\.qkv\.", r"\1.qkv_proj."),
)
HYBRID = ((r"\.self_attn\.", "."),)
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen3_vl_moe": TOWER,
    "llama4": ((r"^(vision_model.*)\.o_proj\.", r"\1.proj."),),
    "qwen3_5": (*TOWER, *HYBRID),
    "qwen3_5_moe": (*TOWER, *HYBRID),
    "gemma4": (
        (r"^model\.", ""),
        (r"^(vision_tower.*)\.([qkv]_proj)\.linear\.", r"\1.qkv.\2."),
        (r"^(vision_tower.*)\.((gate|up)_proj)\.linear\.", r"\1.gate_up.\2."),
        (r"\.router\.per_expert_scale", ".moe.per_expert_scale"),
        (r"\.experts\.", ".moe.experts."),
    ),
    "qwen3_next": HYBRID,
    "granitemoehybrid": (
        (r"\.router\.layer\.", ".gate."),
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.A_log$", ".A"),
    ),
    "lfm2": ((r"\.conv\.conv\.", ".conv.conv_"),),
    "lfm2_moe": (
        (r"\.conv\.conv\.", ".conv.conv_"),
        (r"\.feed_forward\.w1\.", ".feed_forward.gate_proj."),
        (r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
        (r"\.feed_forward\.w3\.", ".feed_forward.up_proj."),
    ),
    "nemotron_h": (
        (r"^backbone\.embeddings\.", "model.embed_tokens."),
        (r"^backbone\.", "model."),
        (r"\.A_log$", ".A"),
    ),
    "gemma3": ((r"^(vision_tower.*)\.out_proj\.", r"\1.proj."),),
}

STARTS_APART = False  # whether its groups of processes have threads that a fork ends


def start(folder: Path, scratch: str) -> None:
    """Start SGLang as one process on one device, which it takes for a Blackwell GPU.

    Only what chooses kernels asks for it.
    """
    chosen = {name: lambda *_, **__: True for name in BLACKWELL}
    chosen["get_device_capability"] = lambda *_: (10, 0)
    torch.cuda.get_device_capability = chosen["get_device_capability"]
    for module in [each for name, each in sys.modules.items() if name.startswith("sglang.")]:
        for function in chosen.keys() & vars(module).keys():
            setattr(module, function, chosen[function])
    # What it offers where it finds CUDA alone.
    quantization.QUANTIZATION_METHODS["mxfp4"] = quantization.Mxfp4Config
    arguments = server_args.ServerArgs(
        model_path=str(folder),
        device="cpu",
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_multimodal=True,
    )
    server_args.set_global_server_args_for_scheduler(arguments)
    distributed.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{scratch}/group",
        backend="gloo",
    )
    parallel: Any = runtime_context.get_parallel()
    fields = {f"{name}_rank": 0 for name in ONE} | {f"{name}_size": 1 for name in ONE}
    known = runtime_context._parallel_fields()
    for name in fields.keys() & known:
        parallel.override_permanently(**{name: fields[name]})
    distributed.initialize_model_parallel(backend="gloo")


def load(folder: Path) -> Loaded:
    """Build the model of a folder and load it, its memory filled before."""
    config, loading = ModelConfig(str(folder), dtype="bfloat16"), LoadConfig()
    with own_mapping(config):
        return _load(config, loading)


def judge(folder: Path, expected: Path) -> tuple[Judged, str]:
    """Load an artifact and return what was found."""
    config, loading = ModelConfig(str(folder), dtype="bfloat16"), LoadConfig()
    with own_mapping(config):
        model, before = _load(config, loading)
    artifact = Artifact(expected, RENAMED.get(config.hf_config.model_type, ()))
    artifact.rotated = rotated(config.hf_config)
    methods = [getattr(module, "scheme", module.quant_method) for module in _experts(model)]
    artifact.is_up_first = any(getattr(one, "load_up_proj_weight_first", False) for one in methods)
    return compare(model, artifact, before), "not run"


@contextmanager
def own_mapping(config: ModelConfig) -> Iterator[None]:
    """Undo what the loading of one artifact leaves in the class for the next.

    SGLang adds to the class's packed_modules_mapping, which in a server is of one artifact.
    """
    model_class, _ = get_model_architecture(config)
    mapping = getattr(model_class, "packed_modules_mapping", {})
    before = dict(mapping)
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(before)


def _load(config: ModelConfig, loading: LoadConfig) -> Loaded:
    quantization = _get_quantization_config(config, loading)
    before_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with marked_memory():
            model = _initialize_model(config, loading, quantization)
    finally:
        torch.set_default_dtype(before_dtype)
    before = poison(model)
    loader: Any = DefaultModelLoader(loading)
    weights = loader._get_all_weights(config, model)
    loader.load_weights_only(model, weights, torch.device("cpu"))
    return Loaded(model, before)


def version() -> str:
    return str(sglang.__version__)


def _experts(model: torch.nn.Module) -> list[Any]:
    """List the modules that hold experts; some kernels want their up before their gate."""
    names = "w13_weight", "w13_weight_packed"
    return [each for each in model.modules() if any(hasattr(each, name) for name in names)]


def main(arguments: list[str]) -> None:
    """Judge the folders and write a row for each."""
    folders = [Path(word) for word in arguments[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        start(folders[0], scratch)
        judge_all("SGLang", version(), judge, folders, Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
