"""What mlx-lm leaves on a disk: a model that it quantized and saved by itself."""

from __future__ import annotations

from pathlib import Path

GROUP_SIZES = {"mxfp4": 32, "nvfp4": 16}


def export_mlx(source: Path, fmt: str, folder: Path, left: str = "-") -> Path:
    """The folder, now with MLX's artifact of all modules but those with `left` in their names."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(source)
    quantized, record = quantize_model(
        model,
        config,
        GROUP_SIZES[fmt],
        4,
        mode=fmt,
        quant_predicate=lambda name, module: left not in name,
    )
    save_model(folder, quantized)
    save_config(record, folder / "config.json")
    return folder
