"""Gather statistics of inputs while text runs through a layer.

Ordinary linear layers are watched by hooks.  Experts that are one stack, and attention, are run by functions of ours under the
names by which transformers lets others take their place; they compute what the model defines, and look at what passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.model import IMPLEMENTATION, Seat, Skeleton
from fp4convert.errors import InputError

FEW_TOKENS = 16  # an expert that was given fewer has no statistics worth the name
FEW_SHARE = 1 / 8  # of what each would get if all got the same: nor has one with less
UNROUTED_TOKENS = 4096  # of the layer, that such an expert is given instead
FIRST_PARAMETERS = (
    "gate_up_proj",
    "up_proj",
)  # of a stack of experts: what is given the token itself

Arrays = dict[str, NDArray[np.generic]]


class Moments:
    """Sums over the tokens that a linear layer was given.

    gram  none, diag, block:N or full
    """

    def __init__(self, columns: int, gram: str, device: torch.device) -> None:
        self.columns = columns
        self.tokens = 0
        self.squares = (
            torch.zeros(columns, dtype=torch.float64, device=device) if gram != "none" else None
        )
        self.magnitudes = torch.zeros(columns, dtype=torch.float64, device=device)
        self.largest = torch.zeros(columns, dtype=torch.float32, device=device)
        self.width = block_width(gram, columns)
        count = -(-columns // self.width) if self.width else 0
        self.products = (
            torch.zeros((count, self.width, self.width), device=device) if count else None
        )

    def add(self, given: torch.Tensor) -> bool:
        """Take in (tokens, columns); False where a value is NaN or Inf."""
        x = given.detach().reshape(-1, self.columns).float()
        if not len(x):
            return True
        magnitudes = x.abs()
        self.tokens += len(x)
        torch.maximum(self.largest, magnitudes.amax(0), out=self.largest)
        self.magnitudes += magnitudes.sum(0)
        if self.squares is not None:
            self.squares += x.square().sum(0)
        if self.products is not None:
            padded = torch.nn.functional.pad(x, (0, len(self.products) * self.width - self.columns))
            blocks = padded.reshape(len(x), len(self.products), self.width).transpose(0, 1)
            self.products.baddbmm_(blocks.transpose(1, 2), blocks)
        return bool(torch.isfinite(self.largest).all())

    def arrays(self, module: str) -> Arrays:
        """What a calibration file says of them; the end of them, for a second copy of Gram matrices may not fit."""
        count = max(1, self.tokens)
        found = {
            "input_amax": self.largest.max(),
            "input_abs_mean": (self.magnitudes / count).float(),
            "input_channel_amax": self.largest,
            "tokens": torch.tensor(self.tokens),
        }
        if self.squares is not None:
            found["input_sq_mean"] = (self.squares / count).float()
        if self.products is not None:
            found["input_gram"] = self.products.div_(count)
        return {f"{module}.{kind}": value.cpu().numpy() for kind, value in found.items()}


def block_width(gram: str, columns: int) -> int:
    """How wide the blocks of a Gram matrix are; 0 for none."""
    if gram == "full":
        return columns
    return min(columns, int(gram.partition(":")[2])) if gram.startswith("block:") else 0


class Routed:
    """What a mixture of experts did: tokens by expert, and the sum of the router's weight times the norm of what came out."""

    def __init__(self, experts: int) -> None:
        self.tokens = np.zeros(experts, np.int64)
        self.norms = np.zeros(experts, np.float64)

    def add(self, expert: int, weights: torch.Tensor, made: torch.Tensor) -> None:
        self.tokens[expert] += len(made)
        norms = torch.linalg.vector_norm(made.float(), dim=-1, dtype=torch.float64)
        self.norms[expert] += float((weights.double().reshape(-1) * norms).sum())

    def arrays(self, moe: str) -> Arrays:
        saliency = self.norms / np.maximum(self.tokens, 1)
        return {
            f"{moe}.expert_tokens": self.tokens,
            f"{moe}.expert_saliency": saliency.astype(np.float32),
        }

    def starving(self) -> list[int]:
        """Experts that were given too few tokens."""
        fair = self.tokens.sum() / len(self.tokens)
        return [
            int(expert)
            for expert in np.flatnonzero(self.tokens < max(FEW_TOKENS, FEW_SHARE * fair))
        ]


