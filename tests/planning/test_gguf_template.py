"""A donor's frame: rows find their order in it, and any file that is not the model's own is
refused, with nothing written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import LAYER, Outcome, read_folder, run, values_of, write_llama
from gguf.quants import dequantize
from gguf_donors import Arrays, llamas, model, permuted, write_donor

from fp4convert.conversion.quantize import prepare_quantize, quantize
from fp4convert.conversion.request import take_apart
from fp4convert.execution.settings import Settings
from fp4convert.options.writing import QuantizeOptions
from fp4convert.storage.open import open_source

MODULES = 7


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    source = write_llama(folder / "source")
    for fmt in ("mxfp4", "nvfp4"):
        assert run("quantize", source, "--format", fmt, "-o", folder / fmt, "-q").code == 0
    return {fmt: folder / fmt for fmt in ("source", "mxfp4", "nvfp4")}


def transcode(artifact: Path, donor: Path, output: Path) -> Outcome:
    return run(
        "transcode", artifact, "-o", output, "--dialect", "gguf", "--template", donor, "--json"
    )


def refused(code: str, outcome: Outcome, output: Path) -> None:
    assert outcome.code == 2, outcome.out + outcome.err
    assert outcome.json["error"]["code"] == code, outcome.err
    assert not output.exists()


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("order", [llamas, dict])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_rows_find_their_order(
    artifacts: dict[str, Path],
    tmp_path: Path,
    fmt: str,
    order: Callable[[Arrays], Arrays],
    kind: str,
) -> None:
    """Every tensor is close to the donor's in that order, by llama.cpp's own package; q is far from
    itself in the other.
    """
    arrays = order(model())
    outcome = transcode(
        artifacts[fmt], write_donor(tmp_path / "donor.gguf", arrays, kind), tmp_path / "out"
    )
    assert outcome.code == 0, outcome.err
    stored = {each.name: each for each in gguf.GGUFReader(tmp_path / "out" / "donor.gguf").tensors}
    assert sum(each.tensor_type.name == fmt.upper() for each in stored.values()) == MODULES
    for name, array in arrays.items():
        found = dequantize(stored[name].data, stored[name].tensor_type)
        if scale := stored.get(name.removesuffix("weight") + "scale"):
            found = found * scale.data
        assert np.linalg.norm(found - array) < 0.15 * np.linalg.norm(array), name
    found = dequantize(
        stored["blk.0.attn_q.weight"].data, stored["blk.0.attn_q.weight"].tensor_type
    )
    assert (
        abs(np.corrcoef(permuted(found, 4).ravel(), arrays["blk.0.attn_q.weight"].ravel())[0, 1])
        < 0.5
    )


RECIPE = """
about = "NVFP4 beside FP8 and MXFP8"
base = "default"
[[format]]
modules = ["*.q_proj", "*.k_proj", "*.v_proj"]
format = "fp8"
[[format]]
modules = ["*.o_proj"]
format = "mxfp8"
"""


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_eight_bits_become_the_frames_floats(
    artifacts: dict[str, Path], tmp_path: Path, dialect: str
) -> None:
    """In its order of rows, bit for bit what dequantize writes; counted, and told."""
    (tmp_path / "mixed.toml").write_text(RECIPE)
    options = ("--format", "nvfp4", "--recipe", tmp_path / "mixed.toml", "--dialect", dialect)
    made = tmp_path / "made"
    assert run("quantize", artifacts["source"], *options, "-o", made, "-q").code == 0
    donor = write_donor(tmp_path / "donor.gguf", llamas(model()), "F32")
    outcome = transcode(made, donor, tmp_path / "out")
    assert outcome.code == 0, outcome.err
    told = outcome.json["carried"]
    assert (told["modules"], told["bit_for_bit"], told["floats"]) == (MODULES, 3, 4)
    assert outcome.json["tensors"]["transcoded"] == 3
    assert outcome.json["tensors"]["dequantized"] == 4
    texts = " ".join(outcome.json["warnings"])
    assert "3 matrices become fp32" in texts
    assert "1 matrices become fp32" in texts
    stored = {each.name: each for each in gguf.GGUFReader(tmp_path / "out" / "donor.gguf").tensors}
    assert run("dequantize", made, "-o", tmp_path / "r", "--dtype", "fp32", "-q").code == 0
    values = read_folder(tmp_path / "r")
    for name, own, heads in (
        ("attn_q", "q_proj", 4),
        ("attn_k", "k_proj", 2),
        ("attn_v", "v_proj", 0),
        ("attn_output", "o_proj", 0),
    ):
        expected = values_of(values[f"{LAYER}.self_attn.{own}.weight"])
        expected = permuted(expected, heads) if heads else expected
        assert stored[f"blk.0.{name}.weight"].tensor_type.name == "F32"
        assert np.array_equal(stored[f"blk.0.{name}.weight"].data, expected), name


def without(arrays: Arrays, *names: str) -> Arrays:
    return {name: array for name, array in arrays.items() if name not in names}


Q, DOWN = "blk.0.attn_q.weight", "blk.0.ffn_down.weight"
DONORS: dict[str, tuple[str, Callable[[Arrays], Arrays]]] = {
    "another model": (
        "template-differs",
        lambda arrays: {name: array[::-1].copy() for name, array in arrays.items()},
    ),
    "one other matrix": ("template-differs", lambda arrays: {**arrays, DOWN: -arrays[DOWN]}),
    "weights twice as large": (
        "template-differs",
        lambda arrays: {**arrays, DOWN: 2 * arrays[DOWN]},
    ),
    "weights of zero": ("template-differs", lambda arrays: {**arrays, DOWN: 0 * arrays[DOWN]}),
    "weights that are NaN": (
        "template-differs",
        lambda arrays: {**arrays, DOWN: np.full_like(arrays[DOWN], np.nan)},
    ),
    "heads of another size": (
        "template-differs",
        lambda arrays: {**arrays, Q: permuted(arrays[Q], 8)},
    ),
    "more rows": (
        "template-differs",
        lambda arrays: {**arrays, DOWN: np.concatenate([arrays[DOWN]] * 2)},
    ),
    "fewer columns": (
        "template-differs",
        lambda arrays: {**arrays, DOWN: arrays[DOWN][:, :64].copy()},
    ),
    "turned": ("template-differs", lambda arrays: {**arrays, DOWN: arrays[DOWN].T.copy()}),
    "no q": ("template-name", lambda arrays: without(arrays, Q)),
    "no tensors": ("template-name", lambda arrays: {}),
    "names of transformers": (
        "template-name",
        lambda arrays: {f"model.{name}": array for name, array in arrays.items()},
    ),
}


@pytest.mark.parametrize("case", DONORS)
def test_a_donor_of_another_model_is_refused(
    artifacts: dict[str, Path], tmp_path: Path, case: str
) -> None:
    code, change = DONORS[case]
    donor = write_donor(tmp_path / "donor.gguf", change(model()))
    for fmt in ("mxfp4", "nvfp4"):
        refused(code, transcode(artifacts[fmt], donor, tmp_path / "out"), tmp_path / "out")


@pytest.mark.parametrize("name", [DOWN, "token_embd.weight"])
def test_of_other_weights_it_is_told_that_a_fold_leaves_no_donor(
    artifacts: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """One whose columns, or what is kept, are those before awq."""
    arrays = model()
    donor = write_donor(tmp_path / "donor.gguf", {**arrays, name: 3 * arrays[name]})
    outcome = transcode(artifacts["nvfp4"], donor, tmp_path / "out")
    assert "(awq), none fits: quantize the GGUF file" in outcome.json["error"]["next"]


def test_a_quantized_donor_is_refused(artifacts: dict[str, Path], tmp_path: Path) -> None:
    for number, kind in enumerate(("MXFP4", "Q8_0")):
        donor = write_donor(tmp_path / f"donor{number}.gguf", model(), kind)
        refused(
            "template-differs",
            transcode(artifacts["mxfp4"], donor, tmp_path / "out"),
            tmp_path / "out",
        )


def test_a_donor_of_another_kind_is_refused(artifacts: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused("template", transcode(artifacts["mxfp4"], artifacts["source"], out), out)
    refused("template", transcode(artifacts["mxfp4"], artifacts["mxfp4"], out), out)
    unknown = write_donor(tmp_path / "donor.gguf", model(), architecture="nobodys")
    refused("gguf", transcode(artifacts["mxfp4"], unknown, out), out)
    refused("gguf", transcode(artifacts["mxfp4"], _damaged(unknown), out), out)
    deep = write_donor(tmp_path / "deep.gguf", model(), blocks=1 << 30)  # names of all: terabytes
    refused("gguf", transcode(artifacts["mxfp4"], deep, out), out)
    donor = write_donor(tmp_path / "sound.gguf", model())
    arguments = ("transcode", artifacts["mxfp4"], "-o", out, "--template", donor, "--json")
    refused("template", run(*arguments, "--dialect", "modelopt", "--format", "nvfp4"), out)


def _damaged(donor: Path) -> Path:
    path = donor.with_name("damaged.gguf")
    path.write_bytes(donor.read_bytes()[:300])
    return path


def test_a_tied_output_stays_tied(artifacts: dict[str, Path], tmp_path: Path) -> None:
    donor = write_donor(tmp_path / "donor.gguf", llamas(without(model(), "output.weight")))
    assert transcode(artifacts["mxfp4"], donor, tmp_path / "out").code == 0
    names = {each.name for each in gguf.GGUFReader(tmp_path / "out" / "donor.gguf").tensors}
    assert names == set(without(model(), "output.weight"))


def test_a_dialect_and_a_file_of_different_kinds_are_refused(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    out, donor = tmp_path / "out", write_donor(tmp_path / "donor.gguf", model())
    quantize_options = ("--format", "mxfp4", "-o", out, "--json")
    refused(
        "dialect-container",
        run("quantize", artifacts["source"], "--dialect", "gguf", *quantize_options),
        out,
    )
    refused(
        "dialect-container",
        run("quantize", donor, "--dialect", "compressed-tensors", *quantize_options),
        out,
    )
    refused("dialect-container", run("quantize", donor, *quantize_options), out)
    refused(
        "dialect-container",
        run("transcode", artifacts["mxfp4"], "-o", out, "--dialect", "gguf", "--json"),
        out,
    )


def test_a_gguf_file_is_quantized_inspected_verified_and_turned_back(tmp_path: Path) -> None:
    """The donor's bytes are what is kept, in the same order; dequantized, the file has the donor's
    names and shapes again.
    """
    donor, out = write_donor(tmp_path / "donor.gguf", llamas(model())), tmp_path / "out"
    for fmt in ("mxfp4", "nvfp4"):
        options = ("--format", fmt, "--dialect", "gguf", "-q")
        assert run("quantize", donor, "-o", out / fmt, *options).code == 0
        for command in ("inspect", "verify"):
            for more in ((), ("--source", donor)):
                outcome = run(command, out / fmt, *more, "--json")
                assert (outcome.code, [each["level"] for each in outcome.json["findings"]]) == (
                    0,
                    [],
                ), outcome.out
        assert len(outcome.json["tensors"]) == MODULES
        for dtype in ("bf16", "fp32"):
            assert (
                run(
                    "dequantize", out / fmt, "-o", out / f"{fmt}-{dtype}", "--dtype", dtype, "-q"
                ).code
                == 0
            )
            restored = gguf.GGUFReader(out / f"{fmt}-{dtype}" / "donor.gguf")
            first = gguf.GGUFReader(donor)
            assert [(each.name, each.shape.tolist()) for each in restored.tensors] == [
                (each.name, each.shape.tolist()) for each in first.tensors
            ]
            assert {each.tensor_type.name for each in restored.tensors} <= {"BF16", "F32"}
            assert not (out / f"{fmt}-{dtype}" / "config.json").exists()


def test_what_stays_whole_is_the_same_file(tmp_path: Path) -> None:
    """Byte for byte, as llama.cpp's own writer wrote it, with the zeros behind a last tensor of
    three numbers.  The command refuses such a plan, for it quantizes nothing.
    """
    arrays = {**llamas(model()), "blk.0.attn_norm.bias": np.ones(3, np.float32)}
    donor = write_donor(tmp_path / "donor.gguf", arrays)
    options = QuantizeOptions(donor, format="mxfp4", dialect="gguf", exclude="*")
    source = open_source(str(donor))
    quantize(
        source, prepare_quantize(take_apart(source, options)), tmp_path / "out", Settings("cpu")
    )
    assert (tmp_path / "out" / "donor.gguf").read_bytes() == donor.read_bytes()
    record = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    assert record["dialect"] == "gguf"


STACK = {"blk.0.attn_v_exps.weight": np.ones((2, 64, 64), np.float32)}


@pytest.mark.parametrize(
    ("more", "kinds", "warning"),
    [
        ({}, {"blk.0.attn_q.weight": "NVFP4", DOWN: "MXFP4"}, "formats-mixed"),
        (STACK, {"blk.0.attn_q.weight": "MXFP4", **dict.fromkeys(STACK, "MXFP4")}, "stack-unread"),
    ],
)
def test_four_bit_tensors_that_would_stay_so_are_refused(
    tmp_path: Path, more: Arrays, kinds: dict[str, str], warning: str
) -> None:
    donor, out = (
        write_donor(tmp_path / "donor.gguf", {**model(), **more}, kinds=kinds),
        tmp_path / "out",
    )
    found = run("inspect", donor, "--json").json
    assert warning in [finding["code"] for finding in found["findings"]]
    refused("already-quantized", run("dequantize", donor, "-o", out, "--json"), out)


def test_nvfp4_of_llama_quantize_has_no_global_scales(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """A scale that is missing is 1: the file is sound, and its weights are what llama.cpp's own
    package decodes.
    """
    donor = write_donor(tmp_path / "donor.gguf", model())
    assert transcode(artifacts["nvfp4"], donor, tmp_path / "first").code == 0
    stored = gguf.GGUFReader(tmp_path / "first" / "donor.gguf").tensors
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    bare = {each.name: each for each in stored if not each.name.endswith(".scale")}
    assert len(bare) == len(stored) - MODULES
    for each in bare.values():
        writer.add_tensor(each.name, each.data, raw_dtype=each.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = run("inspect", tmp_path / "bare.gguf", "--json").json
    assert (found["format"], found["tensors"]["quantized"]) == ("nvfp4", MODULES)
    assert found["findings"] == []
    assert (
        run(
            "dequantize", tmp_path / "bare.gguf", "-o", tmp_path / "out", "--dtype", "fp32", "-q"
        ).code
        == 0
    )
    for each in gguf.GGUFReader(tmp_path / "out" / "bare.gguf").tensors:
        expected = dequantize(bare[each.name].data, bare[each.name].tensor_type)
        assert np.array_equal(dequantize(each.data, each.tensor_type), expected), each.name


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0xB8])
def test_scales_that_llama_cpp_reads_as_others_are_refused(
    artifacts: dict[str, Path], tmp_path: Path, byte: int
) -> None:
    """NaN, or with a sign; whatever row they are in, the artifact is blamed and not the donor."""
    folder = tmp_path / "artifact"
    shutil.copytree(artifacts["nvfp4"], folder)
    for path in folder.glob("*.safetensors"):
        shard = bytearray(path.read_bytes())
        header = json.loads(shard[8 : 8 + int.from_bytes(shard[:8], "little")])
        if entry := header.get(f"{LAYER}.mlp.down_proj.weight_scale"):
            shard[8 + int.from_bytes(shard[:8], "little") + entry["data_offsets"][0]] = byte
        path.write_bytes(shard)
    donor = write_donor(tmp_path / "donor.gguf", llamas(model()))
    outcome = transcode(folder, donor, tmp_path / "out")
    refused("dialect-block-scale", outcome, tmp_path / "out")
    assert outcome.json["error"]["tensor"] == f"{LAYER}.mlp.down_proj"


def test_files_that_stay_behind_are_named(artifacts: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(artifacts["nvfp4"], folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    for command in (
        ("transcode", folder, "-o", tmp_path / "a", "--dialect", "modelopt"),
        ("dequantize", folder, "-o", tmp_path / "b"),
    ):
        outcome = run(*command)
        assert outcome.code == 0
        assert "'pytorch_model.bin'" in outcome.err


def test_where_llama_cpp_passes_over_global_scales_they_are_one(
    artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """It loads a .scale for every architecture, and most of its graphs do not multiply with it."""
    donor = write_donor(tmp_path / "donor.gguf", model(), architecture="qwen2")
    assert (
        run(
            "quantize",
            donor,
            "--format",
            "nvfp4",
            "--dialect",
            "gguf",
            "-o",
            tmp_path / "own",
            "-q",
        ).code
        == 0
    )
    found = {
        tensor.name: tensor.data
        for tensor in gguf.GGUFReader(tmp_path / "own" / "donor.gguf").tensors
    }
    assert {float(data[0]) for name, data in found.items() if name.endswith(".scale")} == {1.0}
    refused(
        "dialect-global-scale",
        transcode(artifacts["nvfp4"], donor, tmp_path / "out"),
        tmp_path / "out",
    )
    assert transcode(artifacts["mxfp4"], donor, tmp_path / "mxfp4").code == 0


def test_a_matrix_without_a_place_for_its_global_scale_stays(tmp_path: Path) -> None:
    """llama.cpp loads no file with a .scale that it does not know, such as an embedding's."""
    donor = write_donor(tmp_path / "donor.gguf", model())
    options = ("--dialect", "gguf", "--include", "token_embd", "-q")
    words = ("quantize", donor, *options, "-o", tmp_path / "out", "--json")
    refused = run(*words, "--format", "nvfp4")
    assert (refused.code, refused.json["error"]["code"]) == (2, "idle-option")
    assert run(*words, "--format", "mxfp4").json["tensors"]["quantized"] == MODULES + 1


@pytest.mark.parametrize(
    "command", [("quantize", "--format", "mxfp4"), ("transcode", "--dialect", "quark")]
)
def test_the_folder_of_a_single_file_is_never_the_output(
    artifacts: dict[str, Path], tmp_path: Path, command: tuple[str, ...]
) -> None:
    """--force would remove what is read."""
    folder = tmp_path / "artifact"
    shutil.copytree(
        artifacts["mxfp4"] if command[0] == "transcode" else artifacts["source"], folder
    )
    (single,) = sorted(folder.glob("*.safetensors"))[:1]
    before = single.read_bytes()
    outcome = run(command[0], single, *command[1:], "-o", folder, "--force", "--json")
    assert outcome.code in (2, 5)
    assert single.read_bytes() == before


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight"])
def test_a_donor_with_another_embedding_is_refused(
    artifacts: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """The donor's own is kept: two models would be one."""
    arrays = llamas(model())
    arrays[name] = np.roll(arrays[name], 1, axis=0)
    outcome = transcode(
        artifacts["mxfp4"], write_donor(tmp_path / "donor.gguf", arrays), tmp_path / "out"
    )
    refused("template-differs", outcome, tmp_path / "out")
