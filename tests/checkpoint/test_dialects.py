"""How an artifact spells a matrix: exact names, dtypes, shapes and bytes, and back again."""

import json
import struct

import numpy as np
import pytest
from checkpoints import read_folder, run, write_single
from spellings import PLAIN_LAYOUTS, arranged, module_of, write_artifact

from fp4convert.checkpoint.dialects.base import MatrixEncoder
from fp4convert.checkpoint.dialects.forms import Form
from fp4convert.checkpoint.dialects.registry import DIALECTS, dialect_named, is_quantized_tensor
from fp4convert.checkpoint.dialects.target_forms import dialect_to_write
from fp4convert.errors import InputError
from fp4convert.numerics.formats import MXFP4, NVFP4
from fp4convert.numerics.matrices import Quantized
from fp4convert.recipes.recipe import Target
from fp4convert.storage.safetensors import TensorRef

CT, MO = "compressed-tensors", "modelopt"
M = "layers.0.ffn.experts.1.w2"  # a name that every dialect has a place for
EXPERTS = "model.layers.0.mlp.experts"
NV, MX = Form(NVFP4), Form(MXFP4)
COMFY = Form(NVFP4, 16, "128x4")
SHAPE = (48, 64)
CODES, NV_SCALES, MX_SCALES = ("U8", (48, 32)), ("F8_E4M3", (48, 4)), ("U8", (48, 2))
SPELLINGS = [
    (
        CT,
        NV,
        {"weight_packed": CODES, "weight_scale": NV_SCALES, "weight_global_scale": ("F32", (1,))},
    ),
    (CT, MX, {"weight_packed": CODES, "weight_scale": MX_SCALES}),
    (MO, NV, {"weight": CODES, "weight_scale": NV_SCALES, "weight_scale_2": ("F32", ())}),
    ("quark", NV, {"weight": CODES, "weight_scale": NV_SCALES, "weight_scale_2": ("F32", ())}),
    ("quark", MX, {"weight": CODES, "weight_scale": MX_SCALES}),
    ("deepseek", MX, {"weight": ("I8", (48, 32)), "scale": ("F8_E8M0", (48, 2))}),
    ("mlx", NV, {"weight": ("U32", (48, 8)), "scales": ("U8", (48, 4))}),
    ("mlx", MX, {"weight": ("U32", (48, 8)), "scales": ("U8", (48, 2))}),
    (
        "comfy",
        COMFY,
        {
            "weight": CODES,
            "weight_scale": ("F8_E4M3", (128, 4)),
            "weight_scale_2": ("F32", ()),
            "comfy_quant": ("U8", (18,)),
        },
    ),
]
SCALARS = {"global_scale": ("F32", ())}
for _layout, _tensors in {
    "linear": {"weight": CODES, "block_scale": NV_SCALES},
    "128x4": {"weight": CODES, "block_scale": ("U8", (512,))},
    "8x4": {"weight": CODES, "block_scale": ("U8", (192,))},
    "deepgemm": {"weight": CODES, "block_scale": ("U8", (192,))},
    "k_major": {"weight": CODES, "block_scale": ("U8", (192,))},
    "interleaved": {"weight": ("U8", (48, 36))},
    "appended": {"weight": ("U8", (1728,))},
}.items():
    SPELLINGS.append(("plain", Form(NVFP4, 16, _layout), {**_tensors, **SCALARS}))
for _layout, _tensors in {
    "linear": {"weight": CODES, "block_scale": ("F8_E8M0", (48, 2))},
    "128x4": {"weight": CODES, "block_scale": ("U8", (512,))},
    "8x4": {"weight": CODES, "block_scale": ("U8", (192,))},
    "deepgemm": {"weight": CODES, "block_scale": ("U8", (192,))},
    "k_major": {"weight": CODES, "block_scale": ("U8", (96,))},
    "interleaved": {"weight": ("U8", (48, 34))},
    "appended": {"weight": ("U8", (1632,))},
}.items():
    SPELLINGS.append(("plain", Form(MXFP4, 16, _layout), _tensors))
