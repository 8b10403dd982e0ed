"""Names that would be scripts, markup or templates where they are not plain text, in a checkpoint
like any other.
"""

from __future__ import annotations

from pathlib import Path

from checkpoints import Tensor, run, weight, write_single

NAMES = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(3)>",
    "<a href='javascript:alert(4)'>q</a><b>bold</b>",
    "&lt;i&gt;&#60;u&#62;",
    "%{x}{{data}}${alert(5)}$$&$1\\u003c",
    "]]></style>\"'`",
    "__proto__",
)


def name_of(text: str) -> str:
    """A linear layer of layer 0 with that text in its name."""
    return f"model.layers.0.{text}.o_proj.weight"


def make_hostile(folder: Path) -> tuple[Path, Path]:
    """(source, artifact): a tensor for each name, in folders that are called after one, too."""
    tensors: dict[str, Tensor] = {name_of(text): weight(seed) for seed, text in enumerate(NAMES)}
    source = write_single(folder / "<b>source<svg onload=alert(6)>", tensors)
    artifact = folder / "<i>artifact<svg onload=alert(7)>"
    assert run("quantize", source, "--format", "nvfp4", "-o", artifact, "-q").code == 0
    return source, artifact
