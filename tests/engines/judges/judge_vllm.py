"""Judge artifacts by vLLM's own code, on a CPU.

    .venv-engines/bin/python tests/engines/judges/judge_vllm.py RESULTS.json ARTIFACT...

vLLM reads the configuration, builds the model and loads it; before that all its memory is filled
with 0xA5.
"""

from __future__ import annotations

import os

os.environ |= {
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
}

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm
import vllm_kernels
from by_values import Loaded
from parameters import Artifact, Judged, compare, marked_memory, poison, rotated
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype

from results import judge_all

ARGUMENTS: dict[str, Any] = {
    **{"dtype": "bfloat16", "max_model_len": 64, "enforce_eager": True},
    **{"skip_tokenizer_init": True, "use_tqdm_on_load": False},
}
POOLING = "Model", "Classification", "RewardModel", "ForRetrieval", "ForMaskedLM"
PREFIXES = "--mamba-block-size can only be set with --enable-prefix-caching"
# What published checkpoints call a tensor, and what vLLM's classes call it, by model_type.
TOWERS = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.(visual|vision_tower|embed_vision|multi_modal_projector)\.", r"\1."),
    (r"^lm_head\.", "language_model.lm_head."),
)
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(("gemma3", "gemma4", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"), TOWERS),
    "bert": (
        (r"^(embeddings|encoder|pooler)\.", r"model.\1."),
        (r"\.self\.(q|k|v)\w+\.", r".self.\1_proj."),
    ),
    "granitemoehybrid": (
        (r"\.router\.layer\.", ".gate."),
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.A_log$", ".A"),
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        (
            (r"\.conv\.", ".short_conv."),
            (r"\.expert_bias$", ".gate.e_score_correction_bias"),
        ),
    ),
    "gpt_oss": (
        (r"^model\.embed_tokens\.", "model.embedding."),
        (r"\.self_attn\.", ".attn."),
    ),
    "nemotron_h": (
        (r"^backbone\.embeddings\.", "model.embed_tokens."),
        (r"^backbone\.", "model."),
        (r"\.A_log$", ".A"),
    ),
}

# It looks at classes in another process because of CUDA, which is not here.
registry._run_in_subprocess = lambda look: look()
STARTS_APART = True  # whether its groups of processes have threads that a fork ends


def configure(folder: Path) -> VllmConfig:
    """Let vLLM read the artifact's configuration, as a class that answers no text is served."""
    (name, *_) = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    runner: Any = "pooling" if name.endswith(POOLING) else "auto"
    arguments = {**ARGUMENTS, "runner": runner}
    try:
        return EngineArgs(model=str(folder), **arguments).create_engine_config()
    except ValueError as error:
        if PREFIXES not in str(error):
            raise
    return EngineArgs(
        model=str(folder), **arguments, enable_prefix_caching=True
    ).create_engine_config()


def load(folder: Path) -> Loaded:
    """Build the model of a folder and load it, its memory filled before."""
    return _load(configure(folder))


def _load(config: VllmConfig) -> Loaded:
    with set_current_vllm_config(config):
        destroy_model_parallel()
        initialize_model_parallel(1, 1)
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype), marked_memory():
            model = initialize_model(vllm_config=config, model_config=config.model_config)
        before = poison(model)
        loader.load_weights(model, config.model_config)
    return Loaded(model, before)


def judge(folder: Path, expected: Path) -> tuple[Judged, str]:
    """Load an artifact; return what was found, and what became of the work after loading."""
    config = configure(folder)
    model, before = _load(config)
    renamed = RENAMED.get(config.model_config.hf_config.model_type, ())
    artifact = Artifact(expected, renamed)
    artifact.rotated = rotated(config.model_config.hf_config)
    judged = compare(model, artifact, before)
    with set_current_vllm_config(config):
        try:
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        except Exception as error:  # what a CPU lacks is said in the row
            return judged, f"{type(error).__name__}: {error}"
    return judged, "ran"


def version() -> str:
    return str(vllm.__version__.removesuffix("+cpu"))


def start(folder: Path, scratch: str) -> None:
    """Make the process group, which has a file in a folder, and choose kernels."""
    with set_current_vllm_config(configure(folder)):
        init_distributed_environment(1, 0, f"file://{scratch}/group", 0, "gloo")
        initialize_model_parallel(1, 1)
    vllm_kernels.install()


def main(arguments: list[str]) -> None:
    """Judge the folders and write a row for each."""
    folders = [Path(word) for word in arguments[1:]]
    with tempfile.TemporaryDirectory() as scratch:
        start(folders[0], scratch)
        judge_all("vLLM", version(), judge, folders, Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
