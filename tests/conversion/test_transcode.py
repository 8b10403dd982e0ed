"""transcode between dialects of NVFP4: the same codes and block scales, other names and records,
and what is refused.
"""

import json
import re
import struct
import subprocess
import sys
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from checkpoints import (
    FIRST,
    INDEX,
    LAYER,
    LLAMA,
    SECOND,
    Tensor,
    done,
    llama_shards,
    read_folder,
    run,
    weight,
    write_checkpoint,
    write_llama,
    write_single,
)
from paths import SUPPORT

CT, MO = "compressed-tensors", "modelopt"
PARTS = {
    CT: ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    MO: ("weight", "weight_scale", "weight_scale_2", "input_scale"),
}
SHAPE = {CT: (1,), MO: ()}
OURS, HF = "quantization_config.json", "hf_quant_config.json"
MODULES = sorted(
    [f"{LAYER}.self_attn.{name}_proj" for name in "qkvo"]
    + [f"{LAYER}.mlp.{name}_proj" for name in ("gate", "up", "down")]
)
DECLARED = {
    CT: {
        "quant_method": CT,
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4},
                "input_activations": {"num_bits": 4},
            }
        },
        "ignore": [],
    },
    MO: {"quant_method": MO, "quant_algo": "NVFP4", "ignore": []},
}

every_pair = pytest.mark.parametrize(("before", "after"), [(CT, MO), (MO, CT)])
every_dialect = pytest.mark.parametrize("dialect", [CT, MO])
every_form = pytest.mark.parametrize(
    "options", [(), ("--activations", 4, "--input-scale", "0.37")], ids=["W4A16", "W4A4"]
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "source", **{"tokenizer.json": b"{}"})


def quantize(source: Path, output: Path, dialect: str, *options: object) -> dict:
    given = ("--format", "nvfp4", "--dialect", dialect, "-o", output, "--json", "-q", *options)
    return done("quantize", source, *given).json


