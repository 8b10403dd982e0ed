"""Open artifacts, and weights of other tools, to compare with a source.

A GGUF file is read as the folder that it was made from: its tensors have the source's names, and
config.json is the source's.
"""

from __future__ import annotations

from collections.abc import Callable

from fp4convert.checkpoint.artifact import (
    Artifact,
    is_artifact,
    open_unfinished,
    read_artifact,
    read_clues,
)
from fp4convert.checkpoint.linears import find_linears
from fp4convert.recipes.recipe import model_recipe
from fp4convert.storage.source import Access, Source

GGUF = "gguf"


def open_candidate(reference: str, access: Access, original: Callable[[], Source]) -> Artifact:
    """Open an artifact, or weights of other tools as one of foreign layers.

    original  opens the source
    Raises    InputError for weights that nothing here reads, or that nobody quantized
    """
    opened, called = open_unfinished(reference, access)
    source = in_names_of(opened, original)
    clues = read_clues(source)
    if not is_artifact(source, clues):
        linears = find_linears(source, model_recipe(source.checkpoint.config)).of
        packed = {name: linear for name, linear in linears.items() if linear.coding.is_packed}
        foreign = {name: linear for name, linear in packed.items() if linear.coding.format is None}
        if foreign:
            is_mlx = isinstance(clues.config.get("quantization"), dict)
            maker = str(clues.record.get("quant_method") or ("mlx" if is_mlx else GGUF))
            tensors = dict(clues.tensors)
            return Artifact(source, clues, (), maker, {}, tensors, {}, {}, (), None, foreign)
    return read_artifact(source, called)


def in_names_of(candidate: Source, original: Callable[[], Source]) -> Source:
    """View a GGUF file with the names of its source, unless that is one, too.

    Raises  InputError for architectures whose names in GGUF files are not known
    """
    if not _is_gguf(candidate):
        return candidate
    from fp4convert.storage.gguf_folder import as_folder

    source = original()
    return candidate if _is_gguf(source) else as_folder(candidate, source)


def _is_gguf(source: Source) -> bool:
    return any(shard.frame.container == GGUF for shard in source.checkpoint.shards)
