"""113 sound, odd and hostile checkpoints, each with what the command must do with it.

quantized  every tensor outside `kept` becomes four-bit
kept       converted; the tensors in `kept` stay, each for a reason that contains `say`
warned     converted, and `say` stands among the warnings
unsound    exit 2 after the rest is finished: NaN or Inf among the weights
refused    exit 2 with `say` in the message, and nothing written
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkpoints import FIRST, INDEX, LLAMA, SECOND, Tensor, bf16, pack_header, pack_shard, weight

Expect = Literal["quantized", "kept", "warned", "unsound", "refused"]
Place = Callable[[Path], None]
"""Makes something that is no plain file at a path."""
Files = dict[str, bytes | Place]


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint: `files` in a folder, of which `source` is converted."""

    name: str
    expect: Expect
    say: str
    files: Files
    kept: tuple[str, ...] = ()
    format: str = "nvfp4"
    source: str = "."

    def write(self, folder: Path) -> Path:
        """Lay the files out below `folder`; returns the source."""
        root = folder / "checkpoint"
        root.mkdir()
        for file, content in self.files.items():
            path = Path(os.path.normpath(root / file))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content) if isinstance(content, bytes) else content(path)
        return root / self.source


def link(target: str) -> Place:
    return lambda path: path.symlink_to(target)


def sparse(start: bytes, nbytes: int) -> Place:
    def place(path: Path) -> None:
        path.write_bytes(start)
        os.truncate(path, nbytes)

    return place


