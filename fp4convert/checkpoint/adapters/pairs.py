"""Make pairs of low-rank factors, and find their scalings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp4convert.checkpoint.dialects.stacks import MATRIX_DIMENSIONS
from fp4convert.errors import InputError
from fp4convert.numerics.codec import Float32s
from fp4convert.recipes.patterns import matches

DEFAULT = 8  # rank and alpha
ALONE = "Merge it with PEFT (merge_and_unload, save_pretrained) and quantize the result."


class LoraPair(NamedTuple):
    """Low-rank factors of one module; the change is scaling * B A.

    is_embedding      the change is transposed, and rounded first
    is_rounded_first  the change takes the dtype of the weight before it is added
    experts           of a parameter with a matrix for each: A has rows of one expert after the
                      other, columns of B take turns
    """

    a: Float32s
    b: Float32s
    scaling: float = 1.0
    is_embedding: bool = False
    is_rounded_first: bool = False
    experts: int = 1


def make_pair(
    name: str, module: str, sides: Mapping[str, Float32s], rank: int, is_of_experts: bool = False
) -> LoraPair:
    """Make a pair of its two sides; InputError where they do not fit.

    is_of_experts  the factors may be those of several matrices
    """
    is_embedding = sides.keys() == {"embedding_A", "embedding_B"}
    shapes = ", ".join(f"{side} {list(values.shape)}" for side, values in sorted(sides.items()))
    if sides.keys() != {"A", "B"} and not is_embedding:
        detail = f"{name}: {module} has {shapes}; expected two factors, lora_A and lora_B"
        raise InputError("adapter-tensors", detail, tensor=module)
    a, b = (values for _, values in sorted(sides.items()))
    if a.ndim != MATRIX_DIMENSIONS and a.ndim == b.ndim:
        detail = f"{name}: {module} has {shapes}, factors of a convolution; expected matrices"
        raise InputError("adapter-kind", detail, ALONE, module)
    is_flat = (a.ndim, b.ndim) == (MATRIX_DIMENSIONS,) * 2
    count = len(a) // rank if is_flat and is_of_experts else 1
    if not is_flat or not len(a) == b.shape[1] == rank * count:
        detail = f"{name}: {module} has {shapes}; expected A [{rank}, columns], B [rows, {rank}]"
        detail += f", for its rank is {rank}"
        raise InputError("adapter-tensors", detail, tensor=module)
    return LoraPair(a, b, is_embedding=is_embedding, experts=count)


class Scalings(NamedTuple):
    """Finds ranks and scalings by adapter_config.json, as PEFT does.

    Of patterns, the first that fits the end of a module's name counts.
    """

    settings: Mapping[str, Any]
    scale: float
    where: str

    def rank_of(self, module: str) -> int:
        rank = self._find("rank_pattern", "r", module)
        if type(rank) is not int or rank < 1:
            detail = f"{self.where}: the rank of {module} is {rank!r}; expected a whole number"
            raise InputError("adapter-tensors", detail, tensor=module)
        return rank

    def of(self, module: str) -> float:
        """Return the scaling of a module, times that of the command line."""
        alpha = self._find("alpha_pattern", "lora_alpha", module)
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            detail = f"{self.where}: lora_alpha of {module} is {alpha!r}; expected a number"
            raise InputError("adapter-tensors", detail, tensor=module)
        rank = self.rank_of(module)
        own = alpha / math.sqrt(rank) if self.settings.get("use_rslora") else alpha / rank
        return float(own * self.scale)

    def _find(self, patterns: str, default: str, module: str) -> Any:
        declared = self.settings.get(patterns) or {}
        if not isinstance(declared, dict):
            detail = f"{self.where}: {patterns} is {str(declared)[:100]!r}"
            expected = "expected numbers by patterns of modules"
            raise InputError("adapter-tensors", f"{detail}; {expected}")
        for pattern, value in declared.items():
            if matches(rf"re:(.*\.)?({pattern})$", module):
                return value
        return self.settings.get(default, DEFAULT)
