"""Say of which artifacts a row is, and what an engine does with them."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from fp4convert.engines.versions import Versions, read_versions

FOUR_BIT = ("nvfp4", "mxfp4")
# Of rows: it is read and computes what the artifact says; it does so slowly; it is read and
# computes something else; it is not read.
Effect = Literal["loads", "slow", "garbage", "refuses"]
FAILS: tuple[Effect, ...] = ("garbage", "refuses")
# How anybody came to know: a test here runs the engine; its own loader was run by hand; its
# source, documentation or a thread was read.
Tried = Literal["run", "loaded", "read"]


class Part(NamedTuple):
    """Quantized modules of one kind.

    format  its word: nvfp4, mxfp4, int4, fp8 tensor, fp8 row, fp8 128x128
    """

    format: str
    activations: int
    is_expert: bool


class Contents(NamedTuple):
    """What of an artifact decides which engines load it.

    model      model_type of config.json
    classes    names of classes in config.json
    has_code   config.json names code of the model's own
    names_fused  records say of qkv_proj and gate_up_proj what they say of their parts, as ours do
    findings   codes of inspect's; of a plan those on formats alone
    modules    names of all that are quantized
    fault      the first error that inspect finds of any engine's concern; "" where it is sound
    cache      "fp8" or "nvfp4" where the record asks for such a cache of keys and values
    files      names of the files that hold its weights
    """

    dialect: str
    parts: frozenset[Part]
    model: str = ""
    classes: tuple[str, ...] = ()
    is_diffusers: bool = False
    is_sharded: bool = False
    cache: str | None = None
    has_code: bool = False
    names_fused: bool = True
    findings: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    fault: str = ""


class Condition(NamedTuple):
    """Which artifacts a row is about; what is left out asks nothing.

    formats      of four-bit modules; has_experts, has_others and activations are about these
    models       globs on model_type; not_models: none of these fits
    classes      globs on names of classes
    beside       globs on words of formats that other modules have
    beside_experts  the same, of modules that are experts
    has_experts  some of the modules are experts, or none is
    has_others   some of them are no experts, or none is
    is_mixed     modules have several formats
    findings     codes, of which the artifact has one
    modules      globs on names of modules, of which a quantized one fits
    caches       what the cache of keys and values holds
    files        globs on names of files of weights, of which one fits
    """

    dialects: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    not_models: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    beside_experts: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    activations: int | None = None
    has_experts: bool | None = None
    has_others: bool | None = None
    is_mixed: bool | None = None
    is_diffusers: bool | None = None
    is_sharded: bool | None = None
    names_fused: bool | None = None

    def fits(self, contents: Contents) -> bool:
        """Tell whether an artifact is one of those."""
        wanted = self.formats or FOUR_BIT
        four_bit = [part for part in contents.parts if part.format in wanted]
        words = {part.format for part in contents.parts}
        experts = {part.format for part in contents.parts if part.is_expert}
        is_expert = {part.is_expert for part in four_bit}
        facts = {
            "activations": min((part.activations for part in four_bit), default=16),
            "has_experts": True in is_expert,
            "has_others": False in is_expert,
            "is_mixed": len(words) > 1,
            "is_diffusers": contents.is_diffusers,
            "is_sharded": contents.is_sharded,
            "names_fused": contents.names_fused,
        }
        return (
            bool(four_bit)
            and (not self.dialects or contents.dialect in self.dialects)
            and (not self.models or _fit_any(self.models, (contents.model,)))
            and not _fit_any(self.not_models, (contents.model,))
            and (not self.classes or _fit_any(self.classes, contents.classes))
            and (not self.beside or _fit_any(self.beside, words - set(FOUR_BIT)))
            and (not self.beside_experts or _fit_any(self.beside_experts, experts - set(FOUR_BIT)))
            and (not self.findings or not contents.findings.isdisjoint(self.findings))
            and all(getattr(self, name) in (None, value) for name, value in facts.items())
            and (not self.modules or _fit_any(self.modules, contents.modules))
            and (not self.caches or contents.cache in self.caches)
            and (not self.files or _fit_any(self.files, contents.files))
        )


def _fit_any(globs: Iterable[str], names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


class Row(NamedTuple):
    """One fact: what an engine does with artifacts of a kind.

    says     a predicate whose subject is the engine
    instead  what to do, as a clause; "" where it loads
    source   address of a thread, or package, version and file that was read or run
    tried    how it is known
    proof    the test here that runs it; "" for none
    lines    FILE: TEXT of that package's code, which `make engines` looks for
    """

    condition: Condition
    versions: Versions
    effect: Effect
    says: str
    instead: str
    source: str
    tried: Tried
    proof: str = ""
    lines: tuple[str, ...] = ()


def read_row(table: dict[str, Any]) -> Row:
    """Read a row; TypeError or ValueError for unknown keys or versions."""
    asked = Condition._fields
    condition = Condition(**{key: table.pop(key) for key in asked if key in table})
    versions = read_versions(table.pop("versions", ""))
    return Row(condition=condition, versions=versions, **{"instead": "", **table})
