"""fp4convert: turn a checkpoint into NVFP4 or MXFP4 safetensors that inference engines load.

The names below are the public API; each is imported when it is first used, so that `import fp4convert` costs nothing.
"""

from __future__ import annotations

from importlib import import_module

_HOME = {
    "Access": "sources",
    "open_source": "sources",
    "Request": "convert",
    "Settings": "workers",
    "prepare_quantize": "convert",
    "describe_plan": "forecast",
    "quantize": "convert",
    "open_artifact": "artifact",
    "open_quantized": "artifact",
    "inspect": "inspection",
    "prepare_dequantize": "convert",
    "dequantize": "convert",
    "TranscodeRequest": "convert",
    "prepare_transcode": "convert",
    "transcode": "convert",
    "prepare_prune": "pruning",
    "prune": "pruning",
    "open_calibration": "calibration_file",
    "Study": "analysis",
    "analyze": "analysis",
    "Goal": "fitting",
    "Manner": "fitting",
    "fit": "fitting",
    "Gate": "verification",
    "verify": "verification",
}
__all__ = [  # noqa: PLE0604 - they are strings
    "__version__",
    *_HOME,
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("fp4convert")
    if name in _HOME:
        return getattr(import_module(f"fp4convert.{_HOME[name]}"), name)
    raise AttributeError(f"module 'fp4convert' has no attribute {name!r}")
