"""Contents of artifacts in few words, for engines to judge."""

import json
import re
import shutil

from fp4convert.engines.rows import Contents, Part


def contents(dialect, *parts, model="llama", **facts):
    """Parts as "nvfp4", "mxfp4 experts" or "nvfp4 w4a4 experts"."""
    made = set()
    for words in parts:
        four = "w4a4" in words
        plain = words.replace(" w4a4", "").replace(" experts", "")
        made.add(Part(plain, 4 if four else 16, "experts" in words))
    return Contents(dialect, frozenset(made), model, **facts)


def without_fused_names(folder):
    """Take the names of fused matrices out of an artifact's record, as foreign records are."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = _without(config["quantization_config"])
    file.write_text(json.dumps(config))
    (folder / "quantization_config.json").unlink()
    shutil.rmtree(folder / ".fp4convert", ignore_errors=True)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    return folder


def _without(said):
    if isinstance(said, str):
        return re.sub(r"\(\?:(\w+)\|\w+\)", r"\1", said)  # of a part and its fused matrix
    if isinstance(said, dict):
        return {key: _without(value) for key, value in said.items() if not _is_fused(key)}
    if isinstance(said, list):
        return [each for each in map(_without, said) if not _is_fused(each)]
    return said


def _is_fused(name):
    return isinstance(name, str) and ("qkv_proj" in name or "gate_up_proj" in name)
