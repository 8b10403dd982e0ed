"""Read a GGUF file as the folder of transformers that it was made from.

This undoes llama.cpp's converter: names, stacks of experts, the order of rows of Llama's q and k,
the 1 added to Gemma's norms. config.json and the tokenizer come from another folder. Everything
above sees safetensors.
Source: llama.cpp, convert_hf_to_gguf.py (LlamaModel.permute; GemmaModel.modify_tensors).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fp4convert.errors import InputError
from fp4convert.storage.checkpoint_files import CONFIG, PLAN_FILE, RECORD, SINGLES
from fp4convert.storage.gguf import GgufFrame
from fp4convert.storage.json_text import unquantized
from fp4convert.storage.safetensors import Header, SafetensorsFrame, TensorRef, nbytes_of
from fp4convert.storage.source import Source, SourceView

FILE = SINGLES[0]
LEFT_OUT = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
SCALARS = ("scale", "input_scale")  # a stack has one for each expert
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_OUTER = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_INNER = {
    "attn_norm": "input_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_GEMMA2 = {
    **_INNER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Family(NamedTuple):
    """llama.cpp's storage of the models of a model_type.

    architecture  llama.cpp's name
    inner         llama.cpp's names below a layer -> the model's
    experts       the same for stacks
    is_turned     the two halves of every head of q and k alternate
    is_shifted    norms are stored with 1 added
    """

    architecture: str
    inner: Mapping[str, str] = _INNER
    experts: Mapping[str, str] = {}
    is_turned: bool = False
    is_shifted: bool = False


_W = {"gate": "w1", "up": "w3", "down": "w2"}
FAMILIES = {
    "llama": Family("llama", is_turned=True),
    "mistral": Family("llama", is_turned=True),
    "mixtral": Family(
        "llama",
        {**_INNER, "ffn_gate_inp": "block_sparse_moe.gate"},
        {f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.{w}" for name, w in _W.items()},
        is_turned=True,
    ),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family(
        "qwen3moe",
        {**_INNER, "ffn_gate_inp": "mlp.gate"},
        {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in _W},
    ),
    "gemma": Family("gemma", is_shifted=True),
    "gemma2": Family("gemma2", _GEMMA2, is_shifted=True),
    "gemma3_text": Family("gemma3", _GEMMA2, is_shifted=True),
}
_TURNED = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}


def as_folder(gguf: Source, beside: Source) -> Source:
    """View a GGUF file as a folder, with the files of another folder."""
    frames = [shard.frame for shard in gguf.checkpoint.shards]
    if len(frames) != 1 or not isinstance(frames[0], GgufFrame):
        detail = f"--config is for a GGUF file, and {gguf.name} is none"
        raise InputError("idle-option", detail, "Leave --config out.")
    config = unquantized(beside.checkpoint.config)
    if not beside.has_file(CONFIG):
        detail = f"{beside.name} has no {CONFIG}; expected that of the model in {gguf.name}"
        raise InputError("gguf-config", detail, "Give the folder that has it: --config DIR.")
    word = str(config.get("model_type"))
    family = FAMILIES.get(word)
    if family is None:
        detail = f"names of {word!r} are not known in GGUF files; known are {', '.join(FAMILIES)}"
        raise InputError("gguf-config", detail, "Start from the model's safetensors.")
    _check_facts(frames[0].facts, config, family)
    return GgufFolder(gguf, beside, family, config)


def _check_facts(facts: Mapping[str, object], config: Mapping[str, object], family: Family) -> None:
    """Raise InputError if the file and config.json are of two models."""
    key = family.architecture
    heads = config.get("num_attention_heads")
    facts_by_config = {
        "general.architecture": key,
        f"{key}.block_count": config.get("num_hidden_layers"),
        f"{key}.embedding_length": config.get("hidden_size"),
        f"{key}.attention.head_count": heads,
        f"{key}.attention.head_count_kv": config.get("num_key_value_heads", heads),
    }
    for name, expected in facts_by_config.items():
        if name in facts and facts[name] != expected:
            detail = f"{name} of the GGUF file is {facts[name]!r}; by {CONFIG} it is {expected!r}"
            raise InputError("gguf-config", detail, "Give the config.json of the same model.")


class GgufFolder(SourceView):
    """A GGUF file's weights with the other files of a folder."""

    def __init__(
        self, gguf: Source, beside: Source, family: Family, config: dict[str, object]
    ) -> None:
        self._beside, self._family = beside, family
        self._heads: dict[str, int] = {}  # of tensors with rows to reorder
        self._shifted: set[str] = set()
        (shard,) = gguf.checkpoint.shards
        self._file = shard.file
        refs = [one for ref in shard.tensors for one in self._renamed(ref, config)]
        sidecars = beside.checkpoint.sidecars
        stamps = {name: beside.checkpoint.stamps[name] for name in sidecars}
        stamps[FILE] = gguf.checkpoint.stamps[self._file]
        header = Header(FILE, shard.nbytes, tuple(refs), SafetensorsFrame({}, is_stored=False))
        checkpoint = gguf.checkpoint._replace(
            config=config, shards=(header,), sidecars=sidecars, stamps=stamps
        )
        super().__init__(gguf, checkpoint)

    def stored(self, ref: TensorRef) -> TensorRef:
        return ref._replace(file=self._file)

    def stored_files(self, shards: Collection[str]) -> Collection[str]:
        return [self._file] if shards else []

    def _renamed(self, ref: TensorRef, config: Mapping[str, object]) -> Iterator[TensorRef]:
        """Yield the model's tensors in a stored one."""
        if ref.name in LEFT_OUT:  # config.json tells what they are made of
            if not (config.get("rope_scaling") or config.get("rope_parameters")):
                detail = f"{ref.name} scales positions, and {CONFIG} has no rope_scaling"
                raise InputError("gguf-config", f"{detail}; expected one", tensor=ref.name)
            return
        stem, _, part = ref.name.rpartition(".")
        family, block = self._family, _BLOCK.fullmatch(stem)
        inner = block[2] if block else ""
        above = f"model.layers.{block[1]}." if block else ""
        if expert := family.experts.get(inner):
            count = ref.shape[0]
            shape = (1,) if part in SCALARS else ref.shape[1:]
            nbytes = nbytes_of(ref.dtype, shape)
            for number in range(count):
                name = f"{above}{expert.format(number)}.{part}"
                yield TensorRef(name, ref.dtype, shape, FILE, ref.start + number * nbytes)
            return
        module = family.inner.get(inner) if block else _OUTER.get(stem)
        if module is None:
            detail = f"{ref.name} is no tensor of a {config.get('model_type')} that is known here"
            raise InputError("gguf-config", detail, "Start from the model's safetensors.", ref.name)
        name = f"{above}{module}.{part}"
        if family.is_turned and module in _TURNED and part not in SCALARS:
            heads = config.get(_TURNED[module], config.get("num_attention_heads"))
            if not isinstance(heads, int) or heads < 1 or ref.shape[0] % (2 * heads):
                detail = f"{ref.name} has {ref.shape[0]} rows, and by {CONFIG} {heads} heads"
                raise InputError("gguf-config", f"{detail}; expected whole ones", tensor=ref.name)
            self._heads[name] = heads
        elif family.is_shifted and stem.endswith("_norm"):
            if ref.dtype != "F32":
                detail = f"{ref.name} is {ref.dtype}; expected F32, as llama.cpp writes norms"
                raise InputError("gguf-config", detail, tensor=ref.name)
            self._shifted.add(name)
        yield ref._replace(name=name, file=FILE)

    def read_range(self, ref: TensorRef, start: int, stop: int) -> memoryview:
        own = self.stored(ref)
        if heads := self._heads.get(ref.name):
            return self._in_order(own, heads, start, stop)
        if ref.name in self._shifted:
            stored = np.frombuffer(self._source.read(own), np.float32)
            return (stored - np.float32(1)).view(np.uint8).data[start:stop]
        return self._source.read_range(own, start, stop)

    def _in_order(self, own: TensorRef, heads: int, start: int, stop: int) -> memoryview:
        """Read rows in the order of transformers."""
        head_nbytes = own.nbytes // heads
        first, last = start // head_nbytes, -(-stop // head_nbytes)
        begin = first * head_nbytes
        stored = self._source.read_range(own, begin, last * head_nbytes)
        pairs = np.frombuffer(stored, np.uint8).reshape(
            last - first, own.shape[0] // heads // 2, 2, own.nbytes // own.shape[0]
        )
        data = np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(-1).data
        return data[start - begin : stop - begin]

    def read_into(self, ref: TensorRef, start: int, buffer: memoryview) -> None:
        if ref.name in self._heads or ref.name in self._shifted:
            buffer[:] = self.read_range(ref, start, start + buffer.nbytes)
        else:
            self._source.read_into(self.stored(ref), start, buffer)

    def has_file(self, file: str) -> bool:
        return file not in (RECORD, PLAN_FILE) and self._beside.has_file(file)

    def open_file(self, file: str) -> BinaryIO:
        return self._beside.open_file(file)

    def file_nbytes(self, file: str) -> int:
        return self._beside.file_nbytes(file)

    def holds(self, path: Path) -> bool:
        return self._source.holds(path) or self._beside.holds(path)

    def stop(self) -> None:
        self._source.stop()
        self._beside.stop()