class _Boom:
    """Unpickled, it would leave a mark."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch PWNED",)


CONFIG = json.dumps(LLAMA).encode()
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
Q_PROJ, K_PROJ, V_PROJ = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
OUTSIDE = "../outside.safetensors"
SOUND = pack_shard({O_PROJ: weight()})
OTHER = pack_shard({"y": weight(1)})
WRONG = pack_shard({"x": weight(1)})
DATA = bf16(32, 64)
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def single(data: bytes | Place, **files: bytes) -> Files:
    return {"config.json": CONFIG, "model.safetensors": data, **files}


def header(text: bytes, data: bytes = b"") -> Files:
    return single(pack_header(text) + data)


def entries(data: bytes, *described: tuple[str, str, list[object], list[object]]) -> Files:
    """A shard whose header says (name, dtype, shape, offsets), whatever its data is."""
    table = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        for name, dtype, shape, offsets in described
    }
    return header(json.dumps(table).encode(), data)


def stored(**tensors: Tensor) -> Files:
    return single(pack_shard(tensors))


def recorded(record: object, tensors: dict[str, Tensor]) -> Files:
    """A checkpoint whose config.json says how it is quantized."""
    config = json.dumps({**LLAMA, "quantization_config": record}).encode()
    return {"config.json": config, "model.safetensors": pack_shard(tensors)}


def sharded(weight_map: object, files: Files) -> Files:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    return {"config.json": CONFIG, INDEX: json.dumps(index).encode(), **files}


def matrix(shape: tuple[int, ...], data: bytes | None = None) -> Files:
    return stored(**{O_PROJ: ("BF16", shape, bf16(*shape) if data is None else data)})


def beginning(*values: float) -> Files:
    """The sound matrix, its first values replaced."""
    replaced = b"".join(struct.pack("<f", value)[2:] for value in values)
    return matrix((32, 64), replaced + DATA[len(replaced) :])


def beside(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Files:
    """The sound matrix beside another tensor."""
    return stored(**{name: (dtype, shape, data), O_PROJ: weight()})


def refused(name: str, say: str, files: Files, **more: str) -> Case:
    return Case(name, "refused", say, files, **more)


_U8 = b'"dtype":"U8"'
CONTAINERS = (
    Case("good_single", "quantized", "", single(SOUND)),
    Case(
        "good_sharded",
        "quantized",
        "",
        sharded(
            {O_PROJ: FIRST, "model.layers.0.mlp.down_proj.weight": SECOND},
            {FIRST: SOUND, SECOND: pack_shard({"model.layers.0.mlp.down_proj.weight": weight(1)})},
        ),
    ),
    refused("empty_file", "shorter than", single(b"")),
    refused("seven_bytes", "shorter than", single(b"\x01" * 7)),
    refused("header_len_2_63", "header length", single(struct.pack("<Q", 1 << 63) + SOUND[8:])),
    refused(
        "header_len_max", "header length", single(struct.pack("<Q", (1 << 64) - 1) + SOUND[8:])
    ),
    refused(
        "header_len_gt_file", "header length", single(struct.pack("<Q", 10_000_000) + SOUND[8:])
    ),
    refused("header_len_zero", "header", single(struct.pack("<Q", 0))),
    refused(
        "header_len_101MB_ok_size",
        "header length",
        single(sparse(struct.pack("<Q", 100_000_001) + b"{}", 100_000_009)),
    ),
    refused("header_not_json", "header", header(b"{not json}")),
    refused("header_not_object", "header", header(b"[1,2,3]")),
    refused(
        "header_bad_utf8",
        "UTF-8",
        header(b'{"a\xff\xfe":{%s,"shape":[0],"data_offsets":[0,0]}}' % _U8),
    ),
    refused("header_bom", "header", header(b"\xef\xbb\xbf{}")),
    refused(
        "header_leading_space",
        "header",
        header(b'  {"a":{%s,"shape":[1],"data_offsets":[0,1]}}' % _U8, b"\0"),
    ),
    refused(
        "header_trailing_garbage",
        "header",
        header(b'{"a":{%s,"shape":[1],"data_offsets":[0,1]}}xx' % _U8, b"\0"),
    ),
    refused(
        "header_deep_nesting", "header", header(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    ),
    refused("truncated_shard", "truncated", single(SOUND[:-100])),
    refused("trailing_bytes", "bytes after", single(SOUND + b"JUNK" * 10)),
    refused("big_endian_len", "header length", single(SOUND[7::-1] + SOUND[8:])),
    refused(
        "lfs_pointer_instead_of_data",
        "LFS pointer",
        single(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    ),
    refused(
        "html_error_page",
        "header length",
        single(b"<!DOCTYPE html><html><body>401 Unauthorized</body></html>"),
    ),
    refused("pickle_named_safetensors", "header length", single(pickle.dumps(_Boom()))),
)

ENTRIES = (
    refused(
        "offsets_overlap",
        "overlap",
        entries(
            DATA * 2, ("a", "BF16", [32, 64], [0, 4096]), ("b", "BF16", [32, 64], [2048, 6144])
        ),
    ),
    refused(
        "offsets_alias_same_range",
        "overlap",
        entries(DATA, *((name, "BF16", [32, 64], [0, 4096]) for name in ("a", "b"))),
    ),
    refused(
        "offsets_hole",
        "hole",
        entries(
            DATA * 2 + bytes(904),
            ("a", "BF16", [32, 64], [0, 4096]),
            ("b", "BF16", [32, 64], [5000, 9096]),
        ),
    ),
    refused("offsets_reversed", "offset", entries(DATA, ("a", "BF16", [32, 64], [4096, 0]))),
    refused("offsets_negative", "offset", entries(DATA, ("a", "BF16", [32, 64], [-8, 4088]))),
    refused("offsets_float", "offset", entries(DATA, ("a", "BF16", [32, 64], [0.0, 4096.0]))),
    refused(
        "offsets_beyond_end", "truncated", entries(DATA[:2048], ("a", "BF16", [32, 64], [0, 4096]))
    ),
    refused(
        "offsets_not_from_zero",
        "hole",
        entries(DATA + bytes(8), ("a", "BF16", [32, 64], [8, 4104])),
    ),
    refused("size_mismatch", "shape", entries(DATA, ("a", "BF16", [32, 65], [0, 4096]))),
    refused("shape_overflow", "shape", entries(b"", ("a", "BF16", [1 << 40, 1 << 40], [0, 0]))),
    refused("shape_negative", "shape", entries(DATA, ("a", "BF16", [-32, -64], [0, 4096]))),
    refused("unknown_dtype", "dtype", entries(bytes(4), ("a", "Q7", [4], [0, 4]))),
    refused("missing_offsets_key", "header", header(b'{"a":{%s,"shape":[1]}}' % _U8, b"\0")),
    Case(
        "extra_key_in_entry",
        "warned",
        "",
        header(
            b'{"%s":{"dtype":"BF16","shape":[32,64],"data_offsets":[0,4096],"evil":1}}'
            % O_PROJ.encode(),
            DATA,
        ),
    ),
    refused(
        "duplicate_json_keys",
        "duplicate",
        header(
            b'{"a":{%s,"shape":[4],"data_offsets":[0,4]},"a":{%s,"shape":[4],"data_offsets":[4,8]}}'
            % (_U8, _U8),
            bytes(8),
        ),
    ),
    refused(
        "duplicate_json_keys_same",
        "duplicate",
        header(
            b'{"a":{%s,"shape":[4],"data_offsets":[0,4]},"a":{%s,"shape":[4],"data_offsets":[0,4]}}'
            % (_U8, _U8),
            bytes(4),
        ),
    ),
    refused("metadata_not_strings", "header", single(pack_shard({O_PROJ: weight()}, {"n": 1}))),
    refused(
        "name_dunder_metadata_tensor",
        "header",
        header(b'{"__metadata__":{%s,"shape":[1],"data_offsets":[0,1]}}' % _U8, b"\0"),
    ),
    refused(
        "name_lone_surrogate",
        "UTF-8",
        header(b'{"a\\ud800":{%s,"shape":[1],"data_offsets":[0,1]}}' % _U8, b"\0"),
    ),
    refused(
        "name_collides_with_output",
        "already",
        stored(
            **{
                O_PROJ: weight(),
                f"{O_PROJ}_scale": ("F8_E4M3", (32, 4), bytes(128)),
                O_PROJ.replace(".weight", ".weight_packed"): ("U8", (32, 32), bytes(1024)),
            }
        ),
    ),
)

NAMES = (
    Case(
        "name_ansi_escape",
        "quantized",
        "",
        stored(**{"\x1b[31mRED\x1b]0;pwned\x07.weight": weight()}),
    ),
    Case(
        "name_rich_markup",
        "kept",
        "not a linear layer",
        stored(
            **{
                "[bold red]x[/bold red][link=file:///etc/passwd]y[/link].weight": weight(),
                "[/nope]": weight(1),
            }
        ),
        ("[/nope]",),
    ),
    Case(
        "name_newline_cr", "quantized", "", stored(**{"a\r\nINFO fake log line\n.weight": weight()})
    ),
    Case("name_bidi_rlo", "quantized", "", stored(**{"a\u202egnp.exe.weight": weight()})),
    Case("name_empty", "kept", "not a linear layer", stored(**{"": weight()}), ("",)),
    Case("name_nul", "quantized", "", stored(**{"a\0b.weight": weight()})),
    Case("name_1MB", "quantized", "", stored(**{"x" * 1_000_000 + ".weight": weight()})),
)

_NBYTES = {8: ("F64", "I64", "U64"), 4: ("F32", "I32", "U32"), 2: ("F16", "I16", "U16")}
_NBYTES[1] = ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0")
_BUFFER, _PLAIN = "model.layers.0.buf", "not a linear layer"
_CODES = ("F8_E4M3", (128, 128), b"\x38" * 16384)
_EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
VALUES = (
    Case("values_nan", "unsound", "NaN", beginning(float("nan"))),
    Case("values_inf", "unsound", "Inf", beginning(float("inf"), float("-inf"))),
    Case("values_all_zero", "quantized", "", matrix((32, 64), bytes(4096))),
    Case("values_neg_zero", "quantized", "", matrix((32, 64), b"\x00\x80" * 2048)),
    Case("values_denormal", "quantized", "", matrix((32, 64), b"\x01\x00" * 2048)),
    Case("values_max_bf16", "quantized", "", matrix((32, 64), b"\x7f\x7f" * 2048)),
    Case("values_one_outlier", "warned", "", beginning(3e38)),
    Case("tensor_empty_0rows", "kept", "empty", matrix((0, 64)), (O_PROJ,)),
    Case("tensor_empty_0cols", "kept", "empty", matrix((64, 0)), (O_PROJ,)),
    Case("tensor_scalar", "kept", _PLAIN, beside("scale", "F32", (), b"\0\0\x80?"), ("scale",)),
    Case(
        "tensor_1d",
        "kept",
        "1-dimensional",
        beside("model.norm.weight", "BF16", (64,), bf16(64)),
        ("model.norm.weight",),
    ),
    refused(
        "tensor_3d_experts",
        "no recipe says",
        stored(**{_EXPERTS: ("BF16", (4, 32, 64), bf16(4, 32, 64))}),
    ),
    Case(
        "tensor_5d",
        "kept",
        "5-dimensional",
        stored(**{"vision.conv.weight": ("BF16", (2, 2, 2, 2, 16), bf16(2, 2, 2, 2, 16))}),
        ("vision.conv.weight",),
    ),
    Case("cols_not_multiple_of_block", "kept", "multiple of", matrix((32, 50)), (O_PROJ,)),
    Case("cols_mult16_not_32", "kept", "multiple of", matrix((32, 48)), (O_PROJ,), format="mxfp4"),
    Case("cols_odd", "kept", "multiple of", matrix((32, 63)), (O_PROJ,)),
    Case(
        "unaligned_data_start",
        "kept",
        _PLAIN,
        header(
            b'{"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"%s":{"dtype":"BF16","shape":[32,64],"data_offsets":[1,4097]}}' % O_PROJ.encode(),
            b"\x07" + DATA,
        ),
        ("b",),
    ),
    Case("misaligned_bf16", "kept", _PLAIN, beside("a", "U8", (3,), b"\1\2\3"), ("a",)),
    *(
        Case(
            f"dtype_{dtype}",
            "kept",
            _PLAIN,
            beside(_BUFFER, dtype, (32, 64), (b"\1" + bytes(n - 1)) * 2048),
            (_BUFFER,),
        )
        for n, dtypes in _NBYTES.items()
        for dtype in dtypes
    ),
    Case(
        "dtype_F4_subbyte",
        "kept",
        _PLAIN,
        beside(_BUFFER, "F4", (32, 64), b"\x12" * 1024),
        (_BUFFER,),
    ),
    refused("dtype_F4_odd_count", "byte", beside(_BUFFER, "F4", (3, 3), b"\x12" * 5)),
    refused("fp8_without_scales", "no scales", recorded({"quant_method": "fp8"}, {O_PROJ: _CODES})),
    refused(
        "fp8_scales_of_another_shape",
        "expected a float for the matrix, for each row, or for each block (config.json gives "
        "128x128 of blocks)",
        recorded(
            FP8_BLOCKS, {O_PROJ: _CODES, f"{O_PROJ}_scale_inv": ("F32", (2, 3), b"\0\0\x80?" * 6)}
        ),
    ),
    refused(
        "record_of_no_tensor",
        "already quantized, by 'bitsandbytes'",
        recorded({"quant_method": "bitsandbytes"}, {O_PROJ: weight()}),
    ),
    Case("qkv_missing_member", "warned", "group", stored(**{Q_PROJ: weight()})),
    Case(
        "qkv_split_over_shards",
        "quantized",
        "",
        sharded(
            {Q_PROJ: FIRST, K_PROJ: FIRST, V_PROJ: SECOND},
            {
                FIRST: pack_shard({Q_PROJ: weight(), K_PROJ: weight(1)}),
                SECOND: pack_shard({V_PROJ: weight(2)}),
            },
        ),
    ),
)

_ABSOLUTE = "/outside.safetensors"
LAYOUTS = (
    refused(
        "index_traversal_rel",
        "outside",
        sharded({O_PROJ: FIRST, "x": OUTSIDE}, {FIRST: SOUND, OUTSIDE: WRONG}),
    ),
    refused("index_absolute", "outside", sharded({O_PROJ: FIRST, "x": _ABSOLUTE}, {FIRST: SOUND})),
    refused(
        "index_symlink_out",
        "outside",
        sharded(
            {O_PROJ: FIRST, "x": "link.safetensors"},
            {FIRST: SOUND, OUTSIDE: WRONG, "link.safetensors": link(OUTSIDE)},
        ),
    ),
    Case(
        "hf_cache_symlinks",
        "quantized",
        "",
        {
            "blobs/aaaa": SOUND,
            f"snapshots/{'0' * 40}/model.safetensors": link("../../blobs/aaaa"),
            f"snapshots/{'0' * 40}/config.json": CONFIG,
        },
        source=f"snapshots/{'0' * 40}",
    ),
    refused(
        "index_missing_shard", "missing", sharded({O_PROJ: FIRST, "y": SECOND}, {FIRST: SOUND})
    ),
    refused(
        "index_tensor_not_in_shard",
        "not in",
        sharded({O_PROJ: FIRST, "ghost": FIRST}, {FIRST: SOUND}),
    ),
    Case(
        "index_omits_tensor",
        "warned",
        "not in the index",
        sharded(
            {O_PROJ: FIRST}, {FIRST: pack_shard({O_PROJ: weight(), "extra.weight": weight(1)})}
        ),
    ),
    refused(
        "index_wrong_shard",
        "not in",
        sharded({O_PROJ: "b.safetensors", "y": FIRST}, {FIRST: SOUND, "b.safetensors": OTHER}),
    ),
    refused(
        "index_duplicate_keys",
        "duplicate",
        {
            "config.json": CONFIG,
            FIRST: SOUND,
            "b.safetensors": pack_shard({O_PROJ: weight(1)}),
            INDEX: b'{"weight_map":{"%s":"%s","%s":"b.safetensors"}}'
            % (O_PROJ.encode(), FIRST.encode(), O_PROJ.encode()),
        },
    ),
    refused(
        "tensor_in_two_shards",
        "two",
        sharded(
            {O_PROJ: FIRST, "y": FIRST, "z": "b.safetensors"},
            {
                FIRST: pack_shard({O_PROJ: weight(), "y": weight(2)}),
                "b.safetensors": pack_shard({O_PROJ: weight(1)}),
            },
        ),
    ),
    refused("index_not_json", "index", {"config.json": CONFIG, FIRST: SOUND, INDEX: b"oops"}),
    refused(
        "index_no_weight_map", "weight_map", {"config.json": CONFIG, FIRST: SOUND, INDEX: b"{}"}
    ),
    refused("index_value_not_str", "weight_map", sharded({O_PROJ: 7}, {FIRST: SOUND})),
    refused(
        "index_and_single",
        "both",
        sharded(
            {O_PROJ: FIRST}, {FIRST: pack_shard({O_PROJ: weight(5)}), "model.safetensors": SOUND}
        ),
    ),
    refused(
        "index_dup_output_name_case",
        "case",
        sharded(
            {O_PROJ: "A.safetensors", "y": "a.safetensors"},
            {"A.safetensors": SOUND, "a.safetensors": OTHER},
        ),
    ),
    refused(
        "index_value_config_json",
        "safetensors",
        sharded({O_PROJ: FIRST, "y": "config.json"}, {FIRST: SOUND}),
    ),
    refused("shard_is_directory", "not a regular file", single(Path.mkdir)),
    refused("shard_is_fifo", "not a regular file", single(os.mkfifo)),
    refused(
        "pickle_bin_only",
        "pickle",
        {"config.json": CONFIG, "pytorch_model.bin": pickle.dumps(_Boom())},
    ),
    refused(
        "gguf_only",
        "no tensors",
        {"config.json": CONFIG, "model.gguf": b"GGUF\x03\0\0\0" + bytes(64)},
    ),
    refused("no_weights", "no safetensors", {"config.json": CONFIG}),
    Case("config_missing", "warned", "config.json", {"model.safetensors": SOUND}),
    refused(
        "config_not_json", "config.json", {"config.json": b"\xff\xfe{", "model.safetensors": SOUND}
    ),
    Case(
        "remote_code_present",
        "warned",
        "custom code",
        {
            "config.json": json.dumps(
                {**LLAMA, "auto_map": {"AutoModel": "modeling_x.X"}}
            ).encode(),
            "model.safetensors": SOUND,
            "modeling_x.py": b"import os\nos.system('touch PWNED')\n",
        },
    ),
)

CASES = (*CONTAINERS, *ENTRIES, *NAMES, *VALUES, *LAYOUTS)