def transcode(artifact: Path, output: Path, dialect: str, *options: object) -> dict:
    return done(
        "transcode", artifact, "-o", output, "--dialect", dialect, "--json", "-q", *options
    ).json


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the state of the conversion, and what only a run that rounds has
    to report.
    """
    return {
        path.name: path.read_bytes()
        for path in folder.glob("[!.]*")
        if path.name != "quantization_report.json"
    }


def is_same(one: Path, other: Path) -> bool:
    """Tell whether two artifacts are the same, but for the options in our record."""
    found = []
    for folder in (one, other):
        files = contents(folder)
        record = json.loads(files.pop(OURS))
        del record["options"]
        found.append((files, record))
    return found[0] == found[1]


def scalar(tensor: Tensor) -> np.float32:
    return np.frombuffer(tensor[2], "<f4")[0]


def inverse(x: np.float32) -> np.float32:
    """The float32 nearest to 1/x: IEEE division by NumPy, checked against its neighbours in exact
    fractions.
    """
    found = np.float32(1) / x
    error = abs(Fraction(float(found)) - 1 / Fraction(float(x)))
    neighbours = (Fraction(float(np.nextafter(found, np.float32(end)))) for end in (0, np.inf))
    assert all(error <= abs(other - 1 / Fraction(float(x))) for other in neighbours)
    return found


def is_reversible(x: np.float32) -> bool:
    return bool(inverse(inverse(x)) == x)


def one_way(count: int, is_wanted: bool = False) -> list[np.float32]:
    """Float32s of the size of global scales that are not (or are) the inverse of their inverse."""
    some = np.exp2(np.random.default_rng(5).uniform(-20, -5, 400)).astype(np.float32)
    return [x for x in some if is_reversible(x) is is_wanted][:count]


def parts_of(tensors: dict[str, Tensor], module: str, dialect: str) -> list[Tensor | None]:
    return [tensors.get(f"{module}.{part}") for part in PARTS[dialect]]


def others(tensors: dict[str, Tensor], dialect: str) -> dict[str, Tensor]:
    four_bit = {f"{module}.{part}" for module in MODULES for part in PARTS[dialect]}
    return {name: tensor for name, tensor in tensors.items() if name not in four_bit}


def write_foreign(
    folder: Path, dialect: str, modules: dict[str, tuple[np.float32, np.float32]]
) -> Path:
    """A W4A4 artifact with no record of ours, made by hand: module -> its global scale and input
    scale, as they are stored.
    """
    tensors: dict[str, Tensor] = {}
    for number, (module, scales) in enumerate(modules.items()):
        codes = np.random.default_rng(number).integers(0, 256, 16 * 16, np.uint8).tobytes()
        block_scales = np.random.default_rng(number).integers(1, 0x7F, 16 * 2, np.uint8).tobytes()
        kinds = [("U8", (16, 16), codes), ("F8_E4M3", (16, 2), block_scales)]
        kinds += [("F32", SHAPE[dialect], struct.pack("<f", value)) for value in scales]
        tensors |= {
            f"{module}.{part}": kind for part, kind in zip(PARTS[dialect], kinds, strict=True)
        }
    return write_single(folder, tensors, {**LLAMA, "quantization_config": DECLARED[dialect]})


@every_form
@every_pair
def test_codes_and_block_scales_are_the_same_bytes(before, after, options, source, tmp_path):
    """Global scales and input scales are inverted and rounded once; the shapes are those of the
    dialect.
    """
    quantize(source, tmp_path / "before", before, *options)
    document = transcode(tmp_path / "before", tmp_path / "after", after)
    left, right = read_folder(tmp_path / "before"), read_folder(tmp_path / "after")
    assert document["tensors"] == {"transcoded": 7, "copied": 4, "skipped": 0}
    for module in MODULES:
        (*equal_before, global_before, input_before) = parts_of(left, module, before)
        (*equal_after, global_after, input_after) = parts_of(right, module, after)
        assert equal_before == equal_after
        for old, new in [
            (global_before, global_after),
            *([(input_before, input_after)] if options else []),
        ]:
            assert new[:2] == ("F32", SHAPE[after])
            assert scalar(new) == inverse(scalar(old))
        assert options or input_after is None
    kept = others(right, after)
    assert kept == others(left, before)
    assert kept == {name: tensor for name, tensor in read_folder(source).items() if name in kept}
    assert len(kept) == 4


@every_form
@every_pair
def test_there_and_back_is_the_same_artifact(before, after, options, source, tmp_path):
    """Every byte of every file, where all scales are the inverse of their inverse; but the record
    says which way it went, for reproduce.
    """
    first = quantize(source, tmp_path / "before", before, *options)
    there = transcode(tmp_path / "before", tmp_path / "after", after)
    back = transcode(tmp_path / "after", tmp_path / "back", before)
    tensors = read_folder(tmp_path / "before")
    stored = {
        module: [scalar(part) for part in parts_of(tensors, module, before)[2:] if part]
        for module in MODULES
    }
    rounded = [module for module in MODULES if not all(map(is_reversible, stored[module]))]
    assert there["carried"] == {"modules": 7, "bit_for_bit": 7 - len(rounded), "rounded": rounded}
    left, right = contents(tmp_path / "before"), contents(tmp_path / "back")
    assert left.keys() == right.keys()
    assert {file for file in left if left[file] != right[file]} <= (
        {FIRST, SECOND, OURS} if rounded else {OURS}
    )
    assert is_same(tmp_path / "before", tmp_path / "back") is not bool(rounded)
    assert first["digest"] != back["digest"]  # the record says which way it went


@every_form
@every_pair
def test_it_is_what_quantize_writes(before, after, options, source, tmp_path):
    """All records and files, where no scale was rounded on its way."""
    quantize(source, tmp_path / "before", before, *options)
    quantize(source, tmp_path / "direct", after, *options)
    transcode(tmp_path / "before", tmp_path / "after", after)
    left, right = contents(tmp_path / "direct"), contents(tmp_path / "after")
    assert left.keys() == right.keys()
    assert (HF in right) is (after == MO)
    assert all(left[file] == right[file] for file in left if file not in (FIRST, SECOND, OURS))
    tensors = [read_folder(tmp_path / name) for name in ("direct", "after")]
    differ = {name for name in tensors[0] if tensors[0][name] != tensors[1][name]}
    _, _, global_scale, input_scale = PARTS[after]
    exact = {
        name: scalar(tensor)
        for name, tensor in tensors[0].items()
        if name.endswith(global_scale) and after == MO
    }
    rounded = {name for name, value in exact.items() if not is_reversible(value)}
    assert {name for name in differ if not name.endswith(input_scale)} == rounded
    assert is_same(tmp_path / "direct", tmp_path / "after") is not bool(differ)
    done("verify", tmp_path / "after", "--source", source, "--json")
    found = run("inspect", tmp_path / "after", "--json").json
    assert (found["findings"], found["activations"]) == ([], 4 if options else 16)


@every_pair
def test_scales_that_are_powers_of_two_give_the_same_files(before, after, tmp_path):
    """Amax 2688 * 2^-10 everywhere: nothing can be rounded, in any direction."""
    data = struct.pack("<64H", *[0x4028, *[0x3F00] * 63]) * 32  # 2.625 and 0.5 as bfloat16
    tensors = {f"{module}.weight": ("BF16", (32, 64), data) for module in MODULES} | {
        "lm_head.weight": weight(1)
    }
    source = write_single(tmp_path / "source", tensors)
    for dialect in (CT, MO):
        quantize(source, tmp_path / dialect, dialect)
    there = transcode(tmp_path / before, tmp_path / "there", after)
    assert is_same(tmp_path / "there", tmp_path / after)
    assert there["carried"] == {"modules": 7, "bit_for_bit": 7, "rounded": []}
    transcode(tmp_path / "there", tmp_path / "back", before)
    assert is_same(tmp_path / "back", tmp_path / before)


@every_dialect
def test_the_same_dialect_gives_the_same_artifact(dialect, source, tmp_path):
    divisor = float(one_way(1)[0])  # inverted twice it would be another
    quantize(
        source, tmp_path / "first", dialect, "--activations", 4, "--input-scale", repr(1 / divisor)
    )
    second = transcode(tmp_path / "first", tmp_path / "second", dialect)
    assert second["carried"] == {"modules": 7, "bit_for_bit": 7, "rounded": []}
    assert is_same(tmp_path / "first", tmp_path / "second")


@every_pair
def test_scales_that_do_not_come_back_are_named(before, after, tmp_path):
    """Global scales and input scales alike; each comes back as another float32, and only those."""
    good, bad = one_way(3, is_wanted=True), one_way(2)
    modules = {
        "l.0.o_proj": (good[0], good[1]),
        "l.1.o_proj": (bad[0], good[1]),
        "l.2.o_proj": (good[1], bad[1]),
        "l.3.o_proj": (good[2], good[0]),
    }
    artifact = write_foreign(tmp_path / "foreign", before, modules)
    document = transcode(artifact, tmp_path / "there", after)
    transcode(tmp_path / "there", tmp_path / "back", before)
    left, right = read_folder(artifact), read_folder(tmp_path / "back")
    differ = {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    assert differ == {f"l.1.o_proj.{PARTS[before][2]}", f"l.2.o_proj.{PARTS[before][3]}"}
    assert document["carried"] == {
        "modules": 4,
        "bit_for_bit": 2,
        "rounded": ["l.1.o_proj", "l.2.o_proj"],
    }
    said = run("transcode", artifact, "-o", tmp_path / "again", "--dialect", after)
    assert "2 of 4 modules are copied bit for bit" in said.out
    assert "2 are not" in said.out


@every_pair
@pytest.mark.parametrize(
    "bits", [0, 1, 0x7F800000, 0x7FC00000], ids=["zero", "subnormal", "infinity", "nan"]
)
def test_a_scale_without_an_inverse_is_no_bug_of_ours(before, after, bits, tmp_path):
    """Exporters write a global scale of 0 for a matrix of zeros; whatever comes of it, it is said,
    and nothing is half made.
    """
    odd = np.array([bits], np.uint32).view(np.float32)[0]
    artifact = write_foreign(tmp_path / "foreign", before, {"l.0.o_proj": (odd, np.float32(1))})
    outcome = run("transcode", artifact, "-o", tmp_path / "out", "--dialect", after, "--json")
    if outcome.code:
        assert outcome.json["error"]["exit"] in (2, 3)
        assert "l.0.o_proj" in outcome.json["error"]["message"]
    else:
        assert run("verify", tmp_path / "out").code in (0, 6)


@pytest.mark.parametrize("head", ["there", "tied"])
@pytest.mark.parametrize(
    "excluded", [(), ("--exclude", f"{LAYER}.mlp.*", "--exclude", "*.k_proj")], ids=["all", "some"]
)
@every_pair
def test_what_stays_is_said_in_the_records(before, after, excluded, head, tmp_path):
    """The modules that the target's record ignores are those of a direct conversion, absent tied
    heads among them.
    """
    shards = llama_shards()
    if head == "tied":
        del shards[SECOND]["lm_head.weight"]
    source = write_checkpoint(
        tmp_path / "source", shards, {**LLAMA, "tie_word_embeddings": head == "tied"}
    )
    quantize(source, tmp_path / "before", before, *excluded)
    quantize(source, tmp_path / "direct", after, *excluded)
    transcode(tmp_path / "before", tmp_path / "after", after)
    files = ("config.json", *([HF] if after == MO else []))
    found, expected = (
        [json.loads((tmp_path / folder / file).read_text()) for file in files]
        for folder in ("after", "direct")
    )
    if not excluded:
        assert found == expected
        assert all(
            (tmp_path / "after" / file).read_bytes() == (tmp_path / "direct" / file).read_bytes()
            for file in files
        )
    names = {name.rpartition(".")[0] for shard in shards.values() for name in shard} | {
        "lm_head",
        "model.lm_head",
    }
    ignored = _ignored(found, names)
    assert ignored == _ignored(expected, names)
    assert {"lm_head", *([f"{LAYER}.mlp.up_proj"] if excluded else [])} <= ignored
    assert not ignored & {f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.o_proj"}
    told = run("inspect", tmp_path / "after", "--json").json["findings"]
    assert [one["code"] for one in told] == (["group-in-part"] if excluded else [])


def _ignored(records: list[dict], names: set[str]) -> set[str]:
    """Names that every one of those records leaves unquantized, as its engines would match them."""
    lists = [record.get("quantization_config", record.get("quantization")) for record in records]
    patterns = [record.get("ignore", record.get("exclude_modules")) for record in lists]
    assert all(entries == patterns[0] for entries in patterns)
    return {name for name in names if any(_fits(pattern, name) for pattern in patterns[0])}


def _fits(pattern: str, name: str) -> bool:
    return (
        bool(re.match(pattern[3:], name))
        if pattern.startswith("re:")
        else fnmatchcase(name, pattern)
    )


def test_parts_of_a_module_in_two_shards(source, tmp_path):
    """The global scale and the input scale lie apart from the codes: what is made lies with the
    codes.
    """
    folder, name = tmp_path / "apart", f"{LAYER}.self_attn.o_proj"
    quantize(source, tmp_path / "whole", MO, "--activations", 4)
    tensors = read_folder(tmp_path / "whole")
    moved = {f"{name}.weight_scale", f"{name}.weight_scale_2", f"{name}.input_scale"}
    shards = {FIRST: {}, SECOND: {}}
    for known, tensor in tensors.items():
        shards[FIRST if known in moved else SECOND][known] = tensor
    write_checkpoint(folder, shards, json.loads((tmp_path / "whole" / "config.json").read_text()))
    transcode(folder, tmp_path / "after", CT)
    transcode(tmp_path / "whole", tmp_path / "expected", CT)
    assert read_folder(tmp_path / "after") == read_folder(tmp_path / "expected")
    index = json.loads((tmp_path / "after" / INDEX).read_text())["weight_map"]
    assert set(index.values()) == {SECOND}


@every_dialect
def test_nothing_of_the_other_dialect_is_left(dialect, source, tmp_path):
    """No second record, and one quantization_config."""
    other = MO if dialect == CT else CT
    quantize(source, tmp_path / "before", other)
    transcode(tmp_path / "before", tmp_path / "after", dialect)
    files = {
        FIRST,
        SECOND,
        INDEX,
        "config.json",
        "tokenizer.json",
        OURS,
        ".fp4convert",
        *([HF] if dialect == MO else []),
    }
    assert {path.name for path in (tmp_path / "after").iterdir()} == files
    config = json.loads((tmp_path / "after" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == dialect
    assert config == json.loads((source / "config.json").read_text())


def test_scales_of_a_kv_cache_are_not_lost_in_silence(source, tmp_path):
    """A calibrated k_scale means something to engines: it is there afterwards, or a line says that
    it is not.
    """
    quantize(source, tmp_path / "before", MO)
    tensors, name = read_folder(tmp_path / "before"), f"{LAYER}.self_attn.k_proj.k_scale"
    config = json.loads((tmp_path / "before" / "config.json").read_text())
    folder = write_single(
        tmp_path / "foreign", {**tensors, name: ("F32", (), b"\0\0\x80\x3f")}, config
    )
    outcome = run("transcode", folder, "-o", tmp_path / "after", "--dialect", CT)
    assert (
        outcome.code
        or name in read_folder(tmp_path / "after")
        or "k_scale" in outcome.out + outcome.err
    )


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--dialect", CT, "--format", "mxfp4"), "not-lossless"),
        (("--dialect", MO, "--format", "mxfp4"), "not-lossless"),
        (("--dialect", "gguf"), "dialect-container"),
        (("--dialect", "tensorrt"), "unknown-dialect"),
        (("--dialect", MO, "--scale-layout", "128x4"), "dialect-layout"),
        (("--dialect", "plain", "--scale-layout", "64x2"), "dialect-layout"),
        (("--dialect", CT, "--format", "fp8"), "unknown-format"),
    ],
)
def test_what_cannot_be_said_is_refused(options, code, source, tmp_path):
    quantize(source, tmp_path / "artifact", CT)
    refused = run("transcode", tmp_path / "artifact", "-o", tmp_path / "out", "--json", *options)
    assert (refused.code, refused.json["error"]["code"]) == (2, code)
    assert not (tmp_path / "out").exists()


def test_advice_names_only_options_of_the_command(source, tmp_path):
    quantize(source, tmp_path / "artifact", CT)
    words = ("--dialect", CT, "--format", "fp8")
    refused = run("transcode", tmp_path / "artifact", "-o", tmp_path / "out", *words)
    assert (refused.code, "--target-size" in refused.err) == (2, False), refused.err
    quantize(source, tmp_path / "w4a4", CT, "--activations", "4")
    refused = run("transcode", tmp_path / "w4a4", "-o", tmp_path / "out", "--dialect", "mlx")
    assert (refused.code, "--activations" in refused.err) == (2, False), refused.err


def test_advice_for_engines_says_whose_options_it_names(source, tmp_path):
    """It is what only another conversion can do."""
    done("quantize", source, "--format", "mxfp4", "-o", tmp_path / "a", "-q")
    words = ("--dialect", CT, "-o", tmp_path / "b", "--json")
    warnings = run("transcode", tmp_path / "a", *words).json["warnings"]
    advice = [line for line in warnings if "--format" in line]
    assert advice
    assert all(line.endswith("(an option of fp4convert quantize)") for line in advice)


def test_a_dialect_is_asked_for(source, tmp_path):
    quantize(source, tmp_path / "artifact", CT)
    assert run("transcode", tmp_path / "artifact", "-o", tmp_path / "out").code == 2
    assert not (tmp_path / "out").exists()


def test_what_is_no_artifact_is_refused(source, tmp_path):
    for folder, code in ((source, "not-an-artifact"), (tmp_path / "nowhere", None)):
        refused = run("transcode", folder, "-o", tmp_path / "out", "--dialect", MO, "--json")
        assert refused.code == 2
        assert code in (None, refused.json["error"]["code"])
        assert not (tmp_path / "out").exists()


def test_an_unsound_artifact_is_refused(source, tmp_path):
    quantize(source, tmp_path / "before", MO)
    tensors = read_folder(tmp_path / "before")
    name = f"{MODULES[0]}.weight_scale_2"
    config = json.loads((tmp_path / "before" / "config.json").read_text())
    folder = write_single(
        tmp_path / "broken",
        {known: tensor for known, tensor in tensors.items() if known != name},
        config,
    )
    refused = run("transcode", folder, "-o", tmp_path / "out", "--dialect", CT, "--json")
    assert (refused.code, refused.json["error"]["code"], refused.json["error"]["tensor"]) == (
        2,
        "unsound-artifact",
        name,
    )
    assert not (tmp_path / "out").exists()


def test_an_output_inside_the_source_is_refused(source, tmp_path):
    quantize(source, tmp_path / "artifact", CT)
    before = contents(tmp_path / "artifact")
    for output in (tmp_path / "artifact" / "out", tmp_path / "artifact"):
        refused = run("transcode", tmp_path / "artifact", "-o", output, "--dialect", MO, "--json")
        assert (refused.code, refused.json["error"]["code"]) == (2, "output-in-source")
    assert contents(tmp_path / "artifact") == before
    assert not (tmp_path / "artifact" / "out").exists()


def test_a_finished_folder_of_another_dialect_is_not_overwritten(source, tmp_path):
    quantize(source, tmp_path / "artifact", CT)
    transcode(tmp_path / "artifact", tmp_path / "out", MO)
    before = contents(tmp_path / "out")
    refused = run(
        "transcode", tmp_path / "artifact", "-o", tmp_path / "out", "--dialect", CT, "--json"
    )
    assert (refused.code, refused.json["error"]["code"]) == (5, "other-plan")
    assert contents(tmp_path / "out") == before
    transcode(tmp_path / "artifact", tmp_path / "out", MO)
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_threads_changes_nothing(workers, source, tmp_path):
    quantize(source, tmp_path / "artifact", CT)
    transcode(tmp_path / "artifact", tmp_path / "default", MO)
    transcode(tmp_path / "artifact", tmp_path / "out", MO, "--workers", workers)
    assert contents(tmp_path / "out") == contents(tmp_path / "default")


@pytest.mark.slow
def test_killed_at_every_write_fsync_and_rename(tmp_path):
    shards = {FIRST: {"l.0.o_proj.weight": weight(1)}, SECOND: {"lm_head.weight": weight(2)}}
    quantize(write_checkpoint(tmp_path / "source", shards), tmp_path / "artifact", CT)
    command = [sys.executable, SUPPORT.joinpath("kill_points.py"), tmp_path]
    words = ["transcode", tmp_path / "artifact", "--dialect", MO]
    outcome = json.loads(
        subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout
    )
    assert outcome["points"] > 20
    assert outcome["broken"] == []
