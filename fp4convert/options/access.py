"""Declare how commands read and work; refuse options without effect.

Of these options only the revision and the subfolder change bytes of a result.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fp4convert.errors import InputError, shell_line
from fp4convert.progress import Phases
from fp4convert.recipes.options import (
    DEVICE,
    HUB,
    MACHINES,
    OUTPUT,
    TARGET,
    Declared,
    Option,
    Reference,
    declared_in,
    take_words,
)

if TYPE_CHECKING:  # what commands load when they run
    from fp4convert.execution.settings import Settings
    from fp4convert.storage.source import Access

DEVICES = "[auto|cpu|cuda|cuda:N]"  # as --help shows them
LONGEST_NAME = 255  # bytes of a file's name on any disk
MOST_MEMORY = 1e6  # GB; inf, too, means no limit


def ignore(line: str) -> None:
    """Do nothing with a line for people."""


def read_gigabytes(text: str) -> float:
    """Read 24, "24GB", "24G" or "22.4 GiB" as GB, or raise ValueError."""
    number = text.strip().lower()
    for suffix, unit in (("gib", 1.024**3), ("gb", 1.0), ("g", 1.0)):
        if number.endswith(suffix):
            return float(number.removesuffix(suffix)) * unit
    return float(number)


def as_nbytes(gigabytes: float, what: str = "memory") -> int:
    """Return bytes for GB; inf means no limit."""
    if not gigabytes >= 0:
        raise InputError(
            "usage", f"{gigabytes:g} GB of {what}; expected 0 or more", "Give a number of GB."
        )
    return int(min(gigabytes, MOST_MEMORY) * 10**9)


def take_references(options: "AccessOptions") -> None:
    """Read ~ and addresses of the Hub in the references of options.

    Raises  InputError for an empty name or one that is too long, and for an address whose revision
            or folder contradicts another option
    """
    # The subfolder first: addresses are compared with its one spelling.
    for each in sorted(declared_in(type(options)), key=lambda each: each.name != "subfolder"):
        given = getattr(options, each.name)
        if each.type == Iterable[Reference]:
            several = (given,) if isinstance(given, str | os.PathLike) else given
            setattr(options, each.name, tuple(_take_one(options, each, one) for one in several))
        elif given is not None and (
            each.type in (Reference, Reference | None) or each.name == "subfolder"
        ):
            setattr(options, each.name, _take_one(options, each, given))


def _take_subfolder(given: str) -> str | None:
    """Spell a subfolder one way; None for the source itself."""
    from fp4convert.storage.source import Access, subfolder_of

    return subfolder_of(Access(subfolder=given)) or None


def _take_one(options: "AccessOptions", each: Declared, given: Reference) -> Reference | None:
    """Return the place of a reference; set revision and subfolder of it."""
    text, flag = os.fspath(given), f"--{each.name.replace('_', '-')}"
    is_argument = each.option.is_argument
    if not text and not is_argument:
        raise InputError("usage", f"{flag} is empty", "Give a name, or leave it out.")
    longest = max(len(os.fsencode(part)) for part in text.split("/"))
    if longest > LONGEST_NAME and each.name != "output":  # of an output, whoever makes it tells
        found = f"{text[:60]}... has a name of more than {LONGEST_NAME} bytes"
        code = "no-source" if is_argument else "usage"
        step = "" if is_argument else f"Check {flag}."
        raise InputError(code, f"{found}, more than disks allow", step)
    if each.name == "subfolder":
        return _take_subfolder(text)
    if not isinstance(given, str):
        return given
    if not given.startswith(("~", "http")) and not given.endswith("/"):
        return given  # nearly always
    from fp4convert.storage.open import read_reference

    place = read_reference(given)
    repository = shell_line(place.reference)
    folder = place.subfolder and _take_subfolder(place.subfolder)
    for name, value in (("revision", place.revision), ("subfolder", folder)):
        if not value:
            continue
        detail = f"{given} names the {name} {value}"
        if not is_argument:
            step = f"Name the repository: {repository}"
            raise InputError("usage", f"{detail}, which {flag} does not take", step)
        if each.option.is_several:
            detail = f"{detail}, and --{name} is that of all artifacts; expected ORG/NAME"
            step = f"Name the repository, {repository}, or a folder with its files."
            raise InputError("usage", detail, step)
        if (known := getattr(options, name)) not in (None, value):
            detail = f"{detail}, and {known} is given; expected one of them"
            raise InputError("usage", detail, f"Leave --{name} out.")
        setattr(options, name, value)
    return place.reference


Force = Annotated[
    bool,
    Option(
        "Replace what an earlier run of fp4convert left in the output folder.",
        panel=OUTPUT,
        is_rare=True,
    ),
]


Token = Annotated[
    str | None,
    Option(
        "Access token. Better: hf auth login. [env: HF_TOKEN]",
        panel=HUB,
        value="<token>",
        is_rare=True,
    ),
]


@dataclass(kw_only=True, eq=False, repr=False)
class AccessOptions:
    """How sources and artifacts are found and read.

    tell  gets lines for people about the progress of the work
    """

    revision: Annotated[
        str | None,
        Option("Branch, tag or commit. Default: main.", panel=HUB, value="<name>", is_rare=True),
    ] = None
    subfolder: Annotated[
        str | None,
        Option("Subfolder that holds the checkpoint.", panel=HUB, value="<path>", is_rare=True),
    ] = None
    token: Token = None
    memory: Annotated[
        float,
        Option(
            "GB of memory at most, unless one scale group needs more.",
            least=0,
            panel=HUB,
            value="<gb>",
            is_rare=True,
        ),
    ] = 1.0
    config: Annotated[
        Reference | None,
        Option(
            "Folder with the config.json of a GGUF file's model: the file is read as safetensors.",
            panel=TARGET,
            value="<dir>",
            is_rare=True,
        ),
    ] = None
    follow_links: Annotated[
        bool,
        Option(
            "The folders are yours: links in them may lead out of them.", panel=HUB, is_rare=True
        ),
    ] = False
    tell: Callable[[str], None] = ignore

    def __post_init__(self) -> None:
        take_words(self)
        take_references(self)

    @property
    def known_token(self) -> str | None:
        """Return the token; None for an empty one."""
        return (self.token or "").strip() or None

    def access(self, output: Path | None = None) -> "Access":
        """Return how sources are read.

        output  may hold an unfinished plan, which names the commit of its source
        """
        from fp4convert.storage.source import Access

        return Access(
            revision=self.revision,
            subfolder=self.subfolder,
            token=self.known_token,
            memory_nbytes=as_nbytes(self.memory),
            tell=self.tell,
            output=output,
            config=None if self.config is None else Path(self.config),
            follows_links=self.follow_links,
        )

    def folder_of(self, artifact: Reference) -> Path | None:
        """Return the folder of an artifact; None for a file and for the Hub."""
        from fp4convert.storage.source import subfolder_of

        return Path(artifact, subfolder_of(self.access())) if os.path.isdir(artifact) else None

    def original_access(self) -> "Access":
        """Return how the source of an artifact is read: at its own revision."""
        return replace(self.access(), revision=None)


@dataclass(kw_only=True, eq=False, repr=False)
class WorkOptions(AccessOptions):
    """How a command that writes works; nothing here changes a byte.

    phases  learns how far the work is
    warn    gets the warnings before the work; None for Python's warnings
    """

    workers: Annotated[
        int,
        Option("Number of threads; 0 chooses by the device.", least=0, panel=DEVICE, is_rare=True),
    ] = 0
    force: Force = False
    phases: Phases | None = None
    warn: Callable[[Iterable[str]], None] | None = None

    def settings(self, device: str) -> "Settings":
        """Return how to work."""
        from fp4convert.execution.settings import Settings

        if self.workers < 0:
            raise InputError(
                "usage",
                f"workers is {self.workers}; expected 0 or more",
                "Leave it out: as many as suit the device.",
            )
        return Settings(
            device=device,
            workers=self.workers,
            is_forced=self.force,
            phases=self.phases or Phases(),
            tell=self.tell,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DeviceOptions(WorkOptions):
    """Where a command computes."""

    device: Annotated[
        str,
        Option(
            "auto takes the CPU, and GPUs that pass a check where the plan says they win.",
            panel=DEVICE,
            value=DEVICES,
            is_rare=True,
        ),
    ] = "auto"


@dataclass(kw_only=True, eq=False, repr=False)
class PartOptions(WorkOptions):
    """Which part of shared work this process does."""

    join: Annotated[
        bool,
        Option(
            "Share the work with other processes that write to the same folder.",
            panel=MACHINES,
            is_rare=True,
        ),
    ] = False
    shard_index: Annotated[
        int | None,
        Option(
            "Convert this part only, from 0; when all are done: fp4convert merge.",
            panel=MACHINES,
            is_rare=True,
        ),
    ] = None
    num_shards: Annotated[
        int | None,
        Option(
            "Number of parts. Default of both: from Slurm, torchrun or SkyPilot.",
            panel=MACHINES,
            is_rare=True,
        ),
    ] = None

    def settings(self, device: str, is_elsewhere: bool = False) -> "Settings":
        """Return how to work, with the part that this process does.

        is_elsewhere  other processes take the tasks as they come
        """
        from fp4convert.execution.share import choose_share

        if self.join and self.force:
            detail = "--force replaces what is there, and a worker that joins never does"
            step = "Leave --force out; or begin alone with --force, and let the others join."
            raise InputError("idle-option", detail, step)
        settings, is_shared = super().settings(device), self.join or is_elsewhere
        share = choose_share(is_shared, self.shard_index, self.num_shards, os.environ)
        return replace(settings, is_joining=self.join, share=share)


def refuse_idle_options(options: AccessOptions) -> None:
    """Raise InputError for --revision or --config where all is on this disk.

    --token and --memory, which change no byte, may stand there: one script serves folders and
    repositories. A name that is neither here nor on the Hub is refused later.
    """
    _refuse_idle_config(options)
    declared = declared_in(type(options))
    places = _places_here(options, [each.name for each in declared if each.option.is_argument])
    if places is not None and options.revision:
        verb = "is" if len(places) == 1 else "are"
        detail = f"--revision is for the Hub, and {' and '.join(places)} {verb} here, on this disk"
        step = "Leave --revision out; a repository is named as ORG/NAME."
        raise InputError("idle-option", detail, step)


def _refuse_idle_config(options: AccessOptions) -> None:
    """Raise InputError for --config where nothing on this disk is a GGUF file."""
    named = [each.name for each in declared_in(type(options)) if each.option.is_argument]
    if hasattr(options, "recipe") and hasattr(options, "artifact"):  # reproduce reads a source
        named = ["source"]
    elif hasattr(options, "source") and "source" not in named:  # of an artifact
        named.append("source")
    places = _places_here(options, named)
    if options.config is None or places is None:
        return
    from fp4convert.storage.checkpoint_files import GGUF

    folders = (os.listdir(place) if os.path.isdir(place) else [place] for place in places)
    if not any(name.endswith(GGUF) for names in folders for name in names):
        detail = f"--config is for GGUF files, and {' and '.join(places)} is none"
        raise InputError("idle-option", detail, "Leave --config out.")


def _places_here(options: AccessOptions, names: Iterable[str]) -> list[str] | None:
    """Return the paths that these options name; None unless all are here."""
    values = (getattr(options, name, None) for name in names)
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    places = [os.fspath(one) for each in several for one in each if one is not None]
    return places if all(map(os.path.exists, places)) else None
