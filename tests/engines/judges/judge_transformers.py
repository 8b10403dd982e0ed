"""Judge a tiny model of every class by transformers' own loading, on a CPU.

    python tests/engines/judges/judge_transformers.py FOLDER RESULTS.json [CLASS...]

FOLDER is what classes.py made. What --for transformers chooses is made of each source, and loaded
with output_loading_info: no key may be missing, none unexpected, and every weight must equal what
`dequantize` makes of the artifact, loaded by the same class.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

NAME = "transformers"


def version() -> str:
    import transformers

    return str(transformers.__version__)


def make(root: Path, name: str) -> str:
    """Make the artifact; return why --for refuses it."""
    from classes import record_of

    import fp4convert

    artifact, restored = root / f"{name}--{NAME}", root / "bf16" / f"{name}--{NAME}"
    if not (restored / "config.json").exists():
        try:
            fp4convert.quantize(root / name, engine=NAME, output=artifact)
            fp4convert.dequantize(artifact, restored)
        except fp4convert.Fp4Error as error:
            return f"{error.code}: {error}"[:300]
        Path(f"{artifact}.json").write_text(json.dumps(record_of(name, artifact)))
    return ""


def load(name: str, folder: Path, **more: Any) -> tuple[Any, list[str]]:
    """Load a model; return it and the keys that are missing or unexpected."""
    import torch
    import transformers

    kind = getattr(transformers, name)
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **more
    )
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    faults = [
        f"{key[:-5]} {each}" for key in keys for each in sorted(map(str, info.get(key) or ()))
    ]
    return model, faults


def judge(root: Path, name: str) -> dict[str, Any]:
    """Load an artifact and what it is in bf16; compare all weights."""
    import torch
    import transformers
    from by_values import numberless

    step = "source"
    try:
        other, known = load(name, root / "bf16" / f"{name}--{NAME}")
        if known:
            return {"outcome": "source", "faults": list(dict.fromkeys(map(numberless, known)))}
        step = "refuses"
        artifact = root / f"{name}--{NAME}"
        model, faults = load(name, artifact)
        record = json.loads((artifact / "config.json").read_text())["quantization_config"]
        if record["quant_method"] == "compressed-tensors":  # else packed weights are compared
            unpacked = transformers.CompressedTensorsConfig(dequantize=True)
            model, more = load(name, artifact, quantization_config=unpacked)
            faults += more
    except Exception as error:  # any error is its answer
        return {"outcome": step, "faults": [f"{type(error).__name__}: {error}"[:200]]}
    held, wanted = model.state_dict(), other.state_dict()
    same = 0
    for key, tensor in wanted.items():
        if key not in held:
            faults.append(f"not held {key}")
        elif held[key].shape != tensor.shape or not torch.equal(
            held[key].bfloat16(), tensor.bfloat16()
        ):
            faults.append(f"differs {key}")
        else:
            same += 1
    faults = list(dict.fromkeys(map(numberless, faults)))
    return {"outcome": "wrong" if faults else "exact", "faults": faults, "same": same}


def make_and_judge(root: Path, name: str, known: dict[str, Any]) -> dict[str, Any]:
    """Judge what is new."""
    if refusal := make(root, name):
        return {"outcome": "refused", "faults": [refusal]}
    artifact = root / f"{name}--{NAME}"
    row = json.loads(Path(f"{artifact}.json").read_text())
    row |= {"version": version()}
    if row.items() <= known.items():
        return {"outcome": "as before"}
    return row | judge(root, name)


def main(root: Path, results: Path, chosen: list[str]) -> None:
    """Judge what is new; write all rows."""
    from judge_classes import apart_each

    import compressed_tensors.quantization  # noqa: F401 - once, and not in every process
    from transformers import CompressedTensorsConfig, PreTrainedModel  # noqa: F401

    warnings.simplefilter("ignore")
    page = json.loads(results.read_text()) if results.exists() else {"rows": []}
    rows = {row["class"]: row for row in page["rows"]}
    reasons = json.loads((root / "classes.json").read_text())
    for name in chosen or reasons:
        if not (root / name / "config.json").exists():
            continue
        known = {} if chosen else rows.get(name, {})
        row = apart_each(lambda name=name, known=known: make_and_judge(root, name, known))
        if row["outcome"] == "as before":
            continue
        if row["outcome"] == "refused" and known.get("outcome") in ("wrong", "refuses"):
            continue  # for that it is refused
        rows[name] = {"class": name, "dialect": "", **row}
        print(name, rows[name]["outcome"], *rows[name]["faults"][:2], flush=True)
        page = {"engine": NAME, "version": version(), "rows": [rows[each] for each in sorted(rows)]}
        results.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