every_spelling = pytest.mark.parametrize(
    ("name", "form", "expected"),
    SPELLINGS,
    ids=lambda part: part.format.name + part.scale_layout if isinstance(part, Form) else None,
)


def quantized(
    form: Form, shape: tuple[int, int], seed: int = 0, kind: str = "multiplier"
) -> Quantized:
    chance, (rows, columns) = np.random.default_rng(seed), shape
    packed = chance.integers(0, 256, rows * columns // 2, np.uint8).data
    block_scales = chance.integers(1, 0x7F, rows * columns // form.format.block_size, np.uint8).data
    return Quantized(
        form.format,
        shape,
        packed,
        block_scales,
        float(np.float32(0.0123)) if form.format.has_global_scale else None,
        kind,
    )


def spell(
    name: str, form: Form, q: Quantized, panels: list[Quantized], input_scale: float | None = None
) -> dict[str, bytes]:
    """Everything that is appended to each output, in its order."""
    parts: dict[str, bytes] = {}
    for part, data in MatrixEncoder(dialect_named(name), form, input_scale).encode(
        M, q.shape, iter(panels)
    ):
        parts[part] = parts.get(part, b"") + bytes(data)
    return parts


@every_spelling
def test_names_dtypes_and_shapes(name, form, expected):
    specs = dialect_named(name).outputs(M, SHAPE, form)
    assert {spec.name: (spec.dtype, spec.shape) for spec in specs} == {
        f"{M}.{part}": kind for part, kind in expected.items()
    }
    assert specs[0].name == M + dialect_named(name).TRAITS.packed, "the packed codes stand first"
    is_apart = {spec.name for spec in specs if spec.is_apart}
    assert is_apart == (
        {f"{M}.{part}" for part in expected if part != "weight"} if name == "plain" else set()
    )


@pytest.mark.parametrize(
    ("name", "form", "added"),
    [
        (CT, NV, {"input_global_scale": ("F32", (1,))}),
        (CT, MX, {}),
        (MO, NV, {"input_scale": ("F32", ())}),
        ("quark", NV, {"input_scale_2": ("F32", ())}),
        ("quark", MX, {}),
        ("comfy", COMFY, {"input_scale": ("F32", ())}),
        *(
            ("plain", Form(NVFP4, 16, layout), {"input_scale": ("F32", ())})
            for layout in PLAIN_LAYOUTS
        ),
        ("plain", MX, {}),
    ],
)
def test_four_bit_activations_add_an_input_scale_to_nvfp4(name, form, added):
    four = Form(form.format, 4, form.scale_layout)
    before, after = (dialect_named(name).outputs(M, SHAPE, kind) for kind in (form, four))
    assert after[: len(before)] == before
    assert {spec.name: (spec.dtype, spec.shape) for spec in after[len(before) :]} == {
        f"{M}.{part}": kind for part, kind in added.items()
    }


def test_names_dtypes_and_shapes_of_stacks():
    """openai/gpt-oss-20b: 32 experts, inner 2880, hidden 2880."""
    dialect = dialect_named("gpt-oss")
    shapes = {
        f"{EXPERTS}.{n}.{member}_proj": (2880, 2880)
        for n in range(32)
        for member in ("gate", "up", "down")
    }
    assert dialect.stems(shapes) == {
        f"{EXPERTS}.gate_up_proj": (32, 5760, 2880),
        f"{EXPERTS}.down_proj": (32, 2880, 2880),
    }
    found = [
        tuple(spec)
        for stem, shape in dialect.stems(shapes).items()
        for spec in dialect.outputs(stem, shape, MX)
    ]
    assert found == [
        (f"{EXPERTS}.gate_up_proj_blocks", "U8", (32, 5760, 90, 16), False),
        (f"{EXPERTS}.gate_up_proj_scales", "U8", (32, 5760, 90), False),
        (f"{EXPERTS}.down_proj_blocks", "U8", (32, 2880, 90, 16), False),
        (f"{EXPERTS}.down_proj_scales", "U8", (32, 2880, 90), False),
    ]


@every_spelling
def test_what_is_encoded_is_decoded(name, form, expected):
    """From panels of any height; of the kind that the dialect stores,
    so that nothing is inverted.
    """
    dialect = dialect_named(name)
    q = quantized(form, SHAPE, kind=dialect.TRAITS.global_scale_kind or "multiplier")
    if name == "mlx" and form is NV:
        q = Quantized(NVFP4, SHAPE, q.packed, q.block_scales, 1.0)
    parts = spell(name, form, q, [q.rows(0, 10), q.rows(10, 11), q.rows(11, 48)])
    specs = {spec.name: spec for spec in dialect.outputs(M, SHAPE, form)}
    assert {part: len(data) for part, data in parts.items()} == {
        part: TensorRef(*spec[:3], "", 0).nbytes for part, spec in specs.items()
    }
    packed = TensorRef(*dialect.outputs(M, SHAPE, form)[0][:3], "", 0)
    known = Form(form.format, 16, form.scale_layout, None, {M: SHAPE})
    assert dialect.stored_shape(M, packed, known) == SHAPE
    back = dialect.decode(M, SHAPE, known, lambda part: memoryview(parts[part]))
    for first, last in ((0, 48), (0, 1), (7, 33), (47, 48)):
        found, wanted = back.rows(first, last), q.rows(first, last)
        assert (bytes(found.packed), bytes(found.block_scales)) == (
            bytes(wanted.packed),
            bytes(wanted.block_scales),
        )
    assert (back.format, back.shape, back.global_scale) == (q.format, SHAPE, q.global_scale)
    assert not form.format.has_global_scale or back.kind == q.kind


def small(fmt, codes: str, scales: str, rows: int) -> Quantized:
    """A matrix of hand-typed bytes, low nibble first; a global scale of 0.5."""
    columns = len(bytes.fromhex(codes)) * 2 // rows
    packed, block_scales = memoryview(bytes.fromhex(codes)), memoryview(bytes.fromhex(scales))
    return Quantized(fmt, (rows, columns), packed, block_scales, 0.5 if fmt is NVFP4 else None)


ROW_0, ROW_1 = (
    "10 32 54 76 98 ba dc fe 01 23 45 67 89 ab cd ef",
    "11 11 11 11 11 11 11 11 22 22 22 22 22 22 22 22",
)
TWO_ROWS = small(NVFP4, ROW_0 + ROW_1, "a0 a1 b0 b1", 2)


def test_bytes_of_comfy():
    """The even column in bits 4-7; scales 0, 1 of row 0 at byte 0, those of row 1 at byte 16 of a
    tile of 512.
    """
    parts = spell("comfy", Form(NVFP4, 4, "128x4"), TWO_ROWS, [TWO_ROWS], input_scale=2.0)
    swapped = "01 23 45 67 89 ab cd ef 10 32 54 76 98 ba dc fe" + ROW_1
    assert parts[f"{M}.weight"] == bytes.fromhex(swapped)
    assert parts[f"{M}.weight_scale"] == bytes.fromhex("a0 a1" + "00" * 14 + "b0 b1" + "00" * 494)
    assert parts[f"{M}.weight_scale_2"] == b"\0\0\0\x3f"
    assert parts[f"{M}.input_scale"] == b"\0\0\0\x40"
    assert parts[f"{M}.comfy_quant"] == b'{"format":"nvfp4"}'


def test_words_of_mlx():
    """Eight codes to a word, the first in its lowest bits: 0, 1, ... 7 is 0x76543210."""
    q = Quantized(NVFP4, TWO_ROWS.shape, TWO_ROWS.packed, TWO_ROWS.block_scales, 1.0)
    parts = spell("mlx", NV, q, [q])
    assert np.frombuffer(parts[f"{M}.weight"], "<u4").tolist() == [
        *(0x76543210, 0xFEDCBA98, 0x67452301, 0xEFCDAB89),
        *(0x11111111, 0x11111111, 0x22222222, 0x22222222),
    ]
    assert parts == {
        f"{M}.weight": bytes.fromhex(ROW_0 + ROW_1),
        f"{M}.scales": bytes.fromhex("a0 a1 b0 b1"),
    }


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("linear", "a0 a1 b0 b1"),
        ("128x4", "a0 a1" + "00" * 14 + "b0 b1" + "00" * 494),
        ("8x4", "a0 a1 00 00 b0 b1 00 00" + "00" * 24),
        ("deepgemm", "a0 a1 00 00 b0 b1 00 00 00 00 00 00 00 00 00 00"),
        ("k_major", "a0 b0 a1 b1"),
    ],
)
def test_bytes_of_plain_in_every_order(layout, expected):
    parts = spell(
        "plain",
        Form(NVFP4, 4, layout),
        TWO_ROWS,
        [TWO_ROWS.rows(0, 1), TWO_ROWS.rows(1, 2)],
        input_scale=2.0,
    )
    assert parts == {
        f"{M}.weight": bytes.fromhex(ROW_0 + ROW_1),
        f"{M}.block_scale": bytes.fromhex(expected),
        f"{M}.global_scale": b"\0\0\0\x3f",
        f"{M}.input_scale": b"\0\0\0\x40",
    }


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (
            "interleaved",
            ROW_0[:23] + "a0" + ROW_0[23:] + "a1" + ROW_1[:23] + "b0" + ROW_1[23:] + "b1",
        ),
        ("appended", ROW_0 + ROW_1 + "a0 a1 b0 b1"),
    ],
)
def test_bytes_of_plain_with_codes_and_scales_in_one(layout, expected):
    parts = spell(
        "plain", Form(NVFP4, 16, layout), TWO_ROWS, [TWO_ROWS.rows(0, 1), TWO_ROWS.rows(1, 2)]
    )
    assert parts == {f"{M}.weight": bytes.fromhex(expected), f"{M}.global_scale": b"\0\0\0\x3f"}


