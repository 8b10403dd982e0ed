"""Find the linear layers whose outputs are added to the residual stream.

Nothing is asked of the model's code: what a module, or the next layer, is given equals, to the last
bit, the stream before plus the output.  Where a norm or a factor stands between, nothing is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch


def trace_stream(
    layer: Any, hidden: torch.Tensor | None, linears: Mapping[str, str], run: Callable[[], Any]
) -> tuple[Any, dict[str, str], dict[str, torch.Tensor]]:
    """Run a layer and find where its residual stream is added to.

    hidden   that the layer is given
    linears  path inside the layer -> name of a linear layer
    Returns  the output; name -> path inside of the module that is given the stream before its
             output is added, "" for the layer itself; and these streams by path
    """
    given: list[tuple[str, torch.Tensor]] = []
    outputs: dict[str, torch.Tensor] = {}

    def look(path: str, module: Any, args: Any) -> None:
        if args and isinstance(args[0], torch.Tensor):
            given.append((path, args[0]))

    def keep(name: str, module: Any, args: Any, made: torch.Tensor) -> None:
        outputs[name] = made

    handles = []
    for path, module in layer.named_modules():
        if path:
            handles.append(module.register_forward_pre_hook(partial(look, path)))
        if path in linears:
            handles.append(module.register_forward_hook(partial(keep, linears[path])))
    try:
        made = run()
    finally:
        for handle in handles:
            handle.remove()
    stream, source = hidden, ""
    found: dict[str, str] = {}
    streams: dict[str, torch.Tensor] = {}
    for path, tensor in [*given, ("", made if isinstance(made, torch.Tensor) else made[0])]:
        for name, output in outputs.items():
            if stream is None or not tensor.shape == output.shape == stream.shape:
                continue
            if name not in found and torch.equal(tensor, stream + output):
                found[name], streams[source] = source, stream
                stream, source = tensor, path
                break
    return made, found, streams
