"""Choose the experts that stay, and find what goes by their number.

REAP (arXiv 2510.13999, section 4): the experts of a layer with the lowest saliency go, S_j = mean
over the tokens routed to expert j of g_j(x) * |f_j(x)|_2, which calibration measured. What is
written, and where, pruning.py decides.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from fp4convert.checkpoint.dialects.forms import parents_of
from fp4convert.errors import InputError
from fp4convert.recipes.patterns import configs_in, integer_of, matches_any
from fp4convert.recipes.recipe import Recipe
from fp4convert.recipes.rules import ExpertsRule
from fp4convert.recipes.uneven_formats import EXPERTS
from fp4convert.storage.safetensors import DTYPE_BITS, TensorRef

AGAIN = "Download the checkpoint again, or correct the number of experts in its config.json."
WRITE_RULES = "Write it: --recipe FILE.toml with [[experts]]; see docs/recipes.md."
# Experts whose scores make that of their group, where DeepSeek V3 and its kin choose groups.
GROUP_BEST = 2
BY_THE_BEST = "group_limited_greedy"  # topk_method of DeepSeek V2: the best one makes it
_ROUTING = re.compile(
    r"\.(gate|[a-z_]*(router|experts?_|score)[a-z_]*)(\.|$)(?<!\.shared_expert_gate\.)"
)
_SINGLE = re.compile(r"(.+?)\.experts\.(\d+)(\..+)")


@dataclass(frozen=True, slots=True)
class Mixture:
    """The routed experts of one layer, and all that goes by their number.

    name     as calibration has it: the module above its `experts`
    singles  tensors that belong to one expert: the address, its number, and the name behind that
    stacks   tensors whose first axis is the experts, or so many equal parts for each
    rows     the same, of the router
    columns  tensors whose last axis is the experts
    beside   what else lies in it and is called after a router or experts
    """

    name: str
    singles: list[tuple[TensorRef, int, str]] = field(default_factory=list)
    stacks: list[TensorRef] = field(default_factory=list)
    rows: list[TensorRef] = field(default_factory=list)
    columns: list[TensorRef] = field(default_factory=list)
    beside: list[TensorRef] = field(default_factory=list)

    def renamed(self, number: int, rest: str) -> str:
        """Return the name of a tensor of that expert."""
        return f"{self.name}{EXPERTS}{number}{rest}"


class Routing(NamedTuple):
    """What config.json says of experts, and how many are to stay.

    chosen          how many a token is sent to
    groups          equal groups, of which a token may use `chosen_groups`; one where there are none
    group_at_least  experts without which the score of a group cannot be formed
    """

    experts: int
    keep: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1
    group_at_least: int = 1

    def check(self) -> None:
        """Raise InputError where the router could not choose among what stays."""
        if self.experts % self.groups:
            detail = (
                f"{self.experts} experts do not divide into {self.groups} equal groups (n_group)"
            )
            next_step = "Download config.json again, or correct its n_group."
            raise InputError("prune-groups", f"config.json: {detail}", next_step)
        least = max(self.group_at_least, -(-self.chosen // self.chosen_groups)) * self.groups
        if least >= self.experts:
            detail = f"layers have {self.experts} experts, and the router needs {least} to choose"
            detail = f"{detail} {self.chosen} for a token; expected some that can go"
            next_step = "Leave prune out: fp4convert quantize takes this model as it is."
            raise InputError("prune-keep", detail, next_step)
        if not 0 < self.keep < self.experts:
            detail = f"--keep {self.keep}: layers have {self.experts} experts; expected"
            kind = f"a multiple of {self.groups}" if self.groups > 1 else "a number"
            detail = f"{detail} {kind} from {least} to {self.experts - self.groups}"
            raise InputError("prune-keep", detail, "Choose a number in that range.")
        if self.keep < self.chosen:
            detail = f"--keep {self.keep}: a token is sent to {self.chosen} experts"
            detail = f"{detail}, so at least that many are needed"
            raise InputError("prune-keep", detail, f"Keep more: --keep {least}.")
        if self.keep % self.groups:
            down = self.keep - self.keep % self.groups
            near = [
                str(count) for count in (down, down + self.groups) if least <= count < self.experts
            ] or [str(least)]
            detail = f"--keep {self.keep}: the router chooses among {self.groups} groups"
            detail = f"{detail}, which need equal numbers of experts"
            next_step = f"Keep a multiple of {self.groups}: --keep {' or '.join(near)}."
            raise InputError("prune-groups", detail, next_step)
        if self.keep < least:
            each_keeps = self.keep // self.groups
            detail = f"--keep {self.keep}: each of {self.groups} groups would keep {each_keeps}"
            detail = f"{detail} of its experts"
            detail = f"{detail}; a token may use {self.chosen_groups} groups"
            detail = f"{detail}, and it is sent to {self.chosen}; expected at least {least} in all"
            raise InputError("prune-groups", detail, f"Keep more: --keep {least}.")


def read_routing(config: Mapping[str, object], rule: ExpertsRule, keep: int) -> Routing:
    """Read what config.json says of routing.

    Raises InputError where it does not, or where `keep` does not fit
    """
    experts, chosen = (_agreed(config, keys) for keys in (rule.counts, rule.chosen))
    routing = Routing(experts, keep, chosen)
    groups = integer_of(config, "n_group") or 1
    if groups > 1:
        methods = [one.get("topk_method") for one in configs_in(config)]
        least = 1 if BY_THE_BEST in methods else GROUP_BEST
        routing = routing._replace(
            groups=groups,
            chosen_groups=integer_of(config, "topk_group") or groups,
            group_at_least=least,
        )
    routing.check()
    return routing


def _agreed(config: Mapping[str, object], keys: Iterable[str]) -> int:
    """Read the one number that config.json has under these keys."""
    found = {key: one[key] for key in keys for one in configs_in(config) if key in one}
    numbers = {
        number
        for number in found.values()
        if isinstance(number, int) and not isinstance(number, bool) and number > 0
    }
    if len(numbers) != 1 or len(set(map(str, found.values()))) > 1:
        what = " and ".join(f"{key} {value!r}" for key, value in found.items()) or "nothing"
        detail = f"config.json has {what} under {' or '.join(keys)}; expected one positive integer"
        next_step = "See config.json, or write [[experts]] in a recipe: docs/recipes.md."
        raise InputError("prune-config", detail, next_step)
    return numbers.pop()


def find_mixtures(tensors: Collection[TensorRef], recipe: Recipe) -> list[Mixture]:
    """Find every mixture of a checkpoint, in its order.

    Raises InputError where there is none, or where no recipe tells what is whose
    """
    if not recipe.experts and any(EXPERTS in ref.name for ref in tensors):
        detail = "no recipe says where this model has its router"
        detail = f"{detail}, and where config.json counts its experts"
        raise InputError("prune-family", detail, WRITE_RULES)
    rule = recipe.experts[0] if recipe.experts else ExpertsRule((), (), ())
    found, beside = dict[str, Mixture](), list[TensorRef]()
    for ref in tensors:
        if single := _SINGLE.fullmatch(ref.name):
            name, number, rest = single.groups()
            found.setdefault(name, Mixture(name)).singles.append((ref, int(number), rest))
        elif name := _stacked_in(ref.name, recipe, rule):
            found.setdefault(name, Mixture(name)).stacks.append(ref)
        elif EXPERTS in ref.name:
            detail = f"{ref.file}: no recipe says which part of {ref.name} belongs to which expert"
            next_step = "Write it: --recipe FILE.toml with [[experts]] or [[stack]]."
            raise InputError("prune-family", detail, next_step, ref.name)
        else:
            beside.append(ref)
    for ref in beside:
        # What lies in a mixture belongs to the innermost one.
        name = next((name for name in parents_of(ref.name) if name in found), None)
        if name is None:
            continue
        if matches_any(rule.rows, ref.name):
            found[name].rows.append(ref)
        elif matches_any(rule.columns, ref.name):
            found[name].columns.append(ref)
        elif _ROUTING.search(ref.name):
            found[name].beside.append(ref)
    if not found:
        detail = "the model has no layer with experts; expected a mixture of experts"
        next_step = "Leave prune out: fp4convert quantize takes this model as it is."
        raise InputError("prune-family", detail, next_step)
    return list(found.values())


def _stacked_in(tensor: str, recipe: Recipe, rule: ExpertsRule) -> str:
    """Name the mixture of whose experts a tensor is a stack; "" for none."""
    if stack := recipe.stack_rule(tensor):
        name, dot, _ = stack.module(tensor, 0, stack.members[0]).partition(EXPERTS)
        return name if dot else ""
    name, dot, _ = tensor.partition(EXPERTS)
    return name if dot and matches_any(rule.rows, tensor) else ""


def check_mixture(mixture: Mixture, rule: ExpertsRule, experts: int) -> None:
    """Raise InputError where a mixture does not have that many experts.

    Also where it has no router
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    for _, number, rest in mixture.singles:
        numbers[rest].add(number)
    for rest, those in numbers.items():
        if those != set(range(experts)):
            lacking = min(set(range(experts)) ^ those)
            detail = f"{mixture.renamed(lacking, rest)}: {len(those)} experts have {rest[1:]}"
            raise InputError("prune-experts", f"{detail}; expected {experts}, from 0 on", AGAIN)
    tables = [
        *((ref, 0, False) for ref in mixture.rows),
        *((ref, -1, False) for ref in mixture.columns),
        *((ref, 0, len(ref.shape) == 2) for ref in mixture.stacks),
    ]
    for ref, axis, may_be_flat in tables:
        length = ref.shape[axis] if ref.shape else 0
        if length != experts and not (may_be_flat and length and length % experts == 0):
            detail = f"{ref.file}: {ref.name} is {list(ref.shape)}; expected {experts} experts"
            detail = f"{detail} along its {'last' if axis else 'first'} axis"
            raise InputError("prune-experts", detail, AGAIN, ref.name)
    for ref in mixture.beside:
        # Numbers of experts, or by tokens.
        if experts in ref.shape or not ref.dtype.startswith(("F", "BF")):
            detail = f"{ref.file}: {ref.name} ({ref.dtype} {list(ref.shape)})"
            detail = f"{detail} seems to have a part for each expert, and no recipe says how"
            raise InputError("prune-family", detail, WRITE_RULES, ref.name)
    if not mixture.rows:
        names = ", ".join((*rule.rows, *rule.columns))
        detail = f"{mixture.name} has experts and no router with one of the names {names}"
        next_step = "Write its names: --recipe FILE.toml with [[experts]]; see docs/recipes.md."
        raise InputError("prune-family", detail, next_step)