@pytest.mark.parametrize("layout", ["128x4", "8x4", "deepgemm", "k_major"])
@pytest.mark.parametrize("shape", [(1, 1), (129, 5), (32, 4), (130, 9), (8, 3), (257, 1)])
def test_orders_are_those_of_the_kernels_sources(layout, shape):
    """Every byte at the offset that the formulas give, in more than one tile and with padding both
    ways.
    """
    rows, blocks = shape
    q = quantized(NV, (rows, blocks * 16))
    parts = spell("plain", Form(NVFP4, 16, layout), q, [q])
    assert parts[f"{M}.block_scale"] == arranged(
        np.frombuffer(q.block_scales, np.uint8).reshape(shape), layout
    )


def test_rows_of_gate_and_up_take_turns(tmp_path):
    """Typed by hand: two experts, gate rows of 0x1N, up rows of 0x2N; the biases stay; and the same
    as modules again.
    """
    tensors = {f"{EXPERTS}.gate_up_proj_bias": ("BF16", (2, 4), bytes(16))}
    for expert, digits in ((0, "01"), (1, "23")):
        for member, kind in (("gate_proj", "1"), ("up_proj", "2"), ("down_proj", "3")):
            rows = bytes.fromhex("".join((kind + digit) * 16 for digit in digits))
            tensors[f"{EXPERTS}.{expert}.{member}.weight_packed"] = ("U8", (2, 16), rows)
            scales = bytes.fromhex("".join(digit + kind for digit in digits))
            tensors[f"{EXPERTS}.{expert}.{member}.weight_scale"] = ("U8", (2, 1), scales)
    group = {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}
    record = {
        "quant_method": CT,
        "format": "mxfp4-pack-quantized",
        "config_groups": {"g": group},
        "quantization_status": "compressed",
    }
    artifact = write_single(tmp_path / "a", tensors, {"quantization_config": record})
    assert run("transcode", artifact, "-o", tmp_path / "b", "--dialect", "gpt-oss", "-q").code == 0
    gate_up = "".join(code * 16 for code in ("10", "20", "11", "21", "12", "22", "13", "23"))
    down = "".join(code * 16 for code in ("30", "31", "32", "33"))
    assert read_folder(tmp_path / "b") == {
        f"{EXPERTS}.gate_up_proj_bias": ("BF16", (2, 4), bytes(16)),
        f"{EXPERTS}.gate_up_proj_blocks": ("U8", (2, 4, 1, 16), bytes.fromhex(gate_up)),
        f"{EXPERTS}.gate_up_proj_scales": (
            "U8",
            (2, 4, 1),
            bytes.fromhex("01 02 11 12 21 22 31 32"),
        ),
        f"{EXPERTS}.down_proj_blocks": ("U8", (2, 2, 1, 16), bytes.fromhex(down)),
        f"{EXPERTS}.down_proj_scales": ("U8", (2, 2, 1), bytes.fromhex("03 13 23 33")),
    }
    assert run("transcode", tmp_path / "b", "-o", tmp_path / "c", "--dialect", CT, "-q").code == 0
    assert read_folder(tmp_path / "c") == tensors


