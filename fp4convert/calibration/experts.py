"""Compute one expert of a stack, as transformers' models define it.

Most families share one definition, which transformers lets others take the place of.  Llama 4,
DBRX and LongCat have their own, whose modules are taken over one by one.
"""

from __future__ import annotations

from typing import Any

import torch

# Of a stack of experts: what is given the token itself.
FIRST_PARAMETERS = ("gate_up_proj", "up_proj", "w1", "v1")
OWN_KINDS = ("DbrxExperts", "Llama4TextExperts", "LongcatFlashExperts")


def is_known(owner: Any) -> bool:
    """Tell whether the experts of a stack can be computed one by one."""
    is_shared = hasattr(owner, "has_gate") and hasattr(owner, "is_transposed")
    own = (*OWN_KINDS, "DbrxExpertGLU")
    return is_shared or type(owner).__name__ in own


def is_own_kind(module: Any) -> bool:
    """Tell whether a module is of experts that are to be taken over."""
    return type(module).__name__ in OWN_KINDS


def is_dbrx(module: Any) -> bool:
    """Tell whether a module is of DBRX; its `mlp` holds the matrices."""
    return type(module).__name__ == "DbrxExperts"


def is_llama4(module: Any) -> bool:
    """Tell whether a module is of Llama 4, which gives experts all tokens.

    Those of an expert are multiplied by the router's scores before it, all others by 0.
    """
    return type(module).__name__ == "Llama4TextExperts"


def is_longcat(module: Any) -> bool:
    """Tell whether a module is of LongCat, whose last experts do nothing."""
    return type(module).__name__ == "LongcatFlashExperts"


def count_of(module: Any) -> int:
    """Count the experts that compute."""
    return int(module.num_routed_experts if is_longcat(module) else module.num_experts)


def owner_of(module: Any) -> Any:
    """Return the module that holds the matrices."""
    return module.mlp if is_dbrx(module) else module


def between(module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Compute what an expert's last matrix is given.

    x  (tokens, hidden)
    """
    found: torch.Tensor
    if is_dbrx(module):
        gate, up = x @ _dbrx(module, "w1", expert, x).T, x @ _dbrx(module, "v1", expert, x).T
        found = module.mlp.activation_fn(gate) * up
    elif is_llama4(module):
        gate, up = (x @ module.gate_up_proj[expert].to(x.dtype)).chunk(2, -1)
        found = up * module.act_fn(gate)
    elif is_longcat(module):
        gate, up = (x @ module.gate_up_proj[expert].to(x.dtype).T).chunk(2, -1)
        found = module.act_fn(gate) * up
    elif module.has_gate:
        found = module._apply_gate(_multiply(module, "gate_up_proj", expert, x))
    else:
        found = module.act_fn(_multiply(module, "up_proj", expert, x))
    return found


def output(module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Compute what an expert gives, from what its last matrix is given."""
    if is_dbrx(module):
        return x @ _dbrx(module, "w2", expert, x)
    if is_llama4(module):
        down: torch.Tensor = module.down_proj[expert]
        return x @ down.to(x.dtype)
    if is_longcat(module):
        last: torch.Tensor = module.down_proj[expert]
        return x @ last.to(x.dtype).T
    made = _multiply(module, "down_proj", expert, x)
    if module.has_post_expert_norm:
        made = module.post_expert_norm(made)
    return made


def _dbrx(module: Any, parameter: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    stack = getattr(module.mlp, parameter).unflatten(0, (module.num_experts, -1))
    matrix: torch.Tensor = stack[expert].to(x.dtype)
    return matrix


def _multiply(module: Any, parameter: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    """Multiply with one matrix of a stack, and add its bias."""
    weight: torch.Tensor = getattr(module, parameter)[expert].to(x.dtype)
    made = x @ weight if module.is_transposed else x @ weight.T
    if module.has_bias:
        made = made + getattr(module, f"{parameter}_bias")[expert].to(x.dtype)
    return made
