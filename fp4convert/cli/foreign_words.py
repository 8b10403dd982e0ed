"""Answer words of llm-compressor, mlx_lm and other tools with ours.

A word that is merely spelled alike would mislead.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from fp4convert.errors import NEAR, shell_line
from fp4convert.numerics.formats import FORMATS
from fp4convert.recipes.options import one_of

OPTIONS = {  # ours: theirs
    "--exclude": (
        "ignore ignore-list ignore-layers ignore-modules modules-to-not-convert skip skip-modules"
        " exclude-modules exclude-layers not-convert keep"
    ),
    "--include": "only targets target-modules include-modules",
    "--format": (
        "bits q-bits wbits w-bit w-bits num-bits scheme quantization quantize quant qformat qtype"
        " q-mode mode type outtype ftype quant-format quant-type weights precision"
    ),
    "--output": (
        "out out-dir output-dir output-path save-dir save-path export-path export-dir mlx-path"
        " outfile out-file dest destination to folder"
    ),
    "--dialect": "export-format export-fmt target for",  # the last where there is no --for
    "--for": "engine backend runtime serve serve-with",
    "--method": "algorithm algo quant-method quant-algo modifier",
    "--calibration": (
        "calib calib-size calib-dataset calib-data calibration-dataset calibration-data dataset"
        " imatrix num-calibration-samples samples stats"
    ),
    "--kv-cache": "kv-cache-dtype kv-cache-qformat kv-cache-quant cache-type-k kv",
    "--activations": "a-bits abits act-bits activation-bits",
    "--push-to-hub": "upload upload-repo push hub-model-id repo-id hf-repo",
    "--token": "hf-token auth-token use-auth-token api-key",
    "--revision": "rev branch commit tag",
    "--workers": "threads nthreads nthread jobs num-workers nproc max-workers parallel",
    "--device": "gpu cuda cpu device-map",
    "--dry-run": "dry plan simulate no-write",
    "--force": "overwrite overwrite-output-dir yes clean",
    "--quiet": "silent no-progress",
    "--source": "reference original base base-model ref",
    "--target-bits": "bpw avg-bits effective-bits",
    "--dtype": "torch-dtype",
}
NO_OPTION = {  # the answer: theirs
    "Give the model without an option, first: {command} ./Model.": (
        "model model-path model-id model-name model-name-or-path hf-path pretrained input"
        " input-model pyt-ckpt-path src path in checkpoint"
    ),
    "The format decides it: blocks of 16 for nvfp4, of 32 for mxfp4.": (
        "group-size q-group-size block-size blocksize"
    ),
    "None is needed: fp4convert runs no code of the model.": "trust-remote-code",
}
COMMANDS = {  # ours: theirs
    "quantize": "convert quant quantise compress oneshot",
    "push": "upload publish",
    "dequantize": "dequant unpack restore decompress dequantise",
    "transcode": "export repack",
    "inspect": "info show describe scan view",
    "verify": "check validate test lint",
    "compare": "diff eval",
    "recipes": "list models families ls",
    "doctor": "env system devices",
    "calibrate": "calib collect imatrix",
}
REMARKS = {
    "--format": f"Its words are {one_of(FORMATS)}.",
    "--calibration": "fp4convert calibrate makes the file that it takes; so does llama-imatrix.",
    "--dialect": "vLLM and SGLang read compressed-tensors and modelopt.",
}


def answer_option(name: str, known: Collection[str], command: str) -> str:
    """Return a sentence with our option for one of another tool, else "".

    name   as typed, such as --modules_to_not_convert
    known  the flags of the command
    """
    plain = _plain(name)
    for sentence, theirs in NO_OPTION.items():
        if plain in theirs.split() and command != "fp4convert":
            return sentence.format(command=command)
    for ours, theirs in OPTIONS.items():
        if plain in theirs.split() and ours in known:
            return f"fp4convert calls it {ours}. {REMARKS.get(ours, '')}".rstrip()
    by_name = {_plain(flag): flag for flag in known if flag.startswith("--")}
    having = [each for each, row in _commands().items() if f"--{plain}" in row]
    if having and plain not in by_name:
        return f"It is an option of fp4convert {', '.join(having)}."
    near = get_close_matches(plain, by_name, 1, NEAR)
    return f"Did you mean {by_name[near[0]]}?" if near else ""


def _commands() -> dict[str, set[str]]:
    """Return the flags of every command."""
    from fp4convert.cli.commands import COMMANDS
    from fp4convert.cli.options import flags_of

    return {
        name: {flag for each in command.shown() for flag in flags_of(each)}
        for name, command in COMMANDS.items()
    }


def answer_command(word: str, known: Iterable[str]) -> str:
    """Return the command that is meant, in a sentence; "" if none is near."""
    for ours, theirs in COMMANDS.items():
        if word.lower() in theirs.split():
            return f"fp4convert calls it {ours}."
    if "/" in word or os.path.exists(word):
        return f"To convert it: {shell_line('fp4convert', 'quantize', word, '--format', 'nvfp4')}"
    near = get_close_matches(word.lower(), list(known), 1, NEAR)
    return f"Did you mean {near[0]}?" if near else ""


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("_", "-")
