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
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

NAME = "transformers"
CHOICES: tuple[Mapping[str, Any], ...] = ({}, {"format": "mxfp4"}, {"exclude": "*.experts.*"})


def version() -> str:
    import transformers

    return str(transformers.__version__)


def make(root: Path, name: str, artifact: Path, options: Mapping[str, Any]) -> str:
    """Make an artifact as rows alone would have it; return why they refuse it."""
    from classes import record_of

    import fp4convert
    from fp4convert.engines import files

    vars(files)["_read_judged"] = lambda key: None  # what was judged before decides nothing here
    restored = root / "bf16" / artifact.name
    if not (restored / "config.json").exists():
        try:
            fp4convert.quantize(root / name, engine=NAME, output=artifact, **options)
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


def judge(root: Path, name: str, artifact: Path) -> dict[str, Any]:
    """Load an artifact and what it is in bf16; compare all weights."""
    import torch
    import transformers
    from by_values import numberless

    step = "source"
    try:
        other, known = load(name, root / "bf16" / artifact.name)
        if known:
            return {"outcome": "source", "faults": list(dict.fromkeys(map(numberless, known)))}
        step = "refuses"
        model, faults = load(name, artifact)
        record = json.loads((artifact / "config.json").read_text())["quantization_config"]
        if record["quant_method"] == "compressed-tensors":  # else packed weights are compared
            unpacked = transformers.CompressedTensorsConfig(dequantize=True)
            model, more = load(name, artifact, quantization_config=unpacked)
            if more and not faults:  # it loads, and cannot be unpacked to be compared
                what = f"not compared: {numberless(more[0])}"
                return {"outcome": "source", "faults": [what]}
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


def make_and_judge(root: Path, name: str, number: int, known: dict[str, Any]) -> dict[str, Any]:
    """Judge one choice of a class, where it is new."""
    artifact = root / f"{name}--{NAME}{number or ''}"
    if refusal := make(root, name, artifact, CHOICES[number]):
        return {"outcome": "refused", "faults": [refusal]}
    row = json.loads(Path(f"{artifact}.json").read_text()) | {"version": version()}
    if (
        row["dialect"] == "quark"
    ):  # it compiles for minutes, and tests/engines/test_quark.py runs it
        return row | {"outcome": "source", "faults": ["not judged here: Quark"]}
    return known if row.items() <= known.items() else row | judge(root, name, artifact)


def main(root: Path, results: Path, chosen: list[str]) -> None:
    """Judge the first choice, and the next where it fails; write all rows."""
    import compressed_tensors.quantization  # noqa: F401 - once, and not in every process
    from judge_classes import apart_each
    from transformers import CompressedTensorsConfig, PreTrainedModel  # noqa: F401

    warnings.simplefilter("ignore")
    page = json.loads(results.read_text()) if results.exists() else {"rows": []}
    rows = {(row["class"], row.get("choice", 0)): row for row in page["rows"]}
    reasons = json.loads((root / "classes.json").read_text())
    for name in chosen or reasons:
        if not (root / name / "config.json").exists():
            continue
        for number in range(len(CHOICES)):
            known = {} if chosen else rows.get((name, number), {})
            asked = partial(make_and_judge, root, name, number, known)
            row = {"class": name, "choice": number, **apart_each(asked)}
            if row != known:
                print(name, row["outcome"], *row["faults"][:2], flush=True)
            rows[name, number] = row
            if row["outcome"] not in ("wrong", "refuses"):
                for later in range(number + 1, len(CHOICES)):  # of an earlier run
                    rows.pop((name, later), None)
                break
        page = {"engine": NAME, "version": version(), "rows": [rows[key] for key in sorted(rows)]}
        results.write_text(json.dumps(page, indent=1) + "\n")


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
