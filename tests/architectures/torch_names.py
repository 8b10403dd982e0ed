"""Parameters of a model of torch: names in parts, and the kind of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from layouts import Parameter
from torch import nn

Path = tuple[tuple[str, ...], tuple[bool, ...]]
NUMBERED = re.compile(r"(\D*_)?\d+")  # a key of a ModuleDict
DOWN = re.compile(r"down|w2|fc2|c_proj|output|proj_out|\bwo\b|dense_4h_to_h")
GATE = re.compile(r"gate$|router|switch|classifier|\bwg\b|score")
ROUTER = re.compile(r"Router|TopK|MoEGate$|MoeGate$")
NORM = re.compile(r"Norm(?!al)|Norm$|LayerNorm|RMSNorm")


@dataclass(slots=True)
class Roles:
    """What the class and its config say of parameters."""

    heads: frozenset[str] = frozenset()  # names of output heads
    outside: str | None = None  # prefix of the base model: linears behind none of it are heads
    experts: frozenset[int] = frozenset()  # numbers of experts
    orientation: Callable[[str, tuple[int, ...]], str | None] = lambda name, shape: None


def parameters_of(model: nn.Module, roles: Roles) -> list[Parameter]:
    """Return every tensor of the state dict."""
    return list(named_parameters(model, roles).values())


def named_parameters(model: nn.Module, roles: Roles | None = None) -> dict[str, Parameter]:
    """Return every tensor of the state dict by its name."""
    roles = roles or Roles()
    modules = dict(_walk(model, "", ((), ())))
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    parameters = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        owner, _, leaf = name.rpartition(".")
        _, (parts, is_number) = modules[owner]
        kind = "u" if name in buffers else _kind(modules, name, tensor, roles)
        parameters[name] = Parameter((*parts, leaf), (*is_number, False), f"{kind}{tensor.dim()}")
    return parameters


def _walk(module: nn.Module, name: str, path: Path) -> Iterator[tuple[str, tuple[nn.Module, Path]]]:
    yield name, (module, path)
    for key, child in module._modules.items():
        if child is not None:
            longer = f"{name}.{key}" if name else key
            yield from _walk(child, longer, ((*path[0], key), (*path[1], _is_number(module, key))))


def _is_number(module: nn.Module, key: str) -> bool:
    """Return whether the key numbers children of one kind."""
    if isinstance(module, nn.ModuleList):
        return key.isdecimal()
    if isinstance(module, nn.ModuleDict):
        return bool(NUMBERED.fullmatch(key))
    if isinstance(module, nn.Sequential):
        children = list(module)
        alike = len(children) > 1 and len({type(each) for each in children}) == 1
        return alike and any(each._modules for each in children)
    return False


def _kind(modules: Any, name: str, tensor: torch.Tensor, roles: Roles) -> str:
    owner, _, leaf = name.rpartition(".")
    owner = owner.removesuffix(".parametrizations.weight")
    module, rank = modules[owner][0], tensor.dim()
    made_by = type(module).__name__
    if leaf.endswith("bias"):
        return "b"
    if name in roles.heads:
        return "H"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "E"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "C" if rank > 2 else "V"
    if made_by == "Conv1D" and rank == 2:
        return "T"
    if NORM.search(made_by) and rank <= 2 and not isinstance(module, nn.Linear):
        return "N"
    is_linear = isinstance(module, nn.Linear)
    if rank == 2 and _scores_experts(module, owner, leaf, tensor, roles):
        return "R"
    if is_linear:
        is_head = roles.outside is not None and not name.startswith(roles.outside)
        return "H" if is_head else "L"
    if rank == 3 and (tensor.shape[0] in roles.experts or "Experts" in made_by):
        side = roles.orientation(name, tuple(tensor.shape))
        if side is None and hasattr(module, "is_transposed"):
            side = "Y" if module.is_transposed else "X"
        return side or "O"
    return "V" if rank <= 1 else "O"


def _scores_experts(
    module: nn.Module, owner: str, leaf: str, tensor: torch.Tensor, roles: Roles
) -> bool:
    """Return whether a matrix is a router, by its class, or by its name and its rows."""
    if not isinstance(module, nn.Linear) and leaf != "weight":
        return False
    if ROUTER.search(type(module).__name__) and not isinstance(module, nn.Linear):
        return True
    named = GATE.search(".".join(owner.split(".")[-2:]))
    return bool(named) and tensor.shape[0] in roles.experts


def side_of(name: str, shape: tuple[int, ...], hidden: frozenset[int]) -> str | None:
    """Return X for (experts, out, in), Y for (experts, in, out), None where sizes do not tell."""
    rows, columns = (each in hidden for each in shape[1:])
    if rows == columns:
        return None
    is_down = bool(DOWN.search(name.rsplit(".", 2)[-2] if name.endswith("weight") else name))
    return "X" if rows == is_down else "Y"
