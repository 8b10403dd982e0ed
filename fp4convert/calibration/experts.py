"""Compute one expert of a stack, as transformers' models define it.

Most families share one definition.  Llama 4, DBRX and LongCat have others: a class here, and a line
in KINDS.
"""

from __future__ import annotations

from typing import Any

import torch

# Parameters of a stack that multiply with the token itself, and not with what is inside an expert.
FIRST_PARAMETERS = ("gate_up_proj", "up_proj", "w1", "v1")


class Experts:
    """A stack of experts in the definition that most families share.

    module  of the model, which is called with tokens
    owner   the module that holds the matrices
    count   of the experts that compute
    """

    def __init__(self, module: Any) -> None:
        self.module = self.owner = module
        self.count = int(getattr(module, "num_experts", 0))

    def compute_inner(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Compute the input of an expert's last matrix.

        x        (tokens, hidden)
        Returns  (tokens, width of the expert)
        """
        name = "gate_up_proj" if self.module.has_gate else "up_proj"
        made = self._multiply(name, expert, x)
        found: torch.Tensor = (
            self.module._apply_gate(made) if self.module.has_gate else self.module.act_fn(made)
        )
        return found

    def compute_output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        """Compute the output of an expert from the input of its last matrix.

        Returns  (tokens, hidden)
        """
        made = self._multiply("down_proj", expert, inner)
        if self.module.has_post_expert_norm:
            made = self.module.post_expert_norm(made)
        return made

    def pass_by(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the output for tokens without an expert; None for no output."""
        return None

    def _matrix(self, parameter: str, expert: int, like: torch.Tensor) -> torch.Tensor:
        stack: torch.Tensor = getattr(self.owner, parameter)
        return stack[expert].to(like.dtype)

    def _multiply(self, parameter: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Multiply with one matrix of a stack, and add its bias."""
        matrix = self._matrix(parameter, expert, x)
        made = x @ matrix if self.module.is_transposed else x @ matrix.T
        if self.module.has_bias:
            made = made + self._matrix(f"{parameter}_bias", expert, x)
        return made


class LlamaExperts(Experts):
    """Experts of Llama 4, whose module receives every token for every expert.

    The tokens of an expert are multiplied by the router's scores before it, all others by 0.
    """

    def compute_inner(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self._matrix("gate_up_proj", expert, x)).chunk(2, -1)
        found: torch.Tensor = up * self.module.act_fn(gate)
        return found

    def compute_output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        return inner @ self._matrix("down_proj", expert, inner)


class DbrxExperts(Experts):
    """Experts of DBRX, which lie below one another in flat matrices."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.owner = module.mlp

    def _matrix(self, parameter: str, expert: int, like: torch.Tensor) -> torch.Tensor:
        stack: torch.Tensor = getattr(self.owner, parameter).unflatten(0, (self.count, -1))
        return stack[expert].to(like.dtype)

    def compute_inner(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self._matrix(name, expert, x).T for name in ("w1", "v1"))
        found: torch.Tensor = self.owner.activation_fn(gate) * up
        return found

    def compute_output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        return inner @ self._matrix("w2", expert, inner)


class LongcatExperts(Experts):
    """Experts of LongCat, the last of which return their inputs."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.count = int(module.num_routed_experts)

    def compute_inner(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self._matrix("gate_up_proj", expert, x).T).chunk(2, -1)
        found: torch.Tensor = self.module.act_fn(gate) * up
        return found

    def compute_output(self, expert: int, inner: torch.Tensor) -> torch.Tensor:
        return inner @ self._matrix("down_proj", expert, inner).T

    def pass_by(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens


# Names of transformers' classes that have a definition of their own.
KINDS: dict[str, type[Experts]] = {
    "DbrxExperts": DbrxExperts,
    "Llama4TextExperts": LlamaExperts,
    "LongcatFlashExperts": LongcatExperts,
}


def find_experts(model: Any) -> list[Experts]:
    """Find the stacks of a model with experts that can run one by one."""
    found = []
    for module in model.modules():
        is_shared = hasattr(module, "has_gate") and hasattr(module, "is_transposed")
        kind = KINDS.get(type(module).__name__, Experts if is_shared else None)
        found += [kind(module)] if kind else []
    return found