@dataclass(slots=True)
class Watch:
    """The statistics of one part of a model: a layer, or everything outside the layers.

    moments  by the module that holds them
    inputs   module -> the one that holds its statistics, because both were given the same tensor
    sample   what is running: how errors call it
    unfed    path of a stack -> its experts that are still short of tokens, and are now fed with every one; None while tokens go
             where the router sends them
    is_looking  False where the model only runs, and nothing is kept of what it is given
    """

    skeleton: Skeleton
    gram: str
    modules: dict[str, Seat]
    moments: dict[str, Moments] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    routed: dict[str, Routed] = field(default_factory=dict)
    cached: dict[str, list[float]] = field(default_factory=dict)
    sample: int = 0
    unfed: dict[str, list[int]] | None = None
    is_looking: bool = True
    _members: dict[tuple[str, bool, int], list[str]] = field(default_factory=dict)
    _paths: dict[int, str] = field(default_factory=dict)
    _seen: dict[tuple[int, ...], tuple[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._paths |= {id(module): path for path, module in self.skeleton.model.named_modules()}
        for module, seat in self.modules.items():
            if seat.expert is not None:
                self._members.setdefault(
                    (seat.path, seat.parameter in FIRST_PARAMETERS, seat.expert), []
                ).append(module)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Meanwhile its linear layers are watched."""
        by_path: dict[str, list[str]] = {}
        for module, seat in self.modules.items():
            if seat.expert is None:
                by_path.setdefault(seat.path, []).append(module)
        handles = [
            self.skeleton.module(path).register_forward_pre_hook(
                self._hook(names), with_kwargs=True
            )
            for path, names in by_path.items()
            if not isinstance(self.skeleton.module(path), torch.nn.Embedding)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, sample: int) -> None:
        """The next sample comes."""
        self.sample = sample
        self._seen.clear()

    def _hook(self, names: list[str]) -> Callable[..., None]:
        columns = self.skeleton.linears[names[0]].shape[1]

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = next(
                (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)),
                None,
            )
            if (
                self._follows_router()
                and given is not None
                and given.is_floating_point()
                and given.shape[-1] == columns
            ):
                self._take(names, given)

        return look

    def _follows_router(self) -> bool:
        """True while everything is looked at, and tokens go where the router sends them."""
        return self.is_looking and self.unfed is None

    def _take(self, names: list[str], given: torch.Tensor) -> None:
        """Statistics of what these modules are given; only once where the very same tensor was given to another before."""
        key = (given.data_ptr(), given.numel(), given._version)
        holder = self._seen[key][0] if key in self._seen else names[0]
        self._seen.setdefault(
            key, (holder, given)
        )  # kept: else its memory could be another tensor's
        for name in names:
            if name != holder:
                self.inputs[name] = holder
        if holder == names[0]:
            self._add(holder, given)

    def _add(self, holder: str, given: torch.Tensor) -> None:
        if holder not in self.moments:
            self.moments[holder] = Moments(given.shape[-1], self.gram, given.device)
        if not self.moments[holder].add(given):
            detail = (
                f"{holder} was given NaN or Inf by sample {self.sample}; activations must be finite"
            )
            raise InputError(
                "calibration-nan", detail, "Check the weights, and leave that text out.", holder
            )

    def experts(
        self, module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any
    ) -> torch.Tensor:
        """What a stack of experts makes of tokens, expert by expert, as its class in transformers defines it."""
        hidden, chosen, weights = (
            hidden_states,
            top_k_index,
            top_k_weights,
        )  # named as transformers calls them
        path = self._paths[id(module)]
        for expert in (self.unfed or {}).get(path, ()):
            self._see_expert(path, expert, hidden, _between(module, expert, hidden))
        routed = (
            self.routed.setdefault(path, Routed(module.num_experts))
            if self._follows_router()
            else None
        )
        out = torch.zeros_like(hidden)
        for expert in torch.unique(chosen).tolist():
            if expert >= module.num_experts:
                continue
            token, rank = torch.where(chosen == expert)
            given, share = hidden[token], weights[token, rank, None]
            between = _between(module, expert, given)
            made = _after(module, expert, between)
            if routed is not None:
                self._see_expert(path, expert, given, between)
                routed.add(expert, share, made)
            out.index_add_(0, token, (made * share).to(out.dtype))
        return out

    def _see_expert(
        self, path: str, expert: int, given: torch.Tensor, between: torch.Tensor
    ) -> None:
        for is_first, x in ((True, given), (False, between)):
            names = self._members.get((path, is_first, expert), [])
            if names:
                self.inputs |= dict.fromkeys(names[1:], names[0])
                self._add(names[0], x)

    def feed_starving(self) -> list[str]:
        """Forget what the experts with too few tokens were given, and have them fed from now on; their modules."""
        self.unfed = {
            path: experts for path, routed in self.routed.items() if (experts := routed.starving())
        }
        fed = [
            (path, is_first, expert)
            for path, all_ in self.unfed.items()
            for expert in all_
            for is_first in (True, False)
        ]
        names = [name for key in fed for name in self._members.get(key, [])]
        for name in names:
            self.moments.pop(name, None)
        return names

    def attention(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        """What attention makes of queries, keys and values, by the model's own plain function."""
        if self._follows_router() and not hasattr(
            module, "kv_lora_rank"
        ):  # latent attention has no cache of keys and values
            largest = self.cached.setdefault(self._paths[id(module)], [0.0, 0.0])
            largest[:] = (
                max(largest[0], float(key.abs().max())),
                max(largest[1], float(value.abs().max())),
            )
        plain = getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009 - mypy knows no such module
        return plain(module, query, key, value, attention_mask, **options)

    def arrays(self) -> Arrays:
        """Everything that was seen, as a calibration file has it."""
        found: Arrays = {}
        for module, moments in self.moments.items():
            found |= moments.arrays(module)
        for path, routed in self.routed.items():
            found |= routed.arrays(self._name_of(path).rpartition(".")[0])
        for path, largest in self.cached.items():
            if getattr(self.skeleton.module(path), "is_causal", True):
                for kind, amax in zip(("k_amax", "v_amax"), largest, strict=True):
                    found[f"{self._name_of(path)}.{kind}"] = np.asarray(amax, np.float32)
        return found

    def _name_of(self, path: str) -> str:
        """What the checkpoint calls a module of the model, by the name of a linear layer in it."""
        for module, seat in self.modules.items():
            if seat.expert is not None and seat.path == path:
                return module[: module.rindex(f".{seat.expert}.")]
            if seat.expert is None and seat.path.startswith(f"{path}."):
                return module.rsplit(".", seat.path[len(path) :].count("."))[0]
        detail = f"{path} of the model has no linear layer that the checkpoint stores; expected one"
        next_step = (
            "Download the checkpoint again: its config.json and its weights are not of one model."
        )
        raise InputError("calibration-model", detail, next_step, path)


def _multiplied(module: Any, parameter: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = getattr(module, parameter)[expert].to(x.dtype)
    made = x @ weight if module.is_transposed else x @ weight.T
    return (
        made + getattr(module, f"{parameter}_bias")[expert].to(x.dtype) if module.has_bias else made
    )


def _between(module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    """What an expert's last matrix is given."""
    if module.has_gate:
        found: torch.Tensor = module._apply_gate(_multiplied(module, "gate_up_proj", expert, x))
    else:
        found = module.act_fn(_multiplied(module, "up_proj", expert, x))
    return found


def _after(module: Any, expert: int, between: torch.Tensor) -> torch.Tensor:
    made = _multiplied(module, "down_proj", expert, between)
    return module.post_expert_norm(made) if module.has_post_expert_norm else made


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Meanwhile attention and experts of the model are run under the eyes of that watch."""
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

    AttentionInterface.register(IMPLEMENTATION, watch.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, eager_mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, watch.experts)
    for config in configs_of(watch.skeleton.model):
        config._attn_implementation = config._experts_implementation = IMPLEMENTATION
    with torch.no_grad(), watch.hooked():
        yield


def configs_of(model: Any) -> Iterable[Any]:
    """The configs that the model's modules ask for implementations."""
    return {
        id(config): config
        for m in model.modules()
        if (config := getattr(m, "config", None)) is not None
    }.values()


def unwatched(skeleton: Skeleton, seen: Mapping[str, object]) -> list[str]:
    """Linear layers that got no statistics: not part of the model, or never given text; embeddings are none."""
    tables = {
        path
        for path, module in skeleton.model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    return [
        module
        for module in skeleton.linears
        if module not in seen
        and not (module in skeleton.seats and skeleton.seats[module].path in tables)
    ]


def opaque(skeleton: Skeleton, modules: Iterable[str]) -> list[str]:
    """Those of the modules that are experts of a stack whose class in transformers lets nobody else compute them."""
    found = []
    for module in modules:
        seat = skeleton.seats.get(module)
        if seat and seat.expert is not None and not hasattr(skeleton.module(seat.path), "has_gate"):
            found.append(module)
    return found