def choose_kept(saliency: Sequence[float], routing: Routing) -> tuple[int, ...]:
    """Choose the experts that stay, in their order.

    Of each group as many, those of the highest saliency; of equals the first
    """
    size, each = routing.experts // routing.groups, routing.keep // routing.groups
    kept: list[int] = []
    for first in range(0, routing.experts, size):
        ranked = sorted(range(first, first + size), key=lambda expert: (-saliency[expert], expert))
        kept += sorted(ranked[:each])
    return tuple(kept)


def kept_rows(ref: TensorRef, kept: Sequence[int], experts: int) -> tuple[TensorRef, ...]:
    """Return the parts of a tensor that belong to these experts, in order.

    Its first axis has equally many rows for each expert.
    """
    height, nbytes = ref.shape[0] // experts, ref.nbytes // experts
    return tuple(
        ref._replace(
            name=f"{ref.name}[{first}:{end}]",
            shape=((end - first) * height, *ref.shape[1:]),
            start=ref.start + first * nbytes,
        )
        for first, end in _runs(kept)
    )


def kept_columns(ref: TensorRef, kept: Sequence[int], experts: int) -> tuple[TensorRef, ...]:
    """Return the parts of a tensor whose last axis is the experts.

    They come row by row.
    """
    nbytes = DTYPE_BITS[ref.dtype] // 8
    return tuple(
        ref._replace(
            name=f"{ref.name}[{row}, {first}:{end}]",
            shape=(end - first,),
            start=ref.start + (row * experts + first) * nbytes,
        )
        for row in range(math.prod(ref.shape[:-1]))
        for first, end in _runs(kept)
    )


def _runs(kept: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and end of all numbers that follow one another."""
    for _, run in groupby(enumerate(kept), key=lambda item: item[1] - item[0]):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1] + 1
