"""Find names that training gave, and models of another class.

Training wraps modules: torch.compile, DDP, FSDP and PEFT put a word of theirs into the names of
what they hold.  Engines look for the names of the class: they refuse such a checkpoint, or fill it
with random numbers and say so in a log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fp4convert.checkpoint.architectures import Architecture
from fp4convert.checkpoint.class_table import OWN_CODE, find_architecture
from fp4convert.errors import InputError, shell_line
from fp4convert.recipes.draft_layers import is_draft_head
from fp4convert.storage.checkpoint_files import RECORD
from fp4convert.storage.safetensors import WEIGHT
from fp4convert.storage.source import Checkpoint, Source

# Words of wrappers, wherever they stand in a name, and whose they are.
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_fpw_module": "fairscale's FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning Fabric",
}
# Words that classes may have, too: LeViT has a `module` inside, and code of a model's own may.
PEFT_MODEL, PARALLEL = "base_model.model", "module"
SHARED = {PEFT_MODEL: "PEFT", PARALLEL: "DDP"}
# What PEFT puts into layers that it trains; as the last part of a name it is a class's parameter.
FACTORS = "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"
ADAPTED = ("base_layer", "modules_to_save", "original_module", *FACTORS)
_ADAPTER_NAME = re.compile(r"\.lora_[AB]\.(\w+)\.weight")
PEFT_DEFAULT = "default"  # how PEFT calls an adapter that nobody named

MERGE = (
    "Merge the adapter where it was trained, model = model.merge_and_unload();"
    " model.save_pretrained('merged'), and give that folder; or give its base model and the adapter"
    " as PEFT saved it: fp4convert quantize BASE --format nvfp4 --lora ADAPTER"
)
SAVE_AGAIN = (
    "Save the model again with save_pretrained of that class, or give it the config.json that"
    " belongs to it."
)
QUANTIZE_AGAIN = (
    "Give `fp4convert quantize` the model that this was made of: it says how to mend the names."
)
# Copies a folder but for its weights, which are written under shorter names.
STRIP = (
    "import glob, re, shutil; from safetensors.torch import load_file, save_file; a, b = {pair};"
    ' shutil.copytree(a, b, ignore=shutil.ignore_patterns("*.safetensors*"));'
    ' [save_file({{re.sub(r"(?<![^.])(?:{words})\\.", "", k): v for k, v in load_file(f).items()}},'
    ' b + f[len(a):], {{"format": "pt"}})'
    ' for f in glob.glob(glob.escape(a) + "/**/*.safetensors", recursive=True)]'
)


class Misnamed(NamedTuple):
    """A name that the class of a model does not have.

    tensor      the first of that kind
    detail      what it is, and what engines do
    is_wrapped  by training; else no layer is where the class has them
    words       to be stripped from names; () where that does not help
    """

    tensor: str
    detail: str
    is_wrapped: bool = True
    words: tuple[str, ...] = ()


def find_misnamed(checkpoint: Checkpoint) -> Misnamed | None:
    """Find the first name that a wrapper gave, or of another class.

    Returns  None where there is none
    """
    if any(shard.frame.container != "safetensors" for shard in checkpoint.shards):
        return None  # GGUF has names of its own
    names, config = [ref.name for ref in checkpoint.tensors], checkpoint.config
    known = find_architecture(config, names)
    own = None if OWN_CODE in config else known
    return (
        _find_adapted(names, own) or _find_wrapped(names, config, known) or _find_other(names, own)
    )


def refuse_misnamed(source: Source, reference: str) -> None:
    """Raise InputError for names that the class of a model does not have.

    reference  by which a person named the source
    """
    if not (first := find_misnamed(source.checkpoint)):
        return
    next_step = MERGE
    if source.has_file(RECORD) or "quantization_config" in source.checkpoint.config:
        next_step = QUANTIZE_AGAIN  # records have these names, too
    elif not first.is_wrapped:
        next_step = SAVE_AGAIN
    elif first.words:
        line = _strip_line(source, reference, first.words)
        next_step = f"Strip it, and give the folder that this writes: {line}"
    code = "wrapped-names" if first.is_wrapped else "foreign-names"
    detail = f"{source.name}: {first.tensor}: {first.detail}"
    raise InputError(code, detail, next_step, first.tensor)


def _find_adapted(names: list[str], known: Architecture | None) -> Misnamed | None:
    """Find a layer of PEFT whose base and factors are apart.

    A class of no table may have adapters inside, as that of Phi-4-multimodal: its code names them,
    and PEFT calls that of a fine-tuning "default".

    known  the class of the model, if it has no code of its own
    """
    adapted = _find_words(names, ADAPTED)
    if known:  # also the factors of loralib's layers
        ends = {name: end for name in names if (end := name.rpartition(".")[2]) in FACTORS}
        adapted |= {name: [end] for name, end in ends.items()}
        adapted = {name: words for name, words in adapted.items() if not known.places(name)}
    adapters = {match[1] for name in adapted if (match := _ADAPTER_NAME.search(name))}
    if not adapted or (known is None and adapters and PEFT_DEFAULT not in adapters):
        return None
    name, words = next(iter(adapted.items()))
    detail = f"{words[0]!r} is a word of PEFT, as in {len(adapted)} of {len(names)} names, and its"
    detail += " adapter is not merged; expected the names of the model's class: engines leave out"
    return Misnamed(name, f"{detail} all others")


def _find_wrapped(
    names: list[str], config: Mapping[str, object], known: Architecture | None
) -> Misnamed | None:
    """Find a word of torch.compile, FSDP, DDP or PEFT in names."""
    makers = {**WRAPPERS, **SHARED}
    wrapped = _find_words(names, makers)
    if OWN_CODE in config or "model_type" not in config:
        # Its code may have such modules; around everything there is none where a table has it.
        starts = tuple(f"{word}." for word in SHARED)
        is_whole = known is not None and all(name.startswith(starts) for name in names)
        wrapped = {
            name: words
            for name, words in wrapped.items()
            if is_whole or not SHARED.keys() >= set(words)
        }
    elif known:
        wrapped = {name: words for name, words in wrapped.items() if not known.places(name)}
    if not wrapped:
        return None
    name, words = next(iter(wrapped.items()))
    detail = f"{words[0]!r} is a word of {makers[words[0]]}, as in {len(wrapped)} of"
    detail += f" {len(names)} names; expected the names of the model's class: engines leave out"
    every = sorted({word for words in wrapped.values() for word in words})
    return Misnamed(name, f"{detail} all others", words=tuple(every))


def _find_words(names: list[str], words: Collection[str]) -> dict[str, list[str]]:
    """Find the names that have one of those words before others, and which."""
    text = "\n".join(names)  # most models have none of them
    there = [re.escape(word) for word in words if f"{word}." in text]
    if not there:
        return {}
    pattern = re.compile(rf"(?<![^.])(?:{'|'.join(there)})(?=\.)")
    return {name: hits for name in names if (hits := pattern.findall(name))}


def _find_other(names: list[str], known: Architecture | None) -> Misnamed | None:
    """Find that a model has no layer where its class has them all."""
    stacks = [prefix for prefix in known.kinds if prefix] if known else []
    if known is None or not stacks or not names or is_draft_head(names):
        return None
    modules = (name.rpartition(".")[0] for name in names)
    both = chain(names, (module + WEIGHT for module in modules))  # a packed layer has no weight
    if any(place.prefix for name in both for place in known.places(name)):
        return None
    layers = stacks[0].removesuffix(".").replace("#", "N")
    detail = f"the class in config.json, {known.name}, has layers {layers}, and no name of"
    detail += f" {len(names)} is that of one: engines leave out what their class does not have"
    return Misnamed(names[0], detail, is_wrapped=False)


def _strip_line(source: Source, reference: str, words: Iterable[str]) -> str:
    """Write the line that copies a folder with shorter names of tensors."""
    repo, folder, download = source.checkpoint.repo, reference.rstrip("/"), ""
    if repo:
        folder = repo.rpartition("/")[2]
        download = f"{shell_line('hf', 'download', repo, '--local-dir', folder)} && "
    elif Path(reference).is_file():
        folder = str(Path(reference).parent)
    pair = json.dumps([folder, f"{folder}-plain"])
    program = STRIP.format(pair=pair, words="|".join(map(re.escape, words)))
    return download + shell_line("python", "-c", program)