def test_the_file_of_comfy_names_its_modules(tmp_path):
    """In both shards those that it holds, and no more once they are spelled otherwise."""
    modules = {name: module_of(1, "nvfp4", (16, 32), 0.5) for name in ("a", "b")}
    artifact = write_artifact(tmp_path / "a", MO, "nvfp4", modules, is_split=True)
    assert run("transcode", artifact, "-o", tmp_path / "b", "--dialect", "comfy", "-q").code == 0
    words = ("-o", tmp_path / "c", "--dialect", "quark", "-q")
    assert run("transcode", tmp_path / "b", *words).code == 0
    named = {}
    for path in sorted((tmp_path / "b").glob("*.safetensors")):
        told = json.loads(metadata_of(path).get("_quantization_metadata", '{"layers": {}}'))
        named |= dict.fromkeys(told["layers"], path.name)
        assert all(layer == {"format": "nvfp4"} for layer in told["layers"].values())
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())["weight_map"]
    assert named == {name: index[f"{name}.weight"] for name in modules}
    assert all(
        metadata_of(path) == {"format": "pt"} for path in (tmp_path / "c").glob("*.safetensors")
    )


def metadata_of(path) -> dict[str, str]:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]


LARGEST = float(np.float32(3.4e38) / np.float32(2688))
MULTIPLIERS = [1.0, 2.0**-126, 2.0**100, 3.0, 1e-5, 6.5e-4, LARGEST]


