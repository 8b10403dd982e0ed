"""--global-scale FILE: global scales that are given, so that no amax is measured for them."""

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    FIRST,
    LAYER,
    SECOND,
    llama_shards,
    pack_shard,
    read_folder,
    run,
    unless_given,
    write_checkpoint,
    write_llama,
)
from diffusion import write_wan
from safetensors.torch import load_file, save_file
from simt_gpu import Machine

from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import take_apart
from fp4convert.makers.methods import returning
from fp4convert.numerics.backends import cuda_stream
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.global_scales import StoredScale, amax_of
from fp4convert.storage.local import LocalSource
from fp4convert.storage.open import open_source

ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
Q, K, V = (f"{ATTENTION}.{name}_proj" for name in "qkv")
GATE, UP, DOWN, OUT = (
    f"{MLP}.gate_proj",
    f"{MLP}.up_proj",
    f"{MLP}.down_proj",
    f"{ATTENTION}.o_proj",
)
MODULES = [Q, K, V, OUT, GATE, UP, DOWN]
ENDINGS = {"modelopt": ".weight_scale_2", "compressed-tensors": ".weight_global_scale"}


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


def quantize(source: Path, folder: Path, *options: object):
    """Run it; amax, the cheapest rule, unless the options name another."""
    words = unless_given(options, "--scale-rule", "amax")
    return run("quantize", source, "--format", "nvfp4", "-o", folder, "--json", *words)


STATE, OPTIONS_SAID = ".fp4convert", {"quantization_config.json", "quantization_report.json"}


def digest(source: Path, folder: Path, *options: object) -> str:
    """Of all files but the record, which says by which options they were made."""
    done = quantize(source, folder, *options)
    assert done.code == 0, done
    return made_in(folder)


