"""Read codes and scales of single modules: open_artifact()."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fp4convert.checkpoint import artifact as checkpoint_artifact
from fp4convert.checkpoint.soundness import refuse_unsound
from fp4convert.commands.tensors import check_here, kind_of, layout_named
from fp4convert.errors import InputError, did_you_mean
from fp4convert.numerics import scale_layouts
from fp4convert.numerics.matrices import Quantized
from fp4convert.options.looking import InspectOptions

if TYPE_CHECKING:
    from fp4convert.recipes.options import Reference


class OpenArtifact(Mapping[str, Quantized]):
    """The four-bit modules of an artifact by name, read when asked for."""

    def __init__(self, artifact: checkpoint_artifact.Artifact) -> None:
        self._artifact = artifact
        self.dialect = artifact.dialect

    def __getitem__(self, module: str) -> Quantized:
        if module not in self._artifact.modules:
            raise KeyError(f"{module}{did_you_mean(module, self)}")
        blocks = self._artifact.decode(module)
        return blocks.rows(0, blocks.shape[0]).shaped()

    def __iter__(self) -> Iterator[str]:
        return iter(self._artifact.modules)

    def __len__(self) -> int:
        return len(self._artifact.modules)


def open_artifact(
    artifact: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
) -> OpenArtifact:
    """Open an artifact of any maker, to read single modules.

    artifact  a folder, one file, or ORG/NAME on the Hub
    Returns   a mapping from names of modules to Quantized, (rows, columns) each: codes, linear
              block scales and the stored global scale, as dequantize_tensor takes them
    Raises    Fp4Error as `inspect` does; InputError where it is not sound
    """
    options = InspectOptions(artifact, revision=revision, subfolder=subfolder, token=token)
    opened = checkpoint_artifact.open_artifact(os.fspath(options.artifact), options.access())
    refuse_unsound(opened)
    return OpenArtifact(opened)


def arrange_scales(q: Quantized, scale_layout: str) -> NDArray[np.uint8]:
    """Return the block scales in the order that a kernel reads.

    scale_layout  linear, 128x4, 8x4, deepgemm or k_major, as docs/bytes.md draws them
    Returns       the bytes, flat, padded with zeros to whole tiles
    Raises        InputError for another layout, and for what is no Quantized
    """
    if not isinstance(q, Quantized):
        raise InputError("tensor-type", f"a {kind_of(q)} is given; expected a Quantized")
    layout = layout_named(scale_layout)
    return np.frombuffer(scale_layouts.arrange_scales(check_here(q), layout), np.uint8)
