"""Plan everything that one quantize does, for a checkpoint or a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fp4convert.conversion.diffusers import PipelineConversion, named_component
from fp4convert.conversion.mixed_precision import Measuring, fit
from fp4convert.conversion.one_checkpoint import Conversion
from fp4convert.conversion.quantization import prepare_quantize
from fp4convert.conversion.ray_workers import Errand
from fp4convert.errors import InputError
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.settings import Result, Settings
from fp4convert.planning.steps import Plan
from fp4convert.progress import Phases
from fp4convert.storage.open import access_to, open_with_components
from fp4convert.storage.source import Source


class Work(Protocol):
    """Everything that one `quantize` does.

    errand  what was asked for
    source  what it is made from, as a person names it
    plan    of all tensors
    """

    @property
    def errand(self) -> Errand: ...

    @property
    def source(self) -> Source: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def warnings(self) -> list[str]:
        """What a person should know before."""

    def names(self) -> list[str]:
        """Every file that it writes."""

    def errands(self) -> dict[str, Errand]:
        """What makes each artifact, by its folder in the result; the result itself has none."""

    def describe(self, settings: Settings) -> dict[str, object]:
        """The document of `quantize --dry-run --json`; DeviceError for a device that is not there."""

    def check(self, settings: Settings) -> None:
        """Nothing; raises what is wrong with the device, the cluster or the part of the work that is asked for."""

    def begin(self, settings: Settings) -> OutputFolder:
        """The output folder with the plan in it; raises what carry_out raises before it works."""

    def carry_out(self, settings: Settings) -> Result:
        """Do it; raises what quantization.quantize and ray_workers.quantize_together raise."""

    def ended_files(self) -> dict[str, str]:
        """The sha256 of every file, once it is done."""


def prepare(
    errand: Errand, ray: str | None = None, phases: Phases | None = None, may_write: bool = True
) -> Work:
    """The work that the errand's source needs, planned; where it has a goal, after a pass that measures the weights.

    ray        address of the cluster that does it; None for this process
    may_write  what is measured is kept in the output folder
    Raises     what open_source, fit and prepare_quantize raise
    """
    source, components = open_with_components(errand.reference, errand.access)
    if not components:
        found = None
        if errand.goal:
            measuring = Measuring(
                errand.output, may_write, errand.device, errand.workers, phases or Phases()
            )
            found = fit(source, errand.request, errand.goal, measuring)
            errand = replace(errand, formats=found.rules)
        return Conversion(
            errand, source, prepare_quantize(source, errand.request, errand.formats), ray, found
        )
    if errand.goal:
        detail = f"{errand.reference} is a pipeline of several checkpoints; expected one, for a size that is asked for"
        source.stop()
        raise InputError(
            "target-pipeline", detail, f"Name one: --subfolder {next(iter(components))}."
        )
    conversions = {}
    for name, component in components.items():
        own = replace(
            errand, access=access_to(errand.access, source, name), output=errand.output / name
        )
        with named_component(name):
            conversions[name] = Conversion(
                own, component, prepare_quantize(component, errand.request), ray
            )
    return PipelineConversion(errand, source, conversions)