def made_in(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = [path for path in files if path.name not in OPTIONS_SAID and STATE not in path.parts]
    lines = [f"{path.relative_to(folder)} {path.read_bytes()!r}" for path in named]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def multipliers(source: Path, folder: Path) -> dict[str, float]:
    """What a run of ours measures, by module, as another tool reads it."""
    digest(source, folder, "--dialect", "modelopt")
    return {
        name.removesuffix(ENDINGS["modelopt"]): struct.unpack("<f", data)[0]
        for name, (_, _, data) in read_folder(folder).items()
        if name.endswith(ENDINGS["modelopt"])
    }


def written(path: Path, scales: dict[str, float]) -> Path:
    """These scales as a file of the kind that its name says."""
    if path.suffix == ".json":
        path.write_text(json.dumps(scales))
    else:
        tensors = {name: ("F32", (), struct.pack("<f", one)) for name, one in scales.items()}
        path.write_bytes(pack_shard(tensors))
    return path


@pytest.mark.parametrize("rule", ["amax", "mse", "four-over-six"])
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt", "plain"])
def test_scales_of_an_earlier_run_make_its_bytes(source, tmp_path, dialect, rule):
    options = ("--dialect", dialect, "--scale-rule", rule)
    expected = digest(source, tmp_path / "first", *options)
    given = ("--global-scale", tmp_path / "first")
    done = quantize(source, tmp_path / "again", *options, *given)
    assert (done.code, made_in(tmp_path / "again")) == (0, expected), done
    assert "saturated" not in done.json
    assert not [line for line in done.json["warnings"] if "global" in line]


@pytest.mark.parametrize("name", ["scales.json", "scales.safetensors"])
def test_a_file_of_multipliers_makes_the_bytes_of_that_run(source, tmp_path, name):
    scales = multipliers(source, tmp_path / "first")
    assert sorted(scales) == sorted(MODULES)
    expected = digest(source, tmp_path / "plain")
    file = written(tmp_path / name, scales)
    assert digest(source, tmp_path / "again", "--global-scale", file) == expected


def test_scales_reach_the_artifact_as_they_are_given(source, tmp_path):
    """Twice what was measured, typed here; nothing saturates, and other codes come out."""
    scales = {module: 2 * one for module, one in multipliers(source, tmp_path / "first").items()}
    file = written(tmp_path / "scales.json", scales)
    done = quantize(source, tmp_path / "q", "--dialect", "modelopt", "--global-scale", file)
    stored = read_folder(tmp_path / "q")
    assert done.code == 0
    assert "saturated" not in done.json
    for module, one in scales.items():
        assert stored[module + ENDINGS["modelopt"]][2] == struct.pack("<f", one)


@pytest.mark.parametrize("is_given", [False, True])
def test_no_shard_is_read_for_the_amax_of_members_elsewhere(
    source, tmp_path, monkeypatch, is_given
):
    """Every weight is read once: v_proj, of the second shard, not for q_proj and k_proj of the
    first.  The glance that tells weights of fake quantization, of a row or two, is left out.
    """
    monkeypatch.setattr(returning, "are_exact", lambda members, fmt: False)
    digest(source, tmp_path / "first")
    read: dict[str, int] = {}
    reader = LocalSource.read_into

    def counting(self, ref, start, buffer):
        read[ref.name] = read.get(ref.name, 0) + buffer.nbytes
        reader(self, ref, start, buffer)

    ranges = LocalSource.read_range

    def counting_range(self, ref, start, stop):
        read[ref.name] = read.get(ref.name, 0) + stop - start
        return ranges(self, ref, start, stop)

    monkeypatch.setattr(LocalSource, "read_into", counting)
    monkeypatch.setattr(LocalSource, "read_range", counting_range)
    given = ("--global-scale", tmp_path / "first") if is_given else ()
    digest(source, tmp_path / "again", *given)
    sizes = {
        name: len(data) for shard in llama_shards().values() for name, (_, _, data) in shard.items()
    }
    times = {module: read[f"{module}.weight"] / sizes[f"{module}.weight"] for module in MODULES}
    measured = {**dict.fromkeys(MODULES, 2), Q: 3, K: 3, V: 3}  # amax in both shards, then codes
    assert times == (dict.fromkeys(MODULES, 1) if is_given else measured)


def test_the_stand_in_of_a_gpu_makes_the_same_bytes(source, tmp_path, monkeypatch, simt_libraries):
    expected = digest(source, tmp_path / "cpu")
    Machine(simt_libraries).install(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(cuda_stream, "GPU_PANEL_ELEMENTS", 2048)
    scales = {module: one / 4 for module, one in multipliers(source, tmp_path / "m").items()}
    small = written(tmp_path / "small.json", scales)
    found = [
        digest(source, tmp_path / "gpu", "--device", "cuda", "--global-scale", tmp_path / "cpu")
    ]
    assert found == [expected]
    on_cpu = quantize(source, tmp_path / "a", "--global-scale", small)
    on_gpu = quantize(source, tmp_path / "b", "--global-scale", small, "--device", "cuda")
    assert on_cpu.json["digest"] == on_gpu.json["digest"]
    assert made_in(tmp_path / "a") == made_in(tmp_path / "b") != expected
    assert on_cpu.json["saturated"] == on_gpu.json["saturated"] == 7


def test_modules_that_saturate_are_counted(source, tmp_path):
    scales = multipliers(source, tmp_path / "first")
    low = {**scales, DOWN: scales[DOWN] / 2, OUT: scales[OUT] * 0.999}
    done = quantize(source, tmp_path / "q", "--global-scale", written(tmp_path / "low.json", low))
    assert (done.code, done.json["saturated"]) == (0, 2)
    assert [line for line in done.json["warnings"] if line.startswith("2 modules have weights")]
    # A finished folder tells it again.
    again = quantize(source, tmp_path / "q", "--global-scale", tmp_path / "low.json")
    assert (again.code, again.json["saturated"]) == (0, 2)


def test_other_values_are_another_plan(source, tmp_path):
    scales = multipliers(source, tmp_path / "first")
    file = written(tmp_path / "scales.json", scales)
    digest(source, tmp_path / "q", "--global-scale", file)
    plan = json.loads((tmp_path / "q" / ".fp4convert" / "plan.json").read_text())
    written(tmp_path / "scales.json", {**scales, DOWN: 2 * scales[DOWN]})
    # The same values from elsewhere are another plan, too: the record names where they are from.
    for given in (tmp_path / "first", file):
        done = quantize(source, tmp_path / "q", "--global-scale", given)
        assert done.code == 5, done
        assert "the options" in done.json["error"]["message"]
    assert json.loads((tmp_path / "q" / ".fp4convert" / "plan.json").read_text()) == plan


def test_a_shard_depends_on_its_own_files_and_scales_alone(source, tmp_path):
    scales = multipliers(source, tmp_path / "first")

    def tasks(name: str, changed: dict[str, float]):
        file = written(tmp_path / name, {**scales, **changed})
        options = QuantizeOptions(source=source, format="nvfp4", global_scale=file)
        return prepare_quantize(take_apart(open_source(str(source)), options)).tasks

    first, second = tasks("a.json", {})
    assert (first.sources, second.sources) == ((FIRST,), (SECOND,))
    same, other = tasks("b.json", {DOWN: 2 * scales[DOWN]})
    assert same.key == first.key
    assert other.key != second.key


def test_an_interrupted_run_goes_on(source, tmp_path):
    """A shard and the record are gone: that shard alone is made again."""
    expected = digest(source, tmp_path / "first")
    given = ("--global-scale", tmp_path / "first")
    folder = tmp_path / "q"
    digest(source, folder, *given)
    for file in (SECOND, "quantization_config.json"):
        (folder / file).unlink()
    before = (folder / FIRST).stat().st_mtime_ns
    assert digest(source, folder, *given) == expected
    assert (folder / FIRST).stat().st_mtime_ns == before


def test_weights_that_are_not_finite_are_named(tmp_path):
    shards = llama_shards()
    digest(write_checkpoint(tmp_path / "good", shards), tmp_path / "first")
    dtype, shape, data = shards[SECOND][f"{V}.weight"]
    shards[SECOND][f"{V}.weight"] = (dtype, shape, data[:-2] + b"\xc0\x7f")
    bad = write_checkpoint(tmp_path / "bad", shards)
    done = quantize(bad, tmp_path / "q", "--global-scale", tmp_path / "first")
    assert (done.code, done.json["error"]["code"]) == (2, "not-finite"), done
    assert f"{V}.weight" in done.json["error"]["message"]


@pytest.mark.parametrize(
    "number",
    [0, -1.0, 1e-46, 1e39, 10**400, -(10**400), float("nan"), float("inf"), True, "1", None],
    ids=lambda number: str(number)[:9],
)
def test_what_is_no_scale_is_refused(source, tmp_path, number):
    scales = {**multipliers(source, tmp_path / "first"), DOWN: number}
    file = written(tmp_path / "scales.json", scales)
    done = quantize(source, tmp_path / "q", "--global-scale", file)
    assert (done.code, done.json["error"]["code"]) == (2, "bad-global-scale"), done
    assert DOWN in done.json["error"]["message"]
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("text", ["[1.0]", "{", '"a"'])
def test_other_json_is_refused(source, tmp_path, text):
    (tmp_path / "scales.json").write_text(text)
    done = quantize(source, tmp_path / "q", "--global-scale", tmp_path / "scales.json")
    assert (done.code, done.json["error"]["code"]) == (2, "bad-global-scale"), done


def test_modules_that_do_not_fit_are_listed(source, tmp_path):
    scales = multipliers(source, tmp_path / "first")
    few = {module: one for module, one in scales.items() if module not in (DOWN, OUT)}
    done = quantize(source, tmp_path / "q", "--global-scale", written(tmp_path / "f.json", few))
    assert (done.code, done.json["error"]["code"]) == (2, "global-scale-modules"), done
    assert "2 modules" in done.json["error"]["message"]
    assert DOWN in done.json["error"]["message"]
    assert OUT in done.json["error"]["message"]
    more = {**scales, "model.layers.7.mlp.up_proj": 1e-4}
    done = quantize(source, tmp_path / "q", "--global-scale", written(tmp_path / "m.json", more))
    assert (done.code, done.json["error"]["code"]) == (2, "global-scale-modules"), done
    assert "model.layers.7.mlp.up_proj" in done.json["error"]["message"]
    # A module that stays needs none, and may have one.
    kept = quantize(
        source,
        tmp_path / "q",
        "--global-scale",
        written(tmp_path / "f.json", few),
        "--exclude",
        DOWN,
        "--exclude",
        OUT,
    )
    assert kept.code == 0, kept
    known = quantize(
        source, tmp_path / "r", "--global-scale", tmp_path / "first", "--exclude", DOWN
    )
    assert known.code == 0, known


def test_an_artifact_of_other_shapes_is_refused(source, tmp_path):
    shards = llama_shards()
    dtype, (rows, columns), data = shards[SECOND][f"{OUT}.weight"]
    shards[SECOND][f"{OUT}.weight"] = (dtype, (2 * rows, columns), data * 2)
    digest(write_checkpoint(tmp_path / "other", shards), tmp_path / "first")
    done = quantize(source, tmp_path / "q", "--global-scale", tmp_path / "first")
    assert (done.code, done.json["error"]["code"]) == (2, "global-scale-modules"), done
    assert OUT in done.json["error"]["message"]


@pytest.mark.parametrize("module", [K, UP])
def test_members_of_a_group_have_one_scale(source, tmp_path, module):
    scales = multipliers(source, tmp_path / "first")
    uneven = {**scales, module: float(np.nextafter(np.float32(scales[module]), np.float32(1)))}
    done = quantize(source, tmp_path / "q", "--global-scale", written(tmp_path / "u.json", uneven))
    assert (done.code, done.json["error"]["code"]) == (2, "global-scale-group"), done


def test_of_stored_divisors_the_message_has_the_multipliers(source, tmp_path):
    """Advice to take the largest would clip the larger member, were they divisors."""
    first = tmp_path / "first"
    digest(source, first)
    shard = next(
        path for path in first.glob("*.safetensors") if f"{Q}.weight_packed" in load_file(path)
    )
    tensors = load_file(shard)
    stored = tensors[f"{Q}.weight_global_scale"]
    tensors[f"{Q}.weight_global_scale"] = stored * 2
    save_file(tensors, shard)
    done = quantize(source, tmp_path / "q", "--global-scale", first)
    error = done.json["error"]
    assert (done.code, error["code"]) == (2, "global-scale-group"), done
    halved, whole = 1 / float(stored.item() * 2), 1 / float(stored.item())
    assert f"{halved:g} and {whole:g} ({K}) as multipliers" in error["message"]
    assert "largest multiplier" in error["next"]


def test_other_formats_and_files_are_refused(source, tmp_path):
    digest(source, tmp_path / "first")
    given = ("--global-scale", tmp_path / "first")
    done = run("quantize", source, "--format", "mxfp4", "-o", tmp_path / "q", "--json", *given)
    assert (done.code, done.json["error"]["code"]) == (2, "bad-global-scale"), done
    done = quantize(source, tmp_path / "q", "--global-scale", tmp_path / "nowhere")
    assert done.code == 2, done
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "scales.txt").write_text("1.0")
    shard = shutil.copy(source / FIRST, tmp_path / "text" / "llama.st")
    for other in (
        source,
        source / FIRST,
        shard,
        tmp_path / "text" / "scales.txt",
        Path(os.devnull),
    ):
        done = quantize(source, tmp_path / "q", "--global-scale", other)
        error = done.json["error"]
        assert (done.code, error["code"]) == (2, "bad-global-scale"), done
        assert error["message"].startswith(f"--global-scale {other}"), error
        assert error["next"].startswith("Give an artifact of nvfp4, or a .json"), error


def test_blocks_that_are_taken_over_take_no_scale(source, tmp_path):
    digest(source, tmp_path / "first")
    done = quantize(tmp_path / "first", tmp_path / "q", "--global-scale", tmp_path / "first")
    assert (done.code, done.json["error"]["code"]) == (2, "bad-global-scale"), done
    assert not (tmp_path / "q").exists()
    # Where nothing is made at all, the error is that of any run.
    done = quantize(source, tmp_path / "q", "--global-scale", tmp_path / "first", "--exclude", "*")
    assert (done.code, done.json["error"]["code"]) == (2, "no-linears"), done


def test_components_of_a_pipeline_have_their_own_scales(tmp_path):
    """Two transformers of the same names and shapes, whose weights differ."""
    pipeline = write_wan(tmp_path / "pipeline")
    expected = digest(pipeline, tmp_path / "first")
    given = ("--global-scale", tmp_path / "first")
    assert digest(pipeline, tmp_path / "again", *given) == expected
    one = ("--global-scale", tmp_path / "first" / "transformer")
    done = quantize(pipeline, tmp_path / "q", *one)
    assert (done.code, done.json["error"]["code"]) == (2, "bad-global-scale"), done
    assert "one file for 2 components" in done.json["error"]["message"]
    assert not (tmp_path / "q").exists()
    done = quantize(pipeline, tmp_path / "q", "--subfolder", "transformer", *one)
    assert (done.code, "saturated" in done.json) == (0, False), done


def test_scales_that_no_amax_has_get_the_next_one(source, tmp_path):
    """Between 1.52 and 2 times a power of two, quotients by 2688 leave out every third float32."""
    scales = multipliers(source, tmp_path / "first")
    every = np.arange(0x3F800000, 0x3F800020, dtype=np.uint32).view(np.float32)  # of amaxes
    quotients = (every / np.float32(2688)).view(np.uint32)
    (jump, *_) = np.flatnonzero(np.diff(quotients) == 2)
    odd = float((quotients[jump] + np.uint32(1)).view(np.float32))
    file = written(tmp_path / "odd.json", {**scales, DOWN: odd})
    done = quantize(source, tmp_path / "q", "--dialect", "modelopt", "--global-scale", file)
    assert done.code == 0
    assert any("of 1 modules are no float32" in w for w in done.json["warnings"])
    (stored,) = struct.unpack("<f", read_folder(tmp_path / "q")[DOWN + ENDINGS["modelopt"]][2])
    assert np.float32(stored).view(np.uint32) in (quotients[jump], quotients[jump + 1])


@pytest.mark.parametrize("reach", [("amax", 2688.0), ("four-over-six", 1536.0)])
def test_every_amax_of_16_bits_is_found_again(reach):
    """bf16 amaxes of a few octaves, from the divisor and from the multiplier that they leave."""
    rule, largest = reach
    for amax in np.arange(0x3C00, 0x4200, dtype=np.uint32) << np.uint32(16):
        value = amax.view(np.float32)
        scale = np.float32(value / np.float32(largest))
        assert amax_of(StoredScale(float(scale)), rule)[1]
        divisor = float(np.float32(1 / float(scale)))
        assert amax_of(StoredScale(divisor, "divisor"), rule) == (float(value), True)


@pytest.mark.parametrize(
    ("words", "erased"),
    [
        (("--dialect", "mlx"), 3),
        (("--dialect", "mlx", "--scale-rule", "amax"), 3),
        (("--dialect", "modelopt"), None),
        (("--dialect", "modelopt", "--global-scale", "large"), 3),
    ],
)
def test_rows_that_become_zeros_are_warned_of(words, erased, tmp_path):
    """Rows 1,000 times smaller than others; a row that was zero before is not counted."""
    values = np.random.default_rng(5).normal(size=(64, 64)).astype(np.float32) * 0.05
    values[[3, 30, 63]] *= 1e-3
    values[7] = 0
    if "large" in words:
        rows = ("F32", values.shape, (values * 3e5).tobytes())
        write_checkpoint(tmp_path / "l", {"model.safetensors": {f"{DOWN}.weight": rows}})
        assert (
            run("quantize", tmp_path / "l", "--format", "nvfp4", "-o", tmp_path / "large").code == 0
        )
        words = (*words[:-1], tmp_path / "large")
    rows = ("F32", values.shape, values.tobytes())
    source = write_checkpoint(tmp_path / "m", {"model.safetensors": {f"{DOWN}.weight": rows}})
    done = run("quantize", source, "--format", "nvfp4", *words, "-o", tmp_path / "q", "--json")
    assert (done.code, done.json.get("erased_rows")) == (0, erased), done
    warned = [line for line in done.json["warnings"] if "became zeros" in line]
    assert len(warned) == (erased is not None)
    stored = read_folder(tmp_path / "q")
    (codes,) = (tensor for name, tensor in stored.items() if "scale" not in name)
    packed = np.frombuffer(codes[2], np.uint8).reshape(64, -1)
    zeros = [row for row in range(64) if not (packed[row] & 0x77).any()]
    assert zeros == ([3, 7, 30, 63] if erased else [7])
