"""What quantize is asked for, as values: Request and Goal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp4convert.errors import InputError


@dataclass(frozen=True, slots=True)
class Request:
    """What `quantize` is asked for, in a user's words; recipe.py and quantize_plan.py say what each means."""

    format: str
    dialect: str = "compressed-tensors"
    scale_rule: str | None = None
    activations: int = 16
    input_scale: str | float | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    recipe: str | None = None
    stack_order: str | None = None
    stack_rows: str | None = None
    keep_packed: bool = False
    via: str | None = None
    calibration: str | None = None
    method: str = "rtn"
    kv_cache: str | None = None


GIGA = 10**9


@dataclass(frozen=True, slots=True)
class Goal:
    """What the artifact should come to: one of the two.

    nbytes  of all its files
    bits    of each weight, scales and all, averaged over the modules that would be four-bit without a goal
    """

    nbytes: int | None = None
    bits: float | None = None

    def options(self) -> dict[str, float | None]:
        """The options of the command that ask for it."""
        return {
            "target_size": None if self.nbytes is None else self.nbytes / GIGA,
            "target_bits": self.bits,
        }

    def within(self, low: float, high: float) -> None:
        """InputError where it is below the smallest artifact, or not below one of which everything stays."""
        wanted = self.nbytes if self.nbytes is not None else self.bits or 0.0
        if low <= wanted < high:
            return
        if self.nbytes is not None:
            asked, span = (
                f"--target-size {self.nbytes / GIGA:.9g} GB",
                (f"{math.ceil(low) / GIGA:.9f}", f"{high / GIGA:.9f} GB"),
            )
        else:
            asked, span = (
                f"--target-bits {self.bits:g}",
                (f"{math.ceil(low * 1e6) / 1e6:.6f}", f"{high:g} bits per weight"),
            )
        expected = f"expected from {span[0]} to below {span[1]}"
        reach = "all of it four-bit takes the lower, and nothing of it the upper"
        raise InputError(
            "target-range",
            f"{asked}; {expected}: {reach}",
            "Choose another; or give other modules to it: --include, --exclude.",
        )


def choose_goal(gigabytes: float | None, bits: float | None) -> Goal | None:
    """What the options ask for; InputError for both of them, or for what is no positive number."""
    if gigabytes is not None and bits is not None:
        raise InputError(
            "target-twice",
            "--target-size and --target-bits are given; expected one of them",
            "Leave one out.",
        )
    for option, value, unit in (
        ("--target-size", gigabytes, "GB"),
        ("--target-bits", bits, "bits per weight"),
    ):
        if value is not None and not 0 < value < math.inf:
            detail = f"{option} {value:g}; expected a positive number of {unit}"
            raise InputError(
                "target-range",
                detail,
                "Give any such number: what is out of reach is told with the range.",
            )
    if gigabytes is not None:
        return Goal(nbytes=int(gigabytes * GIGA))
    return None if bits is None else Goal(bits=bits)