def stored_global(name: str, multiplier: float, kind: str) -> bytes:
    q = Quantized(NVFP4, (1, 16), memoryview(bytes(8)), memoryview(bytes(1)), multiplier, kind)
    ((_, data),) = dialect_named(name).TRAITS.scalars.encode(M, q, None)
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(CT, "multiplier"), (MO, "divisor"), ("quark", "divisor"), ("plain", "divisor")],
)
def test_the_other_kind_of_global_scale_is_one_rounding_of_its_reciprocal(name, kind):
    rng = np.random.default_rng(1)
    exponents = rng.uniform(-126, 115, 2000)
    drawn = (rng.uniform(1, 2, 2000) * 2.0**exponents).astype(np.float32)
    for value in (*np.array(MULTIPLIERS, np.float32), *drawn):
        expected = (np.float32(1) / value).astype("<f4").tobytes()
        assert stored_global(name, float(value), kind) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [(CT, "divisor"), (MO, "multiplier"), ("quark", "multiplier"), ("plain", "multiplier")],
)
def test_the_own_kind_of_global_scale_is_stored_as_it_is(name, kind):
    for value in np.array(MULTIPLIERS, np.float32):
        assert stored_global(name, float(value), kind) == struct.pack("<f", value)


def test_no_global_scale_is_no_tensor():
    q = Quantized(MXFP4, (1, 32), memoryview(bytes(16)), memoryview(bytes(1)), None)
    for name in (CT, "quark", "gpt-oss", "deepseek", "mlx", "plain"):
        assert list(dialect_named(name).TRAITS.scalars.encode(M, q, None)) == []


