"""Let SGLang be imported where its CUDA packages are not: each is a module of empty classes.

Import this before sglang. What is installed is taken as it is; a stub computes nothing, so that a
loader which needs one fails or leaves memory as it was, which the judge sees.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

PACKAGES = (
    *("IPython", "av", "blobfile", "cuda", "cutlass", "datasets", "decord", "decord2"),
    *("deep_gemm", "easydict", "flash_attn", "flashinfer", "gguf", "humming", "interegular"),
    *("kernels", "llguidance", "modelscope", "nvtx", "openai_harmony", "outlines"),
    *("partial_json_parser", "py_spy", "quack", "sgl_deep_gemm", "sgl_kernel"),
    *("smg_grpc_servicer", "soundfile", "tilelang", "timm", "torch_memory_saver", "torchao"),
    *("torchaudio", "torchcodec", "xgrammar"),
)


class Anything(type):
    """Make a class whose every attribute, call and item is the class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *given: Any, **named: Any) -> Any:
        # As a decorator it leaves what it decorates.
        return given[0] if len(given) == 1 and callable(given[0]) and not named else cls

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Nothing(metaclass=Anything):
    """Stand for whatever is imported from a stub."""


class Stub(types.ModuleType):
    """Stand for a package; every name can be imported from it."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find a stub for a package of the list that nothing else finds."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_listed = name.partition(".")[0] in PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_listed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """Have transformers look round first: it must not take a stub for what it knows."""
    import transformers.utils.import_utils as known
    from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

    del AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
    for name in dir(known):
        if name.startswith("is_") and name.endswith("_available"):
            try:
                getattr(known, name)()
            except TypeError:  # it wants to be told a version
                continue
    sys.meta_path.append(Finder())
