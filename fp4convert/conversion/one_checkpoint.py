"""Convert one checkpoint: by this process, or on a Ray cluster."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.conversion.quantize import quantize
from fp4convert.engines.files import Engine
from fp4convert.engines.verdicts import Verdict
from fp4convert.errors import shell_line
from fp4convert.execution.folder import OutputFolder
from fp4convert.execution.job import Job, begin, check_output
from fp4convert.execution.plan_file import read_ended_files
from fp4convert.execution.settings import Result, Settings
from fp4convert.numerics.backends import open_backend
from fp4convert.options.arguments import gates_of, one_adapter
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.engine_facts import serve_line, serving_engine
from fp4convert.planning.plan import Plan
from fp4convert.storage.open import absolute
from fp4convert.storage.source import Source

if TYPE_CHECKING:
    from fp4convert.conversion.mixed_precision import Fit
    from fp4convert.engines.gpus import Use


@dataclass(frozen=True)
class Conversion:
    """One checkpoint into one folder; diffusers.py has the same of a pipeline.

    fitted   which formats were chosen for modules, where a size was asked for
    verdicts  of the engines that were asked for, which load it
    uses      kernels on the card of --gpu
    """

    options: QuantizeOptions
    source: Source
    plan: Plan
    fitted: Fit | None = None
    verdicts: tuple[Verdict, ...] = ()
    uses: tuple[Use, ...] = ()

    @cached_property
    def job(self) -> Job:
        """Return what is to be done, made once: a large model's takes seconds."""
        return artifact_job(self.source, self.plan)

    @property
    def warnings(self) -> list[str]:
        return [*self.plan.warnings, *self._more_warnings()]

    def _more_warnings(self) -> list[str]:
        """List warnings that are not the plan's."""
        words = [*self.fitted.words] if self.fitted else []
        if not self.uses:
            return words
        from fp4convert.engines.gpus import find_warnings

        return [*words, *find_warnings(self.uses)]

    def jobs(self) -> dict[str, Job]:
        """Return what writes files, by its folder in the result."""
        return {"": self.job}

    def names(self) -> list[str]:
        """List every file that it writes."""
        manifest = self.job.manifest()
        return [*manifest.files, manifest.last]

    def artifacts(self) -> dict[str, QuantizeOptions]:
        """Return the options of each artifact by folder; "" is the result itself."""
        return {"": self.options}

    def describe(self, settings: Settings) -> dict[str, object]:
        """Return the document of a dry run."""
        from fp4convert.conversion.dry_run import describe_plan

        document = dict[str, Any](describe_plan(self.job, settings))
        target = {"target": self.fitted.as_json()} if self.fitted else {}
        return {
            **document,
            **target,
            "warnings": [*document["warnings"], *self._more_warnings()],
        }

    def check(self, settings: Settings) -> None:
        """Refuse a device that is not here, unless nodes of a cluster work."""
        if self.options.ray is None and settings.device != "auto":  # which is there always
            open_backend(settings.device)

    def check_output(self, settings: Settings) -> None:
        """Raise what `begin` raises of the output folder; change nothing."""
        check_output(self.job, self.options.folder, settings)

    def begin(self, settings: Settings) -> OutputFolder:
        """Return the output folder with the plan in it."""
        return begin(self.job, self.options.folder, settings)

    def carry_out(self, settings: Settings) -> Result:
        """Convert; raise what `quantize` and `quantize_together` raise."""
        output = self.options.folder
        if self.options.ray is None:
            return quantize(self.source, self.plan, output, settings)
        from fp4convert.conversion.ray_workers import options_for_nodes, quantize_together

        formats = self.fitted.rules if self.fitted else ()
        order = options_for_nodes(self.options, self.source), formats
        return quantize_together(self.options.ray, order, self.job, output, settings)

    def next_steps(self, is_absolute: bool = False) -> list[str]:
        """Return commands to run once it is whole; absolute ones for any folder."""
        output, original = self.options.place, self.options.source
        if self.options.subfolder and not self.source.is_streamed:
            original = Path(original, self.options.subfolder)
        if is_absolute:
            original = absolute(original)
            output = output if self.options.no_keep else Path(os.path.abspath(output))
        words: list[object] = ["fp4convert", "verify", output]
        # Of one GGUF file in a folder there, the record does not find the folder.
        is_found = self.source.checkpoint.repo == self.options.source
        if not self.options.subfolder or not self.source.is_streamed or is_found:
            words += ["--source", original]
            if (config := self.options.config) is not None:
                words += ["--config", absolute(config) if is_absolute else config]
            words += ["--follow-links"] if self.options.follow_links else []
            for adapter in one_adapter(self.options.lora):
                words += ["--lora", absolute(adapter) if is_absolute else adapter]
            gates = gates_of(self.options.min_sqnr, self.options.max_nmse)
            words += [word for name, limit in gates.items() for word in (name, f"{limit:g}")]
        checkpoint, folder = self.source.checkpoint, str(output)
        # Nothing here can be loaded, or engines refuse it as they do its source.
        if self.options.no_keep or self._server is None or self.plan.judged.faults:
            return [shell_line(*words)]
        config_words = self._config_words(is_absolute)
        line = serve_line(self._server, self.plan, checkpoint, folder, config_words)
        return [shell_line(*words), *([line] if line else [])]

    @cached_property
    def _server(self) -> Engine | None:
        """Return the engine of --for, or the first that serves the result."""
        if self.verdicts:
            return self.verdicts[0].engine
        return serving_engine(self.plan, self.source.checkpoint)

    def _config_words(self, is_absolute: bool) -> str:
        """Name the source's configuration in arguments of Python."""
        source, subfolder = self.options.source, self.options.subfolder or ""
        place = os.fspath(absolute(source) if is_absolute else source)
        if not self.source.is_streamed:
            return f"config={json.dumps(os.path.join(place, subfolder))}"
        words = f"config={json.dumps(place)}"
        return f"{words}, subfolder={json.dumps(subfolder)}" if subfolder else words

    def ended_files(self) -> dict[str, str]:
        """Return the sha256 of every file, once it is done."""
        return read_ended_files(self.options.folder)
