"""Lay modules of an FP8 checkpoint over those of a source.

Names and shapes are compared here, before anything is written.
"""

from __future__ import annotations

import os
from dataclasses import replace

from fp4convert.checkpoint.encodings.base import Base, Linear, is_fp8
from fp4convert.checkpoint.encodings.fp8 import Fp8
from fp4convert.checkpoint.encodings.from_base import SAME_MODEL, FromBase
from fp4convert.checkpoint.linears import Linears, find_linears
from fp4convert.errors import InputError
from fp4convert.progress import count_text
from fp4convert.recipes.recipe import model_recipe
from fp4convert.storage.joined import JoinedSource
from fp4convert.storage.open import open_source, read_reference
from fp4convert.storage.safetensors import TensorRef
from fp4convert.storage.source import Access, Source

OPTION = "--base"
PREFIX = "base:"  # of the base's files, which may be named as the source's


def open_base(reference: str | os.PathLike[str], access: Access) -> Source:
    """Open the checkpoint of that name; `access` has the token."""
    place = read_reference(os.fspath(reference))
    how = replace(access, revision=place.revision, subfolder=place.subfolder)
    return open_source(place.reference, replace(how, output=None, config=None))


def graft(source: Source, linears: Linears, base: Source) -> tuple[Source, Linears]:
    """Lay the base's modules in eight bits over those of the source.

    Raises  InputError where the source is quantized, or the base is of another model
    """
    if linears.is_packed:
        packed = next(one for one in linears.of.values() if one.coding.is_packed)
        detail = f"{packed.name} of {source.name} is {packed.coding.word}; {OPTION} expects floats"
        step = f"Leave {OPTION} out: --keep-packed keeps what is quantized already."
        raise InputError("base-mismatch", detail, step, packed.name)
    theirs = find_linears(base, model_recipe(base.checkpoint.config)).of
    eights = {module: one for module, one in theirs.items() if is_fp8(one) and len(one.refs) > 1}
    if not eights:
        detail = f"{OPTION} {base.name} has no module in FP8 or MXFP8 with its scales"
        raise InputError("base-mismatch", f"{detail}; expected some", SAME_MODEL)
    both = {module: eight for module, eight in eights.items() if module in linears.of}
    for module in both or eights:
        found, expected = eights[module].shape, linears.of.get(module)
        if expected is None or expected.shape != found:
            here = "nothing of that name" if expected is None else f"{list(expected.shape)}"
            detail = (
                f"{OPTION} {base.name}: {module} is {list(found)}, and {source.name} has {here}"
            )
            raise InputError("base-mismatch", f"{detail}; expected one model", SAME_MODEL, module)
    of = dict(linears.of)
    for module, eight in both.items():
        of[module] = of[module]._replace(eight=_laid_over(of[module], eight, base.name))
    taken = tuple(sorted((module, one.coding.word, one.shape) for module, one in both.items()))
    own = base.checkpoint
    notes = linears.notes
    if len(both) < len(eights):
        left = [module for module in eights if module not in both]
        note = f"{count_text(len(left), 'module')} of {base.name}, the first {left[0]!r}"
        notes = (*notes, f"{note}, are not taken: {source.name} does not have them")
    described = Base(base.name, own.repo, own.revision, taken)
    joined = JoinedSource(source, base, PREFIX)
    return joined, replace(linears, of=of, notes=notes, base=described)


def _laid_over(floats: Linear, eight: Linear, base: str) -> Linear:
    """Return the base's linear layer; the source's tensor comes first."""

    def there(refs: tuple[TensorRef, ...]) -> tuple[TensorRef, ...]:
        return tuple([ref._replace(file=PREFIX + ref.file) for ref in refs])

    if not isinstance(eight.coding, Fp8):
        raise RuntimeError(f"{eight.module} is {eight.coding.word}")
    moved = eight._replace(refs=there(eight.refs), idle=there(eight.idle))
    coding = FromBase(moved, floats, eight.coding, base)
    refs = (*floats.refs, *moved.refs)
    return floats._replace(coding=coding, refs=refs, idle=moved.idle)
