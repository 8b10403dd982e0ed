"""How far a quotient is from E2M1, as search.c works it out.

Every float from 2^-30 to 64 against the nearest of the eight values, by each instruction set that
this processor has.
"""

import subprocess
from pathlib import Path

import pytest
from paths import ROOT

from fp4convert.process import cpu_library

PROGRAM = """
#include <stdio.h>
#include "search.c"
static f32s nearest(f32s q) { /* a difference is exact where it is the least */
    const float values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    f32s least = q;
    for (int i = 1; i < 8; i++) {
        f32s away = (f32s)((i32s)(q - values[i]) & 0x7FFFFFFF);
        least = either(away < least, away, least);
    }
    return least;
}
static int wrong(float first, float end, int is_clipped) {
    i32s words, found = {0};
    for (int l = 0; l < SIDE; l++) words[l] = (int)fp4_bits(first) + l;
    for (; words[0] < (int)fp4_bits(end); words += SIDE) {
        f32s d = is_clipped ? remainder_of((f32s)words, 1) : remainder_of((f32s)words, 0);
        found |= (f32s)((i32s)d & 0x7FFFFFFF) != nearest((f32s)words);
    }
    return any(found);
}
int main(void) {
    printf("%d %d\\n", wrong(0x1p-30f, 7.0f, 0), wrong(0x1p-30f, 64.0f, 1));
    return 0;
}
"""
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
HIGHEST = cpu_library().fp4_level(0)
LEVELS = [level for level in (2, 3, 4) if level <= HIGHEST] or [0]


@pytest.mark.parametrize("level", LEVELS)
def test_remainder_is_the_distance_to_the_nearest_value(level: int, tmp_path: Path) -> None:
    (tmp_path / "remainder.c").write_text(PROGRAM)
    march = [f"-march=x86-64-v{level}"] if level else []
    command = ["cc", *FLAGS, "-Wno-psabi", *march, f"-DFP4_LEVEL={level}", f"-I{ROOT / 'kernels'}"]
    program = tmp_path / "remainder"
    subprocess.run([*command, tmp_path / "remainder.c", "-o", program, "-lm"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    assert done.stdout == "0 0\n"
