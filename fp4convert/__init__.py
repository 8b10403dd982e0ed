"""Turn checkpoints into NVFP4 or MXFP4 weights that engines load.

The names below are the public API (docs/python.md): what the commands do, one matrix in memory, and
what both return and raise.  Each is imported when it is first used, so that `import fp4convert`
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fp4convert.version import __version__

if TYPE_CHECKING:
    from fp4convert.calibration.result import Calibrated
    from fp4convert.commands.fp8_tensors import QuantizedFp8
    from fp4convert.commands.functions import (
        analyze,
        attest,
        calibrate,
        compare,
        dequantize,
        evaluate,
        inspect,
        merge,
        preview_prune,
        preview_quantize,
        prune,
        push,
        quantize,
        reproduce,
        transcode,
        verify,
    )
    from fp4convert.commands.modules import OpenArtifact, arrange_scales, open_artifact
    from fp4convert.commands.products import multiply_tensor
    from fp4convert.commands.tensors import dequantize_tensor, quantize_tensor
    from fp4convert.errors import (
        AccessError,
        DeviceError,
        Fp4Error,
        GateError,
        InputError,
        NumericError,
        OutputError,
        SourceError,
    )
    from fp4convert.execution.settings import Result
    from fp4convert.numerics.backends.device_arrays import DeviceQuantized
    from fp4convert.numerics.matrices import Quantized
    from fp4convert.progress import Phases
    from fp4convert.quality.evaluation import Evaluated
    from fp4convert.quality.verification import Verified

_HOMES = {  # module -> its public names
    "calibration.result": ("Calibrated",),
    "commands.functions": (
        "analyze",
        "attest",
        "calibrate",
        "compare",
        "dequantize",
        "evaluate",
        "inspect",
        "merge",
        "preview_prune",
        "preview_quantize",
        "prune",
        "push",
        "quantize",
        "reproduce",
        "transcode",
        "verify",
    ),
    "commands.fp8_tensors": ("QuantizedFp8",),
    "commands.modules": ("OpenArtifact", "arrange_scales", "open_artifact"),
    "commands.products": ("multiply_tensor",),
    "commands.tensors": (
        "dequantize_tensor",
        "quantize_tensor",
    ),
    "errors": (
        "AccessError",
        "DeviceError",
        "Fp4Error",
        "GateError",
        "InputError",
        "NumericError",
        "OutputError",
        "SourceError",
    ),
    "execution.settings": ("Result",),
    "numerics.backends.device_arrays": ("DeviceQuantized",),
    "numerics.matrices": ("Quantized",),
    "progress": ("Phases",),
    "quality.evaluation": ("Evaluated",),
    "quality.verification": ("Verified",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "AccessError",
    "Calibrated",
    "DeviceError",
    "DeviceQuantized",
    "Evaluated",
    "Fp4Error",
    "GateError",
    "InputError",
    "NumericError",
    "OpenArtifact",
    "OutputError",
    "Phases",
    "Quantized",
    "QuantizedFp8",
    "Result",
    "SourceError",
    "Verified",
    "__version__",
    "analyze",
    "arrange_scales",
    "attest",
    "calibrate",
    "compare",
    "dequantize",
    "dequantize_tensor",
    "evaluate",
    "inspect",
    "merge",
    "multiply_tensor",
    "open_artifact",
    "preview_prune",
    "preview_quantize",
    "prune",
    "push",
    "quantize",
    "quantize_tensor",
    "reproduce",
    "transcode",
    "verify",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f"fp4convert.{_HOME[name]}"), name)
    raise AttributeError(f"module 'fp4convert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
