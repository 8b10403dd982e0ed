"""Write Whisper base for transformers, from CTranslate2's model.bin as its two packages have it.

model.bin, version 6  u32 version, spec, u32 revision, u32 number of variables; of each its name, u8
                      rank, u32 sizes, u8 dtype, u32 bytes, data; then u32 number of aliases, of
                      each alias and name. A string is u16 length, with a zero at its end.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
START, END = 50258, 50257  # <|startoftranscript|>, <|endoftext|>
RENAMED = (  # CTranslate2's names -> transformers', in this order
    (r"/", "."),
    (r"layer_norm\.gamma$", "layer_norm.weight"),
    (r"layer_norm\.beta$", "layer_norm.bias"),
    (r"^(\w+)\.layer_(\d+)\.", r"\1.layers.\2."),
    (r"self_attention\.layer_norm", "self_attn_layer_norm"),
    (r"\.attention\.layer_norm", ".encoder_attn_layer_norm"),
    (r"ffn\.layer_norm", "final_layer_norm"),
    (r"ffn\.linear_0", "fc1"),
    (r"ffn\.linear_1", "fc2"),
    (r"self_attention", "self_attn"),
    (r"\.attention\.", ".encoder_attn."),
    (r"embeddings\.weight", "embed_tokens.weight"),
    (r"position_encodings\.encodings", "embed_positions.weight"),
)
STACKED = r"(.*\.(self_attn|encoder_attn))\.linear_(\d)\.(weight|bias)"
PARTS = {  # projections that one variable holds, one above the other
    ("self_attn", "0"): "qkv",
    ("self_attn", "1"): "o",
    ("encoder_attn", "0"): "q",
    ("encoder_attn", "1"): "kv",
    ("encoder_attn", "2"): "o",
}

Arrays = dict[str, NDArray[Any]]


def write_checkpoint(folders: Sequence[Path], output: Path) -> None:
    """Write weights, config, tokenizer, feature extractor and generation config."""
    from transformers import WhisperFeatureExtractor, WhisperTokenizer

    data = b"".join(
        (folder / f"model.bin.part{number}").read_bytes()
        for number, folder in enumerate(folders, 1)
    )
    variables = read_variables(data)
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(x) for name, x in rename(variables)}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "tokenizer.json").write_bytes((folders[0] / "tokenizer.json").read_bytes())
    tokenizer = WhisperTokenizer.from_pretrained(output)
    tokenizer.save_pretrained(output)
    mels = variables["encoder/conv1/weight"].shape[1]
    WhisperFeatureExtractor(feature_size=mels).save_pretrained(output)
    settings = json.loads((folders[0] / "config.json").read_text(encoding="utf-8"))
    write_generation_config(tokenizer, settings, output)
    write_config(variables, output)


def read_variables(data: bytes) -> Arrays:
    at = 0

    def number(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize(code)
        return int(value)

    def string() -> str:
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at - 1].decode()

    version, spec, _ = number("I"), string(), number("I")
    assert (version, spec) == (6, "WhisperSpec"), f"version {version}, {spec}"
    variables: Arrays = {}
    for _ in range(number("I")):
        name = string()
        shape = [number("I") for _ in range(number("B"))]
        dtype, nbytes = np.dtype(DTYPES[number("B")]), number("I")
        variables[name] = np.frombuffer(data, dtype, nbytes // dtype.itemsize, at).reshape(shape)
        at += nbytes
    aliases = [(string(), string()) for _ in range(number("I"))]
    assert aliases == [("decoder/projection/weight", "decoder/embeddings/weight")], aliases
    assert at == len(data), f"{len(data) - at} bytes are left"
    return variables


def rename(variables: Arrays) -> Iterator[tuple[str, NDArray[Any]]]:
    """Tensors under transformers' names; settings and alignments are left out."""
    for name, array in variables.items():
        if array.ndim == 0 or "alignment" in name:
            continue
        renamed = name
        for pattern, new in RENAMED:
            renamed = re.sub(pattern, new, renamed)
        stacked = re.fullmatch(STACKED, renamed)
        if not stacked:
            yield f"model.{renamed}", array
            continue
        stem, kind, number, end = stacked.groups()
        letters = PARTS[kind, number]
        for letter, part in zip(letters, np.split(array, len(letters)), strict=True):
            if (letter, end) == ("k", "bias"):  # transformers' k has none, and this one is zero
                assert not part.any()
            else:
                yield f"model.{stem}.{'out' if letter == 'o' else letter}_proj.{end}", part


def write_config(variables: Arrays, output: Path) -> None:
    from transformers import WhisperConfig

    def layers(side: str) -> int:
        pattern = rf"{side}/layer_\d+/ffn/linear_0/weight"
        return sum(re.fullmatch(pattern, name) is not None for name in variables)

    vocabulary, width = variables["decoder/embeddings/weight"].shape
    heads = int(variables["encoder/num_heads"])
    wide = len(variables["encoder/layer_0/ffn/linear_0/bias"])
    WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers("encoder"),
        decoder_layers=layers("decoder"),
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=wide,
        decoder_ffn_dim=wide,
        num_mel_bins=variables["encoder/conv1/weight"].shape[1],
        max_source_positions=len(variables["encoder/position_encodings/encodings"]),
        max_target_positions=len(variables["decoder/position_encodings/encodings"]),
        architectures=["WhisperForConditionalGeneration"],
        dtype="float16",
        **_ids(),
    ).save_pretrained(output)


def write_generation_config(tokenizer: Any, settings: dict[str, Any], output: Path) -> None:
    from transformers import GenerationConfig

    number_of = tokenizer.convert_tokens_to_ids
    languages = settings["lang_ids"]
    GenerationConfig(
        **_ids(),
        max_length=448,
        task="transcribe",
        is_multilingual=True,
        return_timestamps=False,
        no_timestamps_token_id=number_of("<|notimestamps|>"),
        prev_sot_token_id=number_of("<|startofprev|>"),
        lang_to_id=dict(zip(tokenizer.convert_ids_to_tokens(languages), languages, strict=True)),
        task_to_id={task: number_of(f"<|{task}|>") for task in ("transcribe", "translate")},
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
        max_initial_timestamp_index=50,
    ).save_pretrained(output)


def _ids() -> dict[str, int]:
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END)
    return {**ends, "decoder_start_token_id": START}
