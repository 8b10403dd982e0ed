"""Records of quantized artifacts, typed by hand after each dialect's source; and folders that
declare them.
"""

from __future__ import annotations

from fp4convert.checkpoint.dialects.base import Clues
from fp4convert.storage.safetensors import TensorRef

CT, MO = "compressed-tensors", "modelopt"
CT_NVFP4_RECORD = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "tensor_group",
                "group_size": 16,
                "dynamic": False,
                "scale_dtype": "torch.float8_e4m3fn",
            },
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "model.embed_tokens"],
}
CT_MXFP4_RECORD = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
            },
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "model.embed_tokens"],
}
MO_RECORD = {
    "quant_method": "modelopt",
    "quant_algo": "W4A16_NVFP4",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        }
    },
    "ignore": ["lm_head", "model.embed_tokens"],
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
MO_FILE = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.embed_tokens"],
    },
}

# four-bit activations: compressed-tensors 0.20, quantization/quant_scheme.py (NVFP4, MXFP4);
# ModelOpt 0.47, torch/export
CT_NVFP4_INPUTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": "local",
    "scale_dtype": "torch.float8_e4m3fn",
    "observer": "static_minmax",
}
CT_MXFP4_INPUTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": True,
    "scale_dtype": "torch.uint8",
}
MO_NUMBERS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MO_W4A4_RECORD = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": MO_NUMBERS, "input_activations": MO_NUMBERS}
    },
    "ignore": ["lm_head", "model.embed_tokens"],
    "producer": {"name": "modelopt", "version": "0.47.0"},
}
MO_W4A4_FILE = {**MO_FILE, "quantization": {**MO_FILE["quantization"], "quant_algo": "NVFP4"}}


def with_inputs(record: dict, *inputs: object) -> dict:
    """The record with one group of modules for each of these input_activations."""
    weights = {"targets": ["Linear"], "weights": record["config_groups"]["group_0"]["weights"]}
    groups = {
        f"group_{number}": {**weights, "input_activations": numbers}
        for number, numbers in enumerate(inputs)
    }
    return {**record, "config_groups": groups}


def with_weights(record: dict, **changes: object) -> dict:
    """The record with other numbers for its weights."""
    group = record["config_groups"]["group_0"]
    return {
        **record,
        "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}},
    }


def with_formats(record: dict, *formats: str) -> dict:
    """A record of several formats, a group of modules for each."""
    groups = {
        f"g{number}": {"format": fmt, "targets": ["Linear"]} for number, fmt in enumerate(formats)
    }
    return {**record, "format": "mixed-precision", "config_groups": groups}


CT_CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}
QUARK_MXFP4_BLOCKS = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "ch_axis": -1,
    "is_dynamic": False,
    "is_scale_quant": False,
    "observer_cls": "PerBlockMXObserver",
    "round_method": "half_even",
    "scale_calculation_mode": "even",
    "scale_format": "e8m0",
    "scale_type": "float",
    "symmetric": None,
    "mx_element_dtype": None,
}
QUARK_NVFP4_BLOCKS = {
    **QUARK_MXFP4_BLOCKS,
    "group_size": 16,
    "scale_calculation_mode": None,
    "scale_format": "float32",
    "scale_type": "float32",
}
QUARK_NVFP4_SCALES = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_tensor",
    "group_size": None,
    "ch_axis": None,
    "is_dynamic": False,
    "is_scale_quant": True,
    "observer_cls": "PerTensorMinMaxObserver",
    "round_method": "half_even",
    "scale_calculation_mode": None,
    "scale_format": None,
    "scale_type": "float32",
    "symmetric": True,
    "mx_element_dtype": None,
}


def quark_record(weight: object, inputs: object) -> dict:
    """Of amd/*-MXFP4, whose keys these are; for NVFP4 after amd-quark 0.13."""
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "algo_config": None,
        "exclude": ["lm_head", "model.embed_tokens"],
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": {
            "weight": weight,
            "input_tensors": inputs,
            "output_tensors": None,
            "bias": None,
        },
        "kv_cache_quant_config": {},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "softmax_quant_spec": None,
        "version": "0.13",
    }


MX_DYNAMIC, NV_DYNAMIC = (
    {**blocks, "is_dynamic": True} for blocks in (QUARK_MXFP4_BLOCKS, QUARK_NVFP4_BLOCKS)
)
MLX_NVFP4, MLX_MXFP4 = (
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
)
GPT_OSS_RECORD = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
}
DEEPSEEK_RECORD = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [],
}


def clues(declared: object, tensors: dict[str, str] | None = None, **more: object) -> Clues:
    """A folder whose config.json declares that, with tensors of these names and dtypes; more: what
    stands beside.
    """
    refs = {name: TensorRef(name, dtype, (4,), "x", 0) for name, dtype in (tensors or {}).items()}
    hf = more.pop("hf", {})
    return Clues(
        {"quantization_config": declared, **more} if declared is not None else {**more}, hf, refs
    )