@pytest.mark.parametrize(
    ("name", "is_quantized"),
    [
        ("a.layer_scales", False),
        ("a.weight_packed", True),
        ("a.weight_scale", True),
        ("a.weight_scale_2", True),
        ("a.weight_global_scale", True),
        ("a.weight_scale_inv", True),
        ("a.experts.gate_up_proj_blocks", True),
        ("a.experts.gate_up_proj_scales", True),
        ("a.qweight", True),
        ("a.qzeros", True),
        ("a.weight", False),
        ("a.bias", False),
        ("a.scale", False),
        ("a.logit_scale", False),
        ("a.blocks.0.weight", False),
        ("a.comfy_quant", True),
        ("a.scales", True),
        ("a.block_scale", True),
        ("a.global_scale", True),
    ],
)
def test_names_that_only_quantized_checkpoints_have(name, is_quantized):
    ref = TensorRef(name, "U8" if is_quantized else "BF16", (4, 4), "model.safetensors", 0)
    assert is_quantized_tensor(ref) is is_quantized


@pytest.mark.parametrize(
    ("name", "form", "dtype", "shape"),
    [
        (CT, NV, "U8", (4,)),
        (CT, NV, "U8", (4, 12)),
        (MO, NV, "U8", (0, 16)),
        ("quark", MX, "U8", (4, 8)),
        ("mlx", MX, "U32", (4, 2)),
        ("mlx", MX, "U32", (4, 4, 1)),
        ("comfy", COMFY, "U8", (4, 8, 1)),
        ("gpt-oss", MX, "U8", (2, 4, 16)),
        ("plain", Form(NVFP4, 16, "interleaved"), "U8", (4, 16)),
        ("plain", Form(NVFP4, 16, "interleaved"), "U8", (36,)),
        ("plain", Form(NVFP4, 16, "appended"), "U8", (36,)),
    ],
)
def test_codes_that_hold_no_matrix(name, form, dtype, shape):
    """No whole blocks, too many dimensions, or a shape that nothing tells."""
    assert dialect_named(name).stored_shape(M, TensorRef(M, dtype, shape, "x", 0), form) is None


def test_a_stack_of_gate_and_up_has_an_even_number_of_rows():
    odd = TensorRef("x", "U8", (2, 5, 1, 16), "x", 0)
    assert dialect_named("gpt-oss").stored_shape(f"{EXPERTS}.gate_up_proj", odd, MX) is None
    assert dialect_named("gpt-oss").stored_shape(f"{EXPERTS}.down_proj", odd, MX) == (2, 5, 32)


def test_an_unknown_dialect_is_refused_with_the_known_ones():
    with pytest.raises(InputError) as caught:
        dialect_named("awq")
    assert caught.value.code == "unknown-dialect"
    assert caught.value.message.endswith(", ".join(DIALECTS))


@pytest.mark.parametrize(
    ("name", "fmt", "able"),
    [
        (MO, "mxfp4", "nvfp4"),
        ("comfy", "mxfp4", "nvfp4"),
        ("gpt-oss", "nvfp4", "mxfp4"),
    ],
)
def test_a_dialect_that_cannot_say_a_format_is_refused(name, fmt, able):
    with pytest.raises(InputError) as caught:
        dialect_to_write(Target(fmt, name))
    assert caught.value.code == "dialect-format"
    assert f"it holds {able}" in caught.value.message
