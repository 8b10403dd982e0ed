"""inspect(), verify() and compare()."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fp4convert.checkpoint.artifact import open_artifact
from fp4convert.commands.options import (
    AccessOptions,
    Reference,
    access_of,
    as_path,
    check_words,
    ignore,
    original_access,
)
from fp4convert.process import keeping_nothing
from fp4convert.report.sarif import SARIF, clear_sarif, write_sarif
from fp4convert.report.user_files import check_apart
from fp4convert.storage.open import open_original
from fp4convert.storage.source import Source, subfolder_of, uncollected

if TYPE_CHECKING:
    from fp4convert.quality.verification import Verified


class InspectOptions(AccessOptions, total=False):
    """What `inspect` is told beside artifact and source.

    sarif  file of SARIF 2.1.0 to write with what was found
    """

    sarif: Reference | None


class CompareOptions(AccessOptions, total=False):
    """What `compare` is told beside both artifacts and the source; a revision is that of both artifacts.

    calibration  output errors are for the inputs that `calibrate` saw of the source, not for random ones
    """

    calibration: Reference | None


class VerifyOptions(InspectOptions, total=False):
    """What `verify` is told beside artifact, source and gates.

    outputs           measure what every linear layer answers, for random inputs
    calibration       the same for the inputs that `calibrate` saw of the source
    max_output_error  a layer's output error above this is a finding; 0.1 is 10 %
    report            file of HTML to write on what was lost
    """

    outputs: bool
    calibration: Reference | None
    max_output_error: float | None
    report: Reference | None


@keeping_nothing()
@uncollected()
def inspect(
    artifact: Reference,
    *,
    source: Reference | None = None,
    full: bool = False,
    **options: Unpack[InspectOptions],
) -> dict[str, Any]:
    """What an artifact is and whether it is healthy, from its headers, records and scales: the command `inspect`.

    artifact  a folder, one file, or ORG/NAME on the Hub, whoever made it
    source    the original checkpoint, which decides what statistics cannot
    full      read every block scale, however many
    Returns   what `inspect --json` prints; `healthy` is False where the command exits with 6
    Raises    Fp4Error: InputError where it is no artifact, SourceError and AccessError from the Hub
    """
    from fp4convert.quality import inspection

    check_words(options, InspectOptions)
    sarif = as_path(options.get("sarif"))
    check_apart({SARIF: sarif}, _folder_of(artifact, options))
    if sarif:
        clear_sarif(sarif)
    opened = open_artifact(os.fspath(artifact), access_of(options))
    description = inspection.inspect(opened, _original(source, options), full)
    if sarif:
        write_sarif(sarif, opened, description["findings"])
    return description


@keeping_nothing()
def verify(
    artifact: Reference,
    *,
    source: Reference | None = None,
    min_sqnr: float | None = None,
    max_nmse: float | None = None,
    **options: Unpack[VerifyOptions],
) -> Verified:
    """Every file hashed again, every scale read; with a source, every tensor measured: the command `verify`.

    artifact  as `inspect` takes it
    source    the original checkpoint
    min_sqnr  a tensor's SQNR below so many dB is a finding
    max_nmse  a tensor's normalised squared error above this is a finding
    Returns   tensors, summary and findings; `passed` is False where the command exits with 6
    Raises    Fp4Error, as `inspect` does; InputError for a gate without a source
    """
    from fp4convert.calibration.statistics import open_calibration
    from fp4convert.quality import verification
    from fp4convert.quality.source_compare import Outputs
    from fp4convert.report.html import PAGE, check_page, save_page

    check_words(options, VerifyOptions)
    page = as_path(options.get("report"))
    sarif = as_path(options.get("sarif"))
    check_apart({PAGE: page, SARIF: sarif}, _folder_of(artifact, options))
    if page:
        check_page(page)
    if sarif:
        clear_sarif(sarif)
    calibration = as_path(options.get("calibration"))
    known = None if calibration is None else open_calibration(calibration)
    opened, original = (
        open_artifact(os.fspath(artifact), access_of(options)),
        _original(source, options),
    )
    asked = Outputs(known) if options.get("outputs") or known else None
    gate = verification.Gate(min_sqnr, max_nmse, options.get("max_output_error"))
    verified = verification.verify(opened, original, gate, asked)
    if page:
        options.get("tell", ignore)(save_page(page, opened, original, verified))
    if sarif:
        write_sarif(sarif, opened, verified.as_json()["findings"])
    return verified


@keeping_nothing()
def compare(
    a: Reference, b: Reference, *, source: Reference, **options: Unpack[CompareOptions]
) -> dict[str, Any]:
    """Two artifacts side by side against one source, tensor by tensor: the command `compare`.

    a, b     as `inspect` takes them, of any formats, dialects and makers
    source   the original checkpoint
    Returns  what `compare --json` prints
    Raises   Fp4Error, as `inspect` does; InputError for an artifact that is not sound, or of another source
    """
    from fp4convert.calibration.statistics import open_calibration
    from fp4convert.quality import comparison
    from fp4convert.quality.source_compare import Outputs

    check_words(options, CompareOptions)
    known = (
        None
        if (calibration := as_path(options.get("calibration"))) is None
        else open_calibration(calibration)
    )
    pair = (
        open_artifact(os.fspath(a), access_of(options)),
        open_artifact(os.fspath(b), access_of(options)),
    )
    return comparison.compare(
        pair, open_original(os.fspath(source), original_access(options)), Outputs(known)
    )


def _folder_of(artifact: Reference, options: AccessOptions) -> Path | None:
    """The folder of an artifact on this disk; None for a single file, whose neighbours are not its own, and for the Hub."""
    return Path(artifact, subfolder_of(access_of(options))) if os.path.isdir(artifact) else None


def _original(source: Reference | None, options: AccessOptions) -> Source | None:
    return open_original(os.fspath(source), original_access(options)) if source else None
