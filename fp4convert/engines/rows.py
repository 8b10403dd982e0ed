"""Match engine rows against an artifact."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from fnmatch import translate
from functools import cache
from typing import Any, Literal, NamedTuple

from fp4convert.engines.versions import Versions, read_versions

FOUR_BIT = ("nvfp4", "mxfp4")
# Effects: the engine reads the artifact and computes its values; it does so slowly; it computes
# other values; it does not read it.
Effect = Literal["loads", "slow", "garbage", "refuses"]
FAILS: tuple[Effect, ...] = ("garbage", "refuses")
# Evidence: a test here runs the engine; somebody ran its loader by hand; somebody read its source,
# documentation or a thread.
Tried = Literal["run", "loaded", "read"]


class Part(NamedTuple):
    """Quantized modules of one format.

    format  a word: nvfp4, mxfp4, int4, fp8 tensor, fp8 row, fp8 128x128
    """

    format: str
    activations: int
    is_expert: bool

    @property
    def word(self) -> str:
        """Return the format, of experts as "experts-nvfp4"."""
        return ("experts-" if self.is_expert else "") + self.format.replace(" ", "-")


class Contents(NamedTuple):
    """Facts of an artifact that decide which engines load it.

    model      model_type of config.json
    classes    names of classes in config.json
    inner      types of models inside the class that config.json chooses: "text_config=llama"
    is_stacked  experts lie in stacks, not one by one
    has_code   config.json names Python code beside the weights
    names_fused  records name qkv_proj and gate_up_proj beside their parts, as ours do
    findings   codes that inspect reports; of a plan only those about formats
    modules    names of all quantized modules
    fault      the first error of inspect that concerns engines; "" without one
    cache      "fp8" or "nvfp4" where the record asks for such a KV cache
    files      names of the files that hold its weights
    """

    dialect: str
    parts: frozenset[Part]
    model: str = ""
    classes: tuple[str, ...] = ()
    inner: str = ""
    is_diffusers: bool = False
    is_sharded: bool = False
    is_stacked: bool = False
    cache: str | None = None
    has_code: bool = False
    names_fused: bool = True
    findings: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    fault: str = ""

    @property
    def formats(self) -> str:
        """Return formats, bits of activations and the cache as a word."""
        words = {f"{part.word}/{part.activations}" for part in self.parts}
        return "+".join([*sorted(words), *([f"kv-{self.cache}"] if self.cache else [])])


class Condition(NamedTuple):
    """Artifacts that a row is about; an empty key fits every artifact.

    formats      of four-bit modules; has_experts, has_others and activations look at these
    models       globs on model_type; not_models: none of these fits
    classes      globs on names of classes
    beside       globs on formats of other modules
    beside_experts  globs on formats of other modules that are experts
    has_experts  whether any of the modules is an expert
    has_others   whether any of them is no expert
    is_mixed     whether modules have several formats
    findings     codes; the artifact has at least one
    modules      globs on names; at least one quantized module fits; not_modules: none of these fits
    caches       formats of the KV cache
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
    not_modules: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    activations: int | None = None
    has_experts: bool | None = None
    has_others: bool | None = None
    is_mixed: bool | None = None
    is_diffusers: bool | None = None
    is_sharded: bool | None = None
    is_stacked: bool | None = None
    names_fused: bool | None = None

    def fits(self, contents: Contents) -> bool:
        """Return whether an artifact meets every key."""
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
            "is_stacked": contents.is_stacked,
            "names_fused": contents.names_fused,
        }
        return (
            bool(four_bit)
            and (not self.dialects or contents.dialect in self.dialects)
            and (not self.models or fit_any(self.models, (contents.model,)))
            and not fit_any(self.not_models, (contents.model,))
            and (not self.classes or fit_any(self.classes, contents.classes))
            and (not self.beside or fit_any(self.beside, words - set(FOUR_BIT)))
            and (not self.beside_experts or fit_any(self.beside_experts, experts - set(FOUR_BIT)))
            and (not self.findings or not contents.findings.isdisjoint(self.findings))
            and all(getattr(self, name) in (None, value) for name, value in facts.items())
            and (not self.modules or fit_any(self.modules, contents.modules))
            and not fit_any(self.not_modules, contents.modules)
            and (not self.caches or contents.cache in self.caches)
            and (not self.files or fit_any(self.files, contents.files))
        )


def fit_any(globs: Iterable[str], names: Collection[str]) -> bool:
    """Return whether a glob fits a name."""
    return any(any(map(_matcher(glob), names)) for glob in globs)


@cache
def _matcher(glob: str) -> Callable[[str], re.Match[str] | None]:
    return re.compile(translate(glob)).match


class Row(NamedTuple):
    """A fact about an engine and a kind of artifacts.

    says     a predicate whose subject is the engine
    instead  advice, as a clause; "" where it loads
    source   address of a thread, or package, version and file that was read or run
    tried    the evidence
    proof    the test here that runs it; "" for none
    ran      the classes, or types of models, that this test runs
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
    ran: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


def read_row(table: dict[str, Any]) -> Row:
    """Read a row; TypeError or ValueError for unknown keys or versions."""
    keys = [key for key in Condition._fields if key in table]
    condition = Condition(**{key: table.pop(key) for key in keys})
    versions = read_versions(table.pop("versions", ""))
    return Row(condition=condition, versions=versions, **{"instead": "", **table})
