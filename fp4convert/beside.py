"""An artifact beside its source: every quantized layer measured, and every tensor that was kept compared.

What is found is told, not judged: verification.py holds it to gates, comparison.py puts it beside another artifact's.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fp4convert.artifact import Artifact
from fp4convert.backends import processors
from fp4convert.calibration_file import Calibration
from fp4convert.codings.folded import foldings_of
from fp4convert.distances import Distance, Pair, measure, pair_up
from fp4convert.inputs import Inputs
from fp4convert.linears import Linears
from fp4convert.reading import Finding
from fp4convert.shard import TensorRef
from fp4convert.sources import Source, stopping
from fp4convert.unfolding import check_columns, check_vector, unfolded

PART_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Outputs:
    """That the errors of outputs are measured, too.

    calibration  whose inputs count; None for Gaussians of unit variance
    """

    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """An artifact beside its source, of which no weight was read yet.

    originals  the linear layers of the source, under the folds of the artifact
    pairs      those that the artifact stores otherwise
    findings   on linear layers that the source has not
    """

    artifact: Artifact
    source: Source
    originals: Linears
    pairs: list[Pair]
    findings: list[Finding]
    outputs: Outputs | None

    def shares_any(self) -> bool:
        """Whether the source holds any four-bit module of the artifact."""
        return any(pair.ours.module in self.artifact.modules for pair in self.pairs)

    def compare(self) -> tuple[dict[str, Distance], list[Finding]]:
        """The error of every quantized module, and findings where the artifact holds what is not the source's."""
        copied, findings = self._copied(), list(self.findings)
        own = {ref.name for pair in self.pairs for ref in (*pair.ours.refs, *pair.ours.idle)} | own_names(self.artifact)
        for name in sorted(self.artifact.tensors.keys() - own - {ref.name for ref in copied}):
            findings.append(Finding("error", "tensor-foreign", name, "it comes from no tensor of the source"))
        found: dict[str, Distance] = {}
        for shard in self.source.checkpoint.shards:
            here = [pair for pair in self.pairs if pair.theirs.refs[0].file == shard.file]
            threads = ThreadPoolExecutor(processors())
            with self.source.stream(shard.file), threads as pool, stopping(self.source, self.artifact.source):
                kept = (_compare_kept(self, ref) for ref in copied if ref.file == shard.file)
                findings += (finding for finding in kept if finding)
                measured = pool.map(lambda pair: measure(self.artifact, self.source, pair, self._inputs(pair)), here)
                for pair, distance in zip(here, measured, strict=True):
                    if pair.ours.coding.is_packed:
                        found[pair.theirs.name] = distance
                        findings += _check_folded(self.artifact, self.source, pair)
                    elif distance.sums.max_abs != 0:
                        detail = "it was kept, but its values are not the source's"
                        findings.append(Finding("error", "kept-differs", pair.ours.refs[0].name, detail))
        return {pair.theirs.name: found[pair.theirs.name] for pair in self.pairs if pair.theirs.name in found}, findings

    def _inputs(self, pair: Pair) -> Inputs | None:
        is_asked = self.outputs and pair.ours.coding.is_packed
        return Inputs.of(self.outputs.calibration, pair.theirs.module) if self.outputs and is_asked else None

    def _copied(self) -> list[TensorRef]:
        """The tensors of the source that an artifact holds as they are."""
        replaced = {ref.name for pair in self.pairs for ref in (pair.theirs.home, *pair.theirs.refs, *pair.theirs.idle)}
        replaced |= {ref.name for ref in self.originals.idle}
        return [ref for ref in self.source.checkpoint.tensors if ref.name not in replaced]


def stand_beside(artifact: Artifact, source: Source, outputs: Outputs | None = None) -> Beside:
    """Both, linear layer by linear layer.

    Raises  InputError for a source that is packed in a way that cannot be read, and a calibration that is not of this source
    """
    originals = unfolded(artifact, source)
    pairs, findings = pair_up(artifact, originals.of)
    if outputs and outputs.calibration:
        outputs.calibration.check(source, [pair.theirs for pair in pairs if pair.ours.coding.is_packed])
    return Beside(artifact, source, originals, pairs, findings, outputs)


def _check_folded(artifact: Artifact, source: Source, pair: Pair) -> Iterator[Finding]:
    if foldings_of(pair.theirs) and pair.ours.module in artifact.modules:
        yield from check_columns(pair.ours.module, artifact.decode(pair.ours.module), pair.theirs, source)


def own_names(artifact: Artifact) -> set[str]:
    """What holds codes, scales and their companions in an artifact: the tensors that are not kept ones."""
    names = {ref.name for module in artifact.packed.values() for ref in (*module.refs, *module.companions)}
    return names | artifact.cache_scales(artifact.spelling).keys()


def _compare_kept(beside: Beside, ref: TensorRef) -> Finding | None:
    """A finding where a tensor of the source that was not quantized is another one in the artifact."""
    artifact, source = beside.artifact, beside.source
    if ref.name in beside.originals.vectors:
        return check_vector(artifact, beside.originals.vectors[ref.name], source)
    kept = artifact.tensors.get(ref.name)
    if kept is None or (kept.dtype, kept.shape) != (ref.dtype, ref.shape):
        return Finding("error", "kept-missing", ref.name, "the source has it, the artifact has it not, or otherwise")
    if any(artifact.source.read_range(kept, *part) != source.read_range(ref, *part) for part in parts(ref)):
        return Finding("error", "kept-differs", ref.name, "it was kept, but its bytes are not the source's")
    return None


def parts(ref: TensorRef) -> Iterator[tuple[int, int]]:
    """Ranges of a tensor's bytes that are held at once."""
    return ((start, min(start + PART_NBYTES, ref.nbytes)) for start in range(0, ref.nbytes, PART_NBYTES))
