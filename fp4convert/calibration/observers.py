"""Gather statistics of inputs while text runs through a layer.

Ordinary linear layers are watched by hooks.  Experts that are one stack, and attention, are run by
functions of ours that take the place of the model's own for a while; they compute what the model
defines, and look at what passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.activations import Round, Rounding, round_call
from fp4convert.calibration.experts import FIRST_PARAMETERS, Experts, LlamaExperts, find_experts
from fp4convert.calibration.model import Seat, Skeleton
from fp4convert.calibration.moments import Arrays, Moments
from fp4convert.checkpoint.encodings.floats import AS_FLOAT32, DOUBLE
from fp4convert.errors import InputError
from fp4convert.numerics.formats import FLOAT_TYPES

PLAIN_ATTENTION = "eager_attention_forward"  # in each file of models of transformers
FEW_TOKENS = 16  # an expert that was given fewer has no statistics worth the name
FEW_SHARE = 1 / 8  # of what each would get if all got the same: nor has one with less
UNROUTED_TOKENS = 4096  # of the layer, that such an expert is given instead


def is_cached(module: Any, options: Mapping[str, Any]) -> bool:
    """Tell whether an attention keeps keys and values.

    Latent ones do not, nor do those that look both ways, of images and of encoders.
    options  that the model calls its attention function with
    """
    is_causal = getattr(module, "is_causal", options.get("is_causal", True))
    return is_causal and not hasattr(module, "kv_lora_rank")


@dataclass(slots=True)
class Watch:
    """The statistics of a layer, or of everything outside the layers.

    moments  by the module that holds them
    inputs   module -> the one that holds its statistics, because both were given the same tensor
    routed   path of a stack of experts -> how many tokens went to each, and the sum over these of
             the router's weight times the norm of what came out
    cached   path of an attention -> largest |key| and |value|
    sample   what is running: how errors call it
    unfed    path of a stack -> its experts that are still short of tokens, and are now fed with
             every one; None while tokens go where the router sends them
    is_looking  False where the model only runs, and nothing is kept of what it is given
    rounding    of inputs, keys and values, which are computed with as they come out of it
    rounded     paths of linear layers whose input was
    recorded    linear layers whose inputs `record` is given, beside their diagonals alone
    finished    statistics that are complete, by the module that holds them
    _members    (path of a stack, is it its first matrix, expert) -> modules of the checkpoint
    _paths      id of a module of the model -> its path
    _given      tensors of this sample that were seen, by address: who holds their statistics
    """

    skeleton: Skeleton
    gram: str
    modules: dict[str, Seat]
    moments: dict[str, Moments] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    routed: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = field(default_factory=dict)
    cached: dict[str, list[float]] = field(default_factory=dict)
    sample: int = 0
    unfed: dict[str, list[int]] | None = None
    is_looking: bool = True
    rounding: Rounding = field(default_factory=Rounding)
    rounded: set[str] = field(default_factory=set)
    recorded: Collection[str] = ()
    record: Callable[[str, torch.Tensor], None] = lambda module, given: None
    finished: dict[str, Arrays] = field(default_factory=dict)
    _members: dict[tuple[str, bool, int], list[str]] = field(default_factory=dict)
    _paths: dict[int, str] = field(default_factory=dict)
    _given: dict[tuple[int, ...], tuple[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._paths |= {id(module): path for path, module in self.skeleton.model.named_modules()}
        for module, seat in self.modules.items():
            if seat.expert is not None:
                key = (seat.path, seat.parameter in FIRST_PARAMETERS, seat.expert)
                self._members.setdefault(key, []).append(module)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch the linear layers that are no experts, for a while."""
        by_path: dict[str, list[str]] = {}
        for module, seat in self.modules.items():
            if seat.expert is None:
                by_path.setdefault(seat.path, []).append(module)
        handles = []
        for path, names in by_path.items():
            owner = self.skeleton.module(path)
            if not isinstance(owner, torch.nn.Embedding):
                hook = self._make_hook(names)
                handles.append(owner.register_forward_pre_hook(hook, with_kwargs=True))
        for path, make in self.rounding.linears.items():
            rounding = partial(self._round_input, path, make)
            owner = self.skeleton.module(path)
            handles.append(owner.register_forward_pre_hook(rounding, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _round_input(
        self, path: str, make: Round, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Round the one tensor that a linear layer is given."""
        self.rounded.add(path)
        return round_call(make, module, args, kwargs)

    def begin(self, sample: int) -> None:
        """Forget the tensors of the last sample; the next one comes."""
        self.sample = sample
        self._given.clear()

    @property
    def _follows_router(self) -> bool:
        """Tell whether everything is observed, with tokens as they are routed."""
        return self.is_looking and self.unfed is None

    def _make_hook(self, names: list[str]) -> Callable[..., None]:
        """Make the hook that observes the input of these modules.

        Statistics are gathered once where the very same tensor was given to another before.
        """
        columns = self.skeleton.linears[names[0]].shape[1]

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
            given = next(tensors, None)
            if not self._follows_router or given is None:
                return
            if not given.is_floating_point() or given.shape[-1] != columns:
                return
            key = (given.data_ptr(), given.numel(), given._version)
            # The tensor is kept: else its memory could be another tensor's.
            holder, _ = self._given.setdefault(key, (names[0], given))
            self.inputs |= {name: holder for name in names if name != holder}
            if holder == names[0]:
                self._add(holder, given)
                if holder in self.recorded:
                    self.record(holder, given)

        return look

    def _add(self, holder: str, given: torch.Tensor) -> None:
        if holder not in self.moments:
            gram = "diag" if holder in self.recorded else self.gram
            self.moments[holder] = Moments(given.shape[-1], gram, given.device)
        if not self.moments[holder].add(given):
            detail = f"{holder} was given NaN or Inf by sample {self.sample}"
            detail += "; activations must be finite"
            next_step = "Check the weights, and leave that text out."
            raise InputError("calibration-nan", detail, next_step, holder)

    def _add_expert(
        self, experts: Experts, expert: int, given: torch.Tensor, inner: torch.Tensor
    ) -> None:
        """Add the inputs of an expert's first matrices and of its last one."""
        path = self._paths[id(experts.owner)]
        for is_first, x in ((True, given), (False, inner)):
            names = self._members.get((path, is_first, expert), [])
            if names:
                self.inputs |= dict.fromkeys(names[1:], names[0])
                self._add(names[0], x)

    def run_experts(
        self, experts: Experts, hidden_states: Any, top_k_index: Any, top_k_weights: Any
    ) -> torch.Tensor:
        """Compute a stack of experts, expert by expert, as transformers does.

        The arguments have the names that transformers gives them.
        """
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        self._feed(experts, hidden)
        out = torch.zeros_like(hidden)
        for expert in torch.unique(top_k_index).tolist():
            token, rank = torch.where(top_k_index == expert)
            share = top_k_weights[token, rank, None]
            if expert < experts.count:
                made: torch.Tensor | None = self._run_expert(experts, expert, hidden[token], share)
            else:
                made = experts.pass_by(hidden[token])
            if made is not None:
                out.index_add_(0, token, (made * share).to(out.dtype))
        return out.view(hidden_states.shape)

    def run_experts_on_all(self, experts: Experts, hidden_states: Any) -> torch.Tensor:
        """Compute the experts of Llama 4, of the tokens that are routed to them.

        hidden_states  (experts * tokens, hidden), zero where a token is not routed there
        """
        given = hidden_states.view(experts.count, -1, hidden_states.shape[-1])
        out = torch.zeros_like(given)
        if self.unfed:  # with the tokens as their own experts get them, multiplied by a score
            self._feed(experts, given.sum(0))
        for expert in range(experts.count):
            token = given[expert].any(-1).nonzero().squeeze(-1)
            if len(token):
                one = torch.ones(1, device=given.device)
                out[expert, token] = self._run_expert(experts, expert, given[expert, token], one)
        return out.view(hidden_states.shape)

    def _feed(self, experts: Experts, hidden: torch.Tensor) -> None:
        """Give experts that are short of tokens every one."""
        for expert in (self.unfed or {}).get(self._paths[id(experts.owner)], ()):
            self._add_expert(experts, expert, hidden, experts.compute_inner(expert, hidden))

    def _run_expert(
        self, experts: Experts, expert: int, given: torch.Tensor, share: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output of an expert for its tokens, and observe its inputs.

        share  of the router, for each token
        """
        path = self._paths[id(experts.owner)]
        inner = experts.compute_inner(expert, self.rounding.expert(path, True, expert, given))
        rounded = self.rounding.expert(path, False, expert, inner)
        made = experts.compute_output(expert, rounded)
        if self._follows_router:
            none = np.zeros(experts.count, np.int64), np.zeros(experts.count, np.float64)
            tokens, norms = self.routed.setdefault(path, none)
            self._add_expert(experts, expert, given, inner)
            tokens[expert] += len(made)
            norm = torch.linalg.vector_norm(made.float(), dim=-1, dtype=torch.float64)
            norms[expert] += float((share.double().reshape(-1) * norm).sum())
        return made

    def feed_starving(self) -> list[str]:
        """Have the experts with too few tokens fed from now on.

        What they were given is forgotten.
        Returns  their modules
        """
        self.unfed = {}
        for path, (tokens, _) in self.routed.items():
            fair = tokens.sum() / len(tokens)
            starving = np.flatnonzero(tokens < max(FEW_TOKENS, FEW_SHARE * fair))
            if len(starving):
                self.unfed[path] = starving.tolist()
        fed = [
            (path, is_first, expert)
            for path, experts in self.unfed.items()
            for expert in experts
            for is_first in (True, False)
        ]
        names = [name for key in fed for name in self._members.get(key, [])]
        for name in names:
            self.moments.pop(name, None)
        return names

    def attention(
        self,
        compute: Callable[..., Any],
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Compute attention by the model's function; observe keys and values."""
        keeps = is_cached(module, options)
        if self._follows_router and keeps:
            largest = self.cached.setdefault(self._paths[id(module)], [0.0, 0.0])
            largest[0] = max(largest[0], float(key.abs().max()))
            largest[1] = max(largest[1], float(value.abs().max()))
        if self.rounding.cache is not None and keeps:
            path = self._paths.get(id(module))
            if path is not None:
                key, value = self.rounding.keys_and_values(path, key, value)
        return compute(module, query, key, value, *rest, **options)

    def take(self, layer: str | None) -> tuple[dict[str, str], Arrays]:
        """Return the statistics of a layer in the form of a file, and forget them.

        layer    None for everything outside of layers
        Returns  `inputs` of the layer, and the arrays
        """

        def is_own(path: str) -> bool:
            return self.skeleton.layer_above(path) == layer

        found: Arrays = {}
        for module in [name for name in self.moments if is_own(self.modules[name].path)]:
            found |= self.moments.pop(module).arrays(module)
        for module in [name for name in self.finished if is_own(self.modules[name].path)]:
            found |= self.finished.pop(module)
        for path in filter(is_own, list(self.routed)):
            tokens, norms = self.routed.pop(path)
            moe = self._name_of(path).removesuffix(".mlp").rpartition(".")[0]
            found[f"{moe}.expert_tokens"] = tokens
            found[f"{moe}.expert_saliency"] = (norms / np.maximum(tokens, 1)).astype(np.float32)
        for path in filter(is_own, list(self.cached)):
            largest = self.cached.pop(path)
            for kind, amax in zip(("k_amax", "v_amax"), largest, strict=True):
                found[f"{self._name_of(path)}.{kind}"] = np.asarray(amax, np.float32)
        own = [name for name in self.inputs if is_own(self.modules[name].path)]
        return {name: self.inputs.pop(name) for name in own}, found

    def _name_of(self, path: str) -> str:
        """Find the checkpoint's name of a module, by a linear layer in it."""
        for module, seat in self.modules.items():
            if seat.expert is not None and seat.path == path:
                return module[: module.rindex(f".{seat.expert}.")]
            if seat.expert is None and seat.path.startswith(f"{path}."):
                return module.rsplit(".", seat.path[len(path) :].count("."))[0]
        types = ", ".join(FLOAT_TYPES)
        detail = f"{path} of the model has no linear layer stored as {types}, or packed"
        detail += "; expected one"
        next_step = f"{AS_FLOAT32} If no weights are {DOUBLE}, check that they fit config.json."
        raise InputError("calibration-model", detail, next_step, path)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Run attention and experts of the model by a watch, for a while."""
    model = watch.skeleton.model
    stacks = find_experts(model)
    for experts in stacks:
        is_llama = isinstance(experts, LlamaExperts)
        run = watch.run_experts_on_all if is_llama else watch.run_experts
        experts.module.forward = partial(run, experts)
    # The name "eager" stays: by any other, models of sparse attention leave their index out.
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    plain = {home: vars(home)[PLAIN_ATTENTION] for home in homes if PLAIN_ATTENTION in vars(home)}
    for home, compute in plain.items():
        setattr(home, PLAIN_ATTENTION, partial(watch.attention, compute))
    try:
        with torch.no_grad(), watch.hooked():
            yield
    finally:
        for experts in stacks:
            del experts.module.forward
        for home, compute in plain.items():
            setattr(home, PLAIN_ATTENTION, compute)


def find_unwatched(skeleton: Skeleton, seen: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Find linear layers that got no statistics; embeddings are none.

    They are not part of the model, or were never given text.
    Returns  these modules; and of them the experts of stacks that only transformers can compute
    """
    known = {id(experts.owner) for experts in find_experts(skeleton.model)}
    unwatched, opaque = [], []
    for module in skeleton.linears:
        seat = skeleton.seats.get(module)
        owner = skeleton.module(seat.path) if seat else None
        if module in seen or isinstance(owner, torch.nn.Embedding):
            continue
        unwatched.append(module)
        if seat and seat.expert is not None and id(owner) not in known:
            opaque.append(module)
    return unwatched, opaque
