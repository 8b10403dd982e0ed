"""Refuse options of the Hub where everything lies on this disk."""

from __future__ import annotations

import os

from fp4convert.conversion.work_options import AccessOptions
from fp4convert.errors import InputError
from fp4convert.recipes.options import declared_in


def refuse_idle_options(options: object) -> None:
    """Raise InputError for an option that only the Hub would use.

    What is on this disk is no repository; a name that is nowhere is told of later.
    """
    if not isinstance(options, AccessOptions):
        return
    _refuse_idle_config(options)
    declared = {each.name: each for each in declared_in(type(options))}
    read = [name for name, each in declared.items() if each.option.is_argument]
    if not _are_here(options, read):
        return
    # The source of an artifact is read at its own revision; a token may write, too.
    idle = ["revision"]
    if _are_here(options, ["source"]):
        idle += ["memory", "transport"]
        idle += [] if getattr(options, "push_to_hub", None) else ["token"]
    for name in idle:
        if getattr(options, name) not in ("", declared[name].default):
            given = _given(options, read)
            verb = "is" if len(given) == 1 else "are"
            detail = f"--{name} is for the Hub, and {' and '.join(given)} {verb} here"
            step = f"Leave --{name} out; a repository is named as ORG/NAME."
            raise InputError("idle-option", f"{detail}, on this disk", step)


def _refuse_idle_config(options: AccessOptions) -> None:
    """Raise InputError for --config where nothing on this disk is a GGUF file."""
    named = [each.name for each in declared_in(type(options)) if each.option.is_argument]
    if hasattr(options, "recipe") and hasattr(options, "artifact"):  # reproduce reads a source
        named = ["source"]
    elif hasattr(options, "source") and "source" not in named:  # of an artifact
        named.append("source")
    if options.config is None or not _are_here(options, named):
        return
    from fp4convert.storage.checkpoint_files import GGUF

    given = _given(options, named)
    folders = (os.listdir(place) if os.path.isdir(place) else [place] for place in given)
    if not any(name.endswith(GGUF) for names in folders for name in names):
        detail = f"--config is for GGUF files, and {' and '.join(given)} is none"
        raise InputError("idle-option", detail, "Leave --config out.")


def _are_here(options: AccessOptions, names: list[str]) -> bool:
    """Tell whether all that is named is on this disk."""
    return all(map(os.path.exists, _given(options, names)))


def _given(options: AccessOptions, names: list[str]) -> list[str]:
    """Return what the options of those names name, each of several."""
    found = (getattr(options, name, None) for name in names)
    several = (one if isinstance(one, tuple) else (one,) for one in found)
    return [os.fspath(one) for each in several for one in each if one is not None]
