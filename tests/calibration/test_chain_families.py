"""Every family that is tested runs a layer at a time: its logits, what each of its linear layers is
given, and what is said of that, are those of transformers' own forward of the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from chained_families import CHAINED
from family import Family, build, load

from fp4convert.storage.open import open_source

pytestmark = [pytest.mark.engine, pytest.mark.slow]
RTOL = 2e-5  # of the largest: float32, added in another order


def inputs_of(family: Family, number: int) -> dict[str, Any]:
    """What the model is called with: tokens, of which no two are the same."""
    import torch

    ids = torch.arange(1, 33).reshape(2, 16) + 32 * number
    if family.name == "whisper":
        random = torch.Generator().manual_seed(number)
        return {
            "input_features": torch.randn((2, 16, 48), generator=random),
            "decoder_input_ids": ids,
        }
    decoder = {"decoder_input_ids": ids.flip(0)} if family.name in ("t5", "bart") else {}
    return {"input_ids": ids, **decoder}


def watch_linears(model: Any) -> dict[str, list[Any]]:
    """What the linear layers will be given, by path."""
    import torch

    given: dict[str, list[Any]] = defaultdict(list)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda m, args, path=path: given[path].append(args[0].reshape(-1, m.in_features))
            )
    return given


def watch_experts(model: Any) -> dict[str, list[Any]]:
    """What experts that have a definition of their own will be called with, by path."""
    calls: dict[str, list[Any]] = defaultdict(list)
    for path, module in model.named_modules():
        if type(module).__name__ in ("DbrxExperts", "Llama4TextExperts", "LongcatFlashExperts"):
            module.register_forward_pre_hook(
                lambda m, args, path=path: calls[path].append((m, args))
            )
    return calls


def whole_model(family: Family, folder: Path) -> Any:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return load(family, folder, dtype="float32", **eager)


@pytest.mark.parametrize("family", CHAINED, ids=str)
def test_a_layer_at_a_time_computes_what_the_whole_model_does(
    family: Family, tmp_path: Path
) -> None:
    import torch

    from fp4convert.calibration.layers import Chain
    from fp4convert.calibration.model import open_skeleton
    from fp4convert.calibration.moments import merge_statistics
    from fp4convert.calibration.observers import Watch, watching

    folder = build(family, tmp_path / "m")
    inputs = [inputs_of(family, number) for number in range(2)]
    whole = whole_model(family, folder)
    expected, experts = watch_linears(whole), watch_experts(whole)
    with torch.no_grad():
        logits = [whole(**given).logits for given in inputs]
    skeleton = open_skeleton(open_source(str(folder)), folder, torch.device("cpu"))
    found = watch_linears(skeleton.model)
    chain = Chain(skeleton, inputs, tmp_path)
    stops: list[str] = []
    watch, told = Watch(skeleton, "diag", skeleton.seats), dict[str | None, Any]()
    chain.begin, holders = watch.begin, dict[str, str]()
    with watching(watch), chain.held(is_headless=False) as held:
        for path in held:
            skeleton.fill(path)
            for number in range(len(inputs)):
                chain.hand_on(number, chain.run(number))
            skeleton.empty(path)
            shared, arrays = watch.take(path)
            holders |= shared
            told[path] = merge_statistics(told.get(path, {}), arrays)
            stops.append(path)
    told[None] = watch.take(None)[1]
    assert len(stops) >= 2
    for forward, judged in zip(chain.forwards, logits, strict=True):
        near(forward.made.logits, judged)
    assert {path for path in expected if ".experts." not in path} <= found.keys()
    for path in expected.keys() & found.keys():
        if ".experts." not in path:
            by_batch = [part for number in range(2) for part in found[path][number::2]]
            near(torch.cat(by_batch), torch.cat(expected[path]))
    statistics = {name: array for arrays in told.values() for name, array in arrays.items()}
    check_statistics(skeleton, statistics, expected)
    for path, calls in experts.items():
        check_experts(skeleton, statistics, holders, path, calls)


def check_statistics(skeleton: Any, statistics: dict[str, Any], expected: dict[str, Any]) -> None:
    """Means and counts are those of all that a layer was given, be it run several times."""
    import torch

    judged = 0
    for module, seat in skeleton.seats.items():
        is_linear = bool(expected.get(seat.path))  # a router may be a module of its own kind
        if is_linear and seat.expert is None and f"{module}.tokens" in statistics:
            x = torch.cat(expected[seat.path]).double()
            assert statistics[f"{module}.tokens"] == len(x)
            near(torch.from_numpy(statistics[f"{module}.input_sq_mean"]), x.square().mean(0))
            judged += 1
    assert judged


def check_experts(
    skeleton: Any,
    statistics: dict[str, Any],
    holders: dict[str, str],
    path: str,
    calls: list[tuple[Any, Any]],
) -> None:
    """Experts of DBRX, Llama 4 and LongCat one by one, by their definitions."""
    import torch

    by_expert = {
        (seat.parameter, seat.expert): module
        for module, seat in skeleton.seats.items()
        if seat.path.removesuffix(".mlp") == path
    }
    count = max(expert for _, expert in by_expert) + 1
    for expert in range(count):
        given, inner = [], []
        for owner, args in calls:
            if len(args) == 1:  # Llama 4: every expert is given every token, most of them as zeros
                x = args[0].view(count, -1, args[0].shape[-1])[expert]
                x = x[x.abs().sum(-1) > 0]
                gate, up = (x @ owner.gate_up_proj[expert]).chunk(2, -1)
            else:
                rows = (args[1] == expert).any(-1)
                x = args[0].reshape(-1, args[0].shape[-1])[rows]
                if hasattr(owner, "mlp"):
                    width = owner.ffn_hidden_size
                    part = slice(expert * width, (expert + 1) * width)
                    gate, up = x @ owner.mlp.w1[part].T, x @ owner.mlp.v1[part].T
                else:
                    gate, up = (x @ owner.gate_up_proj[expert].T).chunk(2, -1)
            given.append(x)
            inner.append(torch.nn.functional.silu(gate) * up)
        for (parameter, number), name in by_expert.items():
            if number == expert and sum(map(len, given)):
                x = torch.cat(inner if parameter in ("down_proj", "w2") else given).double()
                holder = holders.get(name, name)
                assert statistics[f"{holder}.tokens"] == len(x)
                near(torch.from_numpy(statistics[f"{holder}.input_sq_mean"]), x.square().mean(0))


def near(found: Any, judged: Any) -> None:
    assert found.shape == judged.shape
    assert float((found - judged).abs().max()) <= RTOL * float(judged.abs().max())
