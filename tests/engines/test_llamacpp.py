"""llama.cpp: it loads and runs the GGUF files that the command writes, from a GGUF file and from an
artifact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import run
from llamacpp_models import (
    EXPERT,
    FILE_TYPES,
    MAKERS,
    distance,
    expected_by_transformers,
    four_bit,
    gguf_name,
    permuted,
    read_gguf,
    run_llamacpp,
    runs_llamacpp,
    values_of_tensor,
    weights_of,
    write_gguf,
    write_gptoss,
    write_renamed,
)
from tiny_models import differing, fp4convert, fp4convert_json, is_quantized, read_tensors
from torch_formulas import decoded, e4m3, e8m0, mxfp4_weight, unpacked

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODULES = 14
KINDS = ["llama", "qwen3", "qwen3moe", "mixtral"]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_format = pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])


@dataclass(frozen=True, slots=True)
class Models:
    """A checkpoint, the same as a GGUF file in bfloat16, and what the command makes of each: GGUF
    files, and an artifact.
    """

    checkpoint: Path
    template: Path
    artifact: Path
    quantized: Path
    transcoded: Path

    def made(self, way: str) -> Path:
        return {"quantize": self.quantized, "transcode": self.transcoded}[way]


Make = Callable[[str, str], Models]
every_way = pytest.mark.parametrize("way", ["quantize", "transcode"])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(architecture, format) -> its models, made once; artifacts of NVFP4 store the multiplier that
    GGUF stores too.
    """

    @cache
    def source(kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        checkpoint = MAKERS[kind](folder / "checkpoint")
        return checkpoint, write_gguf(checkpoint, kind, folder / "tiny.gguf")

    @cache
    def models(kind: str, fmt: str) -> Models:
        folder, (checkpoint, template) = tmp_path_factory.mktemp(f"{kind}-{fmt}"), source(kind)
        artifact, quantized, transcoded = (
            folder / name for name in ("artifact", "quantized", "transcoded")
        )
        dialect = {"mxfp4": "compressed-tensors", "nvfp4": "modelopt"}[fmt]
        fp4convert(
            "quantize", template, "--format", fmt, "--dialect", "gguf", "-o", quantized, "-q"
        )
        fp4convert(
            "quantize", checkpoint, "--format", fmt, "--dialect", dialect, "-o", artifact, "-q"
        )
        fp4convert(
            "transcode",
            artifact,
            "-o",
            transcoded,
            "--dialect",
            "gguf",
            "--template",
            template,
            "-q",
        )
        (other,) = transcoded.glob("*.gguf")
        return Models(checkpoint, template, artifact, quantized / "tiny.gguf", other)

    return models


@every_kind
def test_engine_runs_the_template_as_transformers_does(tmp_path: Path, kind: str) -> None:
    """What the tests below rest on: names, metadata and the order of rows are those that llama.cpp
    expects.
    """
    checkpoint = MAKERS[kind](tmp_path / "checkpoint")
    template = write_gguf(checkpoint, kind, tmp_path / "tiny.gguf")
    weights = weights_of(template, checkpoint, kind)
    assert (
        differing(
            weights, {name: tensor.float() for name, tensor in read_tensors(checkpoint).items()}
        )
        == []
    )
    assert distance(run_llamacpp(template), expected_by_transformers(checkpoint, weights)) < 0.02


@pytest.mark.sweep(8)
@every_way
@every_format
@every_kind
def test_engine_agrees_with_the_dequantized_model(
    make: Make, kind: str, fmt: str, way: str
) -> None:
    """llama.cpp rounds activations to eight bits; what is left is far below what four-bit weights
    change.
    """
    models = make(kind, fmt)
    weights = weights_of(models.made(way), models.checkpoint, kind)
    before = {name: tensor.float() for name, tensor in read_tensors(models.checkpoint).items()}
    found = run_llamacpp(models.made(way))
    near, far = (
        distance(found, expected_by_transformers(models.checkpoint, tensors))
        for tensors in (weights, before)
    )
    print(f"{kind} {fmt} {way}: {near:.4f} from the dequantized model, {far:.4f} from the first")
    assert len(found) == 20
    assert near < 0.02
    assert near < far / 2


MIXED = """
about = "NVFP4 beside FP8 and MXFP8"
base = "default"
[[format]]
modules = ["*.q_proj", "*.k_proj", "*.v_proj"]
format = "fp8"
[[format]]
modules = ["*.o_proj"]
format = "mxfp8"
"""


@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_engine_runs_what_mixed_artifacts_become(tmp_path: Path, kind: str) -> None:
    """FP8 and MXFP8 are bf16 there, the experts NVFP4: llama.cpp answers as the values do."""
    checkpoint = MAKERS[kind](tmp_path / "checkpoint")
    template = write_gguf(checkpoint, kind, tmp_path / "tiny.gguf")
    (tmp_path / "mixed.toml").write_text(MIXED)
    made, out = tmp_path / "made", tmp_path / "out"
    options = ("--recipe", tmp_path / "mixed.toml", "--dialect", "modelopt", "-o", made, "-q")
    fp4convert("quantize", checkpoint, "--format", "nvfp4", *options)
    frame = ("--dialect", "gguf", "--template", template)
    fp4convert("transcode", made, "-o", out, *frame, "-q")
    weights = weights_of(out / "tiny.gguf", checkpoint, kind)
    fp4convert("dequantize", made, "-o", tmp_path / "restored", "--dtype", "bf16", "-q")
    restored = read_tensors(tmp_path / "restored")
    attention = {name: tensor for name, tensor in weights.items() if "_proj" in name}
    attention = {name: tensor for name, tensor in attention.items() if ".self_attn." in name}
    assert differing(attention, {name: restored[name].float() for name in attention}) == []
    found = run_llamacpp(out / "tiny.gguf")
    assert distance(found, expected_by_transformers(checkpoint, weights)) < 0.02


@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_engine_runs_mixed_artifacts_as_q8_0(tmp_path: Path, kind: str) -> None:
    """FP8, of experts too, and MXFP8 are the Q8_0 that llama.cpp's package makes of their float32
    values, in llama.cpp's order of rows; llama.cpp answers as these do.
    """
    import gguf
    import torch
    from gguf.quants import quantize

    checkpoint = MAKERS[kind](tmp_path / "checkpoint")
    template = write_gguf(checkpoint, kind, tmp_path / "tiny.gguf")
    down = '[[format]]\nmodules = ["*.down_proj"]\nformat = "fp8"\n'
    (tmp_path / "mixed.toml").write_text(MIXED + down)
    made, out = tmp_path / "made", tmp_path / "out"
    options = ("--recipe", tmp_path / "mixed.toml", "--dialect", "modelopt", "-o", made, "-q")
    fp4convert("quantize", checkpoint, "--format", "nvfp4", *options)
    words = ("--dialect", "gguf", "--template", template, "--keep-dtype", "q8_0")
    told = fp4convert_json("transcode", made, "-o", out, *words)["carried"]
    artifact, ours = read_tensors(made), read_gguf(out / "tiny.gguf")
    rows: dict[str, list[Any]] = defaultdict(list)  # by llama.cpp's name, experts in their order
    for name in filter(is_quantized, read_tensors(checkpoint)):
        module, stored = name.removesuffix(".weight"), artifact[name]
        if f"{module}.weight_scale_2" not in artifact:
            scale = artifact[f"{module}.weight_scale"]
            spread = e8m0(scale).repeat_interleave(32, 1) if scale.ndim == 2 else scale.float()
            rows[gguf_name(name)].append(permuted(name, stored.float() * spread, kind))
    assert told["q8_0"] == sum(map(len, rows.values()))
    assert "floats" not in told
    for name, parts in rows.items():
        assert ours[name].tensor_type.name == "Q8_0"
        values = torch.stack(parts).numpy() if "_exps" in name else parts[0].numpy()
        expected = quantize(values, gguf.GGMLQuantizationType.Q8_0)
        assert ours[name].data.tobytes() == expected.tobytes(), name
    types = {name: tensor.tensor_type.name for name, tensor in ours.items()}
    assert {name for name, each in types.items() if each == "Q8_0"} == {
        *rows,
        "token_embd.weight",
        "output.weight",
    }
    weights = weights_of(out / "tiny.gguf", checkpoint, kind)
    found = run_llamacpp(out / "tiny.gguf")
    assert distance(found, expected_by_transformers(checkpoint, weights)) < 0.02


@every_way
@every_format
@every_kind
@pytest.mark.sweep(4)
def test_weights_are_close_to_the_first(make: Make, kind: str, fmt: str, way: str) -> None:
    models = make(kind, fmt)
    weights, before = (
        weights_of(models.made(way), models.checkpoint, kind),
        read_tensors(models.checkpoint),
    )
    assert four_bit(models.made(way)) == {gguf_name(name) for name in filter(is_quantized, before)}
    for name, tensor in before.items():
        error = (weights[name] - tensor.float()).norm() / tensor.float().norm()
        assert error < (0.15 if is_quantized(name) else 0.0) or not error, name


@every_way
@every_format
@every_kind
@pytest.mark.sweep(4)
def test_metadata_is_the_templates(make: Make, kind: str, fmt: str, way: str) -> None:
    """Every key and every value, but for the file's type (llama.h)."""
    import gguf

    models = make(kind, fmt)
    ours, theirs = (
        {
            name: field.contents()
            for name, field in gguf.GGUFReader(path).fields.items()
            if not name.startswith("GGUF.")
        }
        for path in (models.made(way), models.template)
    )
    assert ours.keys() == theirs.keys()
    assert ours.pop("general.file_type") == FILE_TYPES[fmt]
    assert {name for name in ours if ours[name] != theirs[name]} == set()


@every_way
@every_format
@every_kind
def test_kept_tensors_are_the_templates(make: Make, kind: str, fmt: str, way: str) -> None:
    models = make(kind, fmt)
    ours, theirs = read_gguf(models.made(way)), read_gguf(models.template)
    kept = theirs.keys() - four_bit(models.made(way))
    assert len(kept) == len(theirs) - MODULES
    for name in kept:
        assert ours[name].tensor_type == theirs[name].tensor_type
        assert ours[name].data.tobytes() == theirs[name].data.tobytes(), name
    assert all(name.endswith(".scale") for name in ours.keys() - theirs.keys())


@every_format
@every_kind
def test_transcoded_blocks_are_the_artifacts(make: Make, kind: str, fmt: str) -> None:
    """Codes and block scales by value, in llama.cpp's order of rows; global scales bit for bit;
    code 8 is +0.0 there.
    """
    models = make(kind, fmt)
    artifact, ours = read_tensors(models.artifact), read_gguf(models.transcoded)
    for name in filter(is_quantized, read_tensors(models.checkpoint)):
        module, stored = name.removesuffix(".weight"), ours[gguf_name(name)]
        if fmt == "mxfp4":
            expected = mxfp4_weight(
                artifact[f"{module}.weight_packed"], artifact[f"{module}.weight_scale"]
            )
        else:
            expected = decoded(unpacked(artifact[name]), e4m3(artifact[f"{module}.weight_scale"]))
            scale = values_of_tensor(ours[f"{gguf_name(name).removesuffix('.weight')}.scale"])
            number = int(expert[2]) if (expert := EXPERT.fullmatch(name)) else 0
            assert scale[number].equal(artifact[f"{module}.weight_scale_2"]), name
        assert stored.tensor_type.name == fmt.upper()
        values = values_of_tensor(stored)
        if expert := EXPERT.fullmatch(name):
            values = values[int(expert[2])]
        assert differing({name: values}, {name: permuted(name, expected, kind) + 0.0}) == []


@every_way
@every_format
def test_inspect_knows_the_file(make: Make, fmt: str, way: str) -> None:
    found = fp4convert_json("inspect", make("llama", fmt).made(way).parent)
    assert (found["format"], found["dialect"]) == (fmt, "gguf")
    assert found["tensors"]["quantized"] == MODULES
    assert found["healthy"]
    assert found["findings"] == []


@pytest.mark.sweep(4)
@every_way
@every_format
@every_kind
def test_inspect_and_verify_measure_against_the_template(
    make: Make, kind: str, fmt: str, way: str
) -> None:
    models = make(kind, fmt)
    folder = models.made(way).parent
    assert fp4convert_json("inspect", folder, "--source", models.template)["findings"] == []
    report = fp4convert_json("verify", folder, "--source", models.template, "--min-sqnr", 15)
    assert report["passed"]
    assert len(report["tensors"]) == len(
        list(filter(is_quantized, read_tensors(models.checkpoint)))
    )
    assert all(row["cosine"] > 0.99 for row in report["tensors"])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@every_format
@every_kind
def test_engine_runs_the_dequantized_file(
    make: Make, tmp_path: Path, kind: str, fmt: str, dtype: str
) -> None:
    """It holds what the four-bit file is worth, rounded to its dtype, and nothing that only
    four-bit tensors need.
    """
    models = make(kind, fmt)
    fp4convert(
        "dequantize", models.quantized.parent, "-o", tmp_path / "restored", "--dtype", dtype, "-q"
    )
    (path,) = (tmp_path / "restored").glob("*.gguf")
    tensors, template = read_gguf(path), read_gguf(models.template)
    assert list(tensors) == list(template)
    assert {tensors[name].tensor_type.name for name in four_bit(models.quantized)} == {
        {"bf16": "BF16", "fp32": "F32"}[dtype]
    }
    expected, found = (
        weights_of(each, models.checkpoint, kind) for each in (models.quantized, path)
    )
    for name, weight in expected.items():
        assert found[name].allclose(weight, rtol=2.0 ** {"bf16": -8, "fp32": -22}[dtype], atol=0), (
            name
        )
    assert distance(run_llamacpp(path), expected_by_transformers(models.checkpoint, found)) < 0.02


@every_format
def test_engine_runs_an_architecture_whose_graph_passes_over_global_scales(
    tmp_path: Path, fmt: str
) -> None:
    """llama.cpp loads Qwen2's .scale and does not multiply with it: they are 1."""
    checkpoint = MAKERS["qwen2"](tmp_path / "checkpoint")
    template = write_gguf(checkpoint, "qwen2", tmp_path / "tiny.gguf")
    fp4convert(
        "quantize", template, "--format", fmt, "--dialect", "gguf", "-o", tmp_path / "out", "-q"
    )
    made = tmp_path / "out" / "tiny.gguf"
    assert len(four_bit(made)) == MODULES
    found = run_llamacpp(made)
    assert (
        distance(found, expected_by_transformers(checkpoint, weights_of(made, checkpoint, "qwen2")))
        < 0.02
    )
    assert (
        distance(
            found, expected_by_transformers(checkpoint, weights_of(template, checkpoint, "qwen2"))
        )
        > 0.02
    )


@pytest.mark.parametrize("ending", [".scale", ".weight.scale", ".weight_scale", ".qscale"])
@pytest.mark.parametrize("kind", ["llama", "qwen3moe"])
def test_engine_refuses_scales_of_the_names_that_inspect_refuses(
    make: Make, kind: str, ending: str, tmp_path: Path
) -> None:
    """And loads the file that was only written again."""
    made = make(kind, "nvfp4").quantized
    renamed = write_renamed(made, tmp_path / "renamed.gguf", ".scale", ending)
    outcome = run("inspect", renamed, "--json")
    document = outcome.json
    loads = {each["engine"]: each["loads"] for each in document["engines"]}
    if ending == ".scale":
        assert outcome.code == 0
        assert loads["llama.cpp"] is not False
        assert run_llamacpp(renamed) == run_llamacpp(made)
        return
    assert outcome.code == 6
    assert loads["llama.cpp"] is False
    assert "tensor-unread" in [each["code"] for each in document["findings"]]
    with pytest.raises(RuntimeError):
        run_llamacpp(renamed)


@every_format
@pytest.mark.parametrize("kind", ["qwen3", "mixtral"])
def test_engine_runs_what_stays_as_q8_0(tmp_path: Path, kind: str, fmt: str) -> None:
    """Embedding and head, beside four-bit layers."""
    checkpoint = MAKERS[kind](tmp_path / "checkpoint")
    template = write_gguf(checkpoint, kind, tmp_path / "tiny.gguf")
    words = ("--format", fmt, "--dialect", "gguf", "--keep-dtype", "q8_0")
    fp4convert("quantize", template, *words, "-o", tmp_path / "out", "-q")
    made = tmp_path / "out" / "tiny.gguf"
    types = {name: tensor.tensor_type.name for name, tensor in read_gguf(made).items()}
    assert {name for name, each in types.items() if each == "Q8_0"} == {
        "token_embd.weight",
        "output.weight",
    }
    weights = weights_of(made, checkpoint, kind)
    assert distance(run_llamacpp(made), expected_by_transformers(checkpoint, weights)) < 0.02


def test_engine_runs_biases_of_experts_beside_q8_0(tmp_path: Path) -> None:
    """gpt-oss: ggml_add_id asserts that they are float32."""
    source = write_gptoss(tmp_path / "tiny.gguf")
    words = ("--dialect", "gguf", "--keep-dtype", "q8_0", "-o", tmp_path / "out", "-q")
    fp4convert("quantize", source, "--format", "mxfp4", *words)
    made = tmp_path / "out" / "tiny.gguf"
    types = {name: tensor.tensor_type.name for name, tensor in read_gguf(made).items()}
    assert types["token_embd.weight"] == "Q8_0"
    assert {kind for name, kind in types.items() if name.endswith(".bias")} == {"F32"}
    assert runs_llamacpp(source)
    assert runs_llamacpp(made)


@every_format
def test_engine_runs_what_was_q8_0(tmp_path: Path, fmt: str) -> None:
    """Rounded again, but for the embedding and the head, which stay as they are."""
    checkpoint = MAKERS["qwen3moe"](tmp_path / "checkpoint")
    source = write_gguf(checkpoint, "qwen3moe", tmp_path / "tiny.gguf", "Q8_0")
    words = ("--format", fmt, "--dialect", "gguf", "-o", tmp_path / "out", "-q")
    fp4convert("quantize", source, *words)
    made = tmp_path / "out" / "tiny.gguf"
    assert len(four_bit(made)) == MODULES
    weights = weights_of(made, checkpoint, "qwen3moe")
    assert distance(run_llamacpp(made), expected_by_transformers(checkpoint, weights)) < 0.02
