"""A dry run tells what a run makes: published sizes, every tensor in one row, honest times, and
what is doubtful.
"""

import json
from dataclasses import replace

import pytest
from checkpoints import (
    LAYER,
    disk_nbytes,
    run,
    weight,
    write_llama,
    write_single,
    write_zeros,
)
from true_shapes import LLAMA_70B, QWEN3_8B, QWEN3_CODER_480B, deepseek_v3, write_holes

from fp4convert.conversion.artifact_job import artifact_job
from fp4convert.conversion.dry_run import Sized, describe_plan, find_doubts
from fp4convert.conversion.quantize import prepare_quantize
from fp4convert.conversion.request import take_apart
from fp4convert.engines.files import known_engines
from fp4convert.execution.settings import Settings
from fp4convert.options.writing import QuantizeOptions
from fp4convert.storage.checkpoint_files import REPORT
from fp4convert.storage.open import open_source

W4A4 = ("--dialect", "modelopt", "--activations", 4)


def forecast(source, format="nvfp4", *options):
    return run("quantize", source, "--format", format, "--dry-run", "--json", *options).json


def payload(document):
    return sum(tensor["output_bytes"] for tensor in document["tensors"])


def four_bit(document):
    """Bytes before and after of what becomes four-bit."""
    rows = [row for row in document["patterns"] if row["format"]]
    return sum(row["source_bytes"] for row in rows), sum(row["output_bytes"] for row in rows)


def test_the_published_size_of_qwen3_8b(tmp_path):
    """nvidia/Qwen3-8B-NVFP4 (modelopt, W4A4): 1,227 tensors of 6,396,932,352 bytes; 72 of them are
    calibrated k and v scales.

    By hand: 36 layers of 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096 weights at 4.5 bits,
    two float32 a module;
    embedding and head of 151936 * 4096 in bf16; 36 * (2 * 4096 + 2 * 128) + 4096 of norms.
    """
    published_tensors, published_bytes, cache_scales = 1227, 6_396_932_352, 2 * 36
    document = forecast(write_holes(tmp_path / "m", "qwen3", QWEN3_8B.tensors()), "nvfp4", *W4A4)
    quantized = (
        36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096) * 9 // 16 + 36 * 7 * 2 * 4
    )
    by_hand = quantized + 2 * (2 * 151936 * 4096 + 36 * (2 * 4096 + 2 * 128) + 4096)
    assert payload(document) == by_hand == published_bytes - 4 * cache_scales
    tensors = 4 * sum(row["count"] for row in document["patterns"] if row["format"])
    assert (
        tensors + sum(row["count"] for row in document["patterns"] if not row["format"])
        == published_tensors - cache_scales
    )
    assert four_bit(document)[1] == quantized
    assert document["bits_per_weight"] == pytest.approx(4.5, abs=1e-4)


def test_the_published_size_of_llama_3_3_70b(tmp_path):
    """nvidia/Llama-3.3-70B-Instruct-FP4 (modelopt, W4A4, lm_head kept): its index has a total_size
    of 42,709,045,632.

    By hand: 80 layers of 2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192 weights at 4.5 bits,
    two float32 a module;
    embedding and head of 128256 * 8192, and 161 norms of 8192, in bf16.  Scales for a cache are not
    among them.
    """
    folder = write_holes(tmp_path / "m", "llama", LLAMA_70B.tensors(), shards=9)
    quantized = (
        80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192) * 9 // 16 + 80 * 7 * 2 * 4
    )
    assert quantized + 2 * (2 * 128256 * 8192 + 161 * 8192) == 42_709_045_632
    assert payload(forecast(folder, "nvfp4", *W4A4)) == 42_709_045_632
    request = QuantizeOptions("", format="nvfp4", dialect="modelopt", activations=4)
    assert prepare_quantize(take_apart(open_source(str(folder)), request)).index["metadata"] == {
        "total_size": 42_709_045_632
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "published", "bits"), [("nvfp4", 269e9, 4.5), ("mxfp4", 254e9, 4.25)]
)
def test_the_published_size_of_478_billion_weights(format, published, bits, tmp_path):
    """Qwen3-Coder-480B has 478 billion weights in linear layers: 269 GB of NVFP4, 254 GB of MXFP4,
    within 1 %.
    """
    document = forecast(
        write_holes(tmp_path / "m", "qwen3_moe", QWEN3_CODER_480B.tensors(), shards=40), format
    )
    weights = 62 * (2 * 12288 * 6144 + 2 * 1024 * 6144 + 160 * 3 * 2560 * 6144)
    assert weights == pytest.approx(478e9, rel=0.001)
    before, after = four_bit(document)
    assert before == 2 * weights
    assert after == pytest.approx(published, rel=0.01)
    modules = 62 * (4 + 160 * 3)
    assert after == weights * bits / 8 + (4 * modules if format == "nvfp4" else 0)
    kept = 2 * (2 * 151936 * 6144 + 62 * (160 * 6144 + 2 * 6144 + 2 * 128) + 6144)
    assert payload(document) == after + kept


def test_every_tensor_is_in_one_row(tmp_path):
    document = forecast(
        write_holes(tmp_path / "m", "deepseek_v3", deepseek_v3(layers=8, experts=16))
    )
    rows, tensors = document["patterns"], document["tensors"]
    assert sum(row["count"] for row in rows) == len(tensors)
    for key in ("source_bytes", "output_bytes"):
        assert sum(row[key] for row in rows) == sum(tensor[key] for tensor in tensors)
    for action in ("quantize", "copy"):
        counted = sum(row["count"] for row in rows if row["action"] == action)
        assert counted == sum(tensor["action"] == action for tensor in tensors)
    assert {row["format"] for row in rows if row["action"] == "quantize"} == {"nvfp4"}
    assert {row["format"] for row in rows if row["action"] == "copy"} == {None}


def test_rows_stand_in_the_order_of_the_model(tmp_path):
    patterns = [
        row["pattern"]
        for row in forecast(write_holes(tmp_path / "m", "qwen3", QWEN3_8B.tensors()))["patterns"]
    ]
    assert patterns == [
        "model.embed_tokens",
        "model.layers.[0-35].self_attn.{q,k,v}_proj",
        "model.layers.[0-35].self_attn.o_proj",
        "model.layers.[0-35].self_attn.{q,k}_norm",
        "model.layers.[0-35].{input,post_attention}_layernorm",
        "model.layers.[0-35].mlp.{gate,up}_proj",
        "model.layers.[0-35].mlp.down_proj",
        "model.norm",
        "lm_head",
    ]


def test_towers_and_later_tokens_stand_after_the_layers(tmp_path):
    """An embedding of the language model goes first; names as Qwen3-VL and Qwen3-Next have them,
    sorted as in a file.
    """
    language = "model.language_model"
    names = [
        *(
            "lm_head.weight",
            f"{language}.embed_tokens.weight",
            f"{language}.layers.0.mlp.down_proj.weight",
            f"{language}.norm.weight",
        ),
        *(
            "model.visual.blocks.0.attn.proj.weight",
            "model.visual.blocks.0.attn.qkv.weight",
            "model.visual.merger.norm.weight",
        ),
        *(
            "model.visual.merger.linear_fc1.weight",
            "model.visual.merger.linear_fc2.weight",
            "model.visual.patch_embed.proj.bias",
        ),
        *("model.visual.pos_embed.weight", "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight"),
    ]
    shapes = (
        (name, (64,) if "norm" in name or name.endswith("bias") else (64, 64)) for name in names
    )
    rows = forecast(write_holes(tmp_path / "m", "qwen3_vl", shapes, shards=1))["patterns"]
    assert [row["pattern"] for row in rows] == [
        f"{language}.embed_tokens",
        f"{language}.layers.0.mlp.down_proj",
        "model.visual.blocks.0.attn.{qkv,proj}",
        "model.visual.pos_embed",
        "model.visual.merger.linear_{fc1,fc2}",
        "model.visual.merger.norm",
        "model.visual.patch_embed.proj.bias",
        "mtp.fc",
        "mtp.pre_fc_norm_embedding",
        f"{language}.norm",
        "lm_head",
    ]


def test_a_tensor_that_is_called_like_a_module_has_a_row_of_its_own(tmp_path):
    source = write_single(
        tmp_path / "m",
        {"a.o_proj.weight": weight(), "a.o_proj": weight(), "a.o_proj.weight.weight": weight()},
    )
    rows = forecast(source)["patterns"]
    assert [row["pattern"] for row in rows] == ["a.o_proj", "a.o_proj", "a.o_proj.weight"]
    assert sum(row["source_bytes"] for row in rows) == 3 * 32 * 64 * 2


def test_layers_that_an_option_keeps_leave_a_gap(tmp_path):
    source = write_holes(tmp_path / "m", "qwen3", QWEN3_8B.tensors())
    rows = forecast(source, "nvfp4", "--exclude", "re:model.layers.(3|4)[.]mlp.down_proj")[
        "patterns"
    ]
    (gap,) = (row for row in rows if row["pattern"].endswith("mlp.down_proj") and row["format"])
    assert (gap["pattern"], gap["count"]) == ("model.layers.[0-2,5-35].mlp.down_proj", 34)
    (kept,) = (row for row in rows if row["pattern"] == "model.layers.[3-4].mlp.down_proj")
    assert (kept["count"], kept["action"]) == (2, "copy")
    assert kept["reason"].startswith("excluded by ")
    assert kept["source_bytes"] == kept["output_bytes"] == 2 * 2 * 4096 * 12288


def test_rows_tell_whose_scale_is_shared(tmp_path):
    rows = {
        row["pattern"]: row["group"] for row in forecast(write_llama(tmp_path / "m"))["patterns"]
    }
    assert rows[f"{LAYER}.self_attn.{{q,k,v}}_proj"] == "q_proj/k_proj/v_proj"
    assert rows[f"{LAYER}.mlp.{{gate,up}}_proj"] == "gate_proj/up_proj"
    assert rows[f"{LAYER}.mlp.down_proj"] is None
    rows = {
        row["pattern"]: row["group"]
        for row in forecast(tmp_path / "m", "nvfp4", "--exclude", "*.k_proj")["patterns"]
    }
    assert rows[f"{LAYER}.self_attn.{{q,v}}_proj"] == "q_proj/v_proj"
    rows = {
        row["pattern"]: row["group"]
        for row in forecast(tmp_path / "m", "nvfp4", "--exclude", "*.up_proj")["patterns"]
    }
    assert rows[f"{LAYER}.mlp.{{gate,down}}_proj"] is None
    rows = {
        row["pattern"]: row["group"]
        for row in forecast(write_llama(tmp_path / "x"), "mxfp4")["patterns"]
    }
    assert rows[f"{LAYER}.mlp.{{gate,up,down}}_proj"] is None


@pytest.fixture
def rates(monkeypatch) -> list[tuple[int, int]]:
    """A machine that quantizes a billion weights and hashes two billion bytes in a second.

    Returns  the columns and threads that were asked for
    """
    asked = []
    dry_run = "fp4convert.conversion.dry_run"
    monkeypatch.setattr(f"{dry_run}.weights_per_second", lambda *w: asked.append(w[2:]) or 1e9)
    monkeypatch.setattr(f"{dry_run}.hashed_bytes_per_second", lambda: 2e9)
    return asked


def test_the_time_is_that_of_its_parts(tmp_path, monkeypatch, rates):
    monkeypatch.setattr("fp4convert.conversion.dry_run.processors", lambda: 4)  # of 9 shards
    source = write_holes(tmp_path / "m", "llama", LLAMA_70B.tensors(), shards=9)
    document = forecast(source, "nvfp4", "--workers", 3)
    seconds = document["seconds_estimated"]
    weights = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert rates == [(28672, 3)]
    assert seconds == {
        "device": "cpu",
        "device_reason": None,
        "threads": 3,
        "arithmetic": pytest.approx(weights / 1e9),
        "hashing": pytest.approx(document["output_bytes"] / 8e9, 1e-4),
        "work": pytest.approx(weights / 1e9 + document["output_bytes"] / 8e9, 1e-4),
        "reading": {"at_1_gb_per_second": nbytes / 1e9, "at_100_mb_per_second": nbytes / 1e8},
    }


def warnings_of(tmp_path, shapes, format="nvfp4"):
    """All but those of engines."""
    engines = tuple(engine.name for engine in known_engines())
    names = {f"{LAYER}.{name}.weight": shape for name, shape in shapes.items()}
    source = write_holes(tmp_path / "m", "llama", iter(names.items()), shards=1)
    warnings = forecast(source, format)["warnings"]
    return [warning for warning in warnings if not warning.startswith(engines)]


def test_columns_that_ranks_cannot_divide_into_whole_blocks_are_told(tmp_path):
    """2880 columns of gpt-oss: 360 to each of 8 ranks are 22.5 blocks of 16; 720 to each of 4 are
    22.5 blocks of 32.
    """
    shapes = {
        "mlp.experts.0.down_proj": (2880, 2880),
        "mlp.experts.1.down_proj": (2880, 2880),
        "self_attn.o_proj": (2880, 4096),
    }
    first = f"{LAYER}.mlp.experts.0.down_proj"
    assert warnings_of(tmp_path / "nvfp4", shapes) == [
        "down_proj: 2880 columns cannot be divided into whole blocks of 16 among 8 ranks of "
        "tensor parallelism"
        f" (2 modules, the first {first!r})"
    ]
    assert warnings_of(tmp_path / "mxfp4", shapes, "mxfp4") == [
        "down_proj: 2880 columns cannot be divided into whole blocks of 32 among 4 or 8 ranks of "
        "tensor parallelism"
        f" (2 modules, the first {first!r})"
    ]


def test_rows_that_ranks_cannot_divide_are_told_but_not_those_of_few_heads(tmp_path):
    shapes = {
        "self_attn.q_proj": (36, 64),
        "self_attn.k_proj": (2, 64),
        "self_attn.v_proj": (2, 64),
        "mlp.other": (3, 64),
    }
    assert warnings_of(tmp_path, shapes) == [
        "q_proj: 36 rows cannot be divided among 8 ranks of tensor parallelism (1 module, "
        f"'{LAYER}.self_attn.q_proj')"
    ]


def test_several_numbers_of_ranks_are_told_as_a_sentence(tmp_path):
    (warning,) = warnings_of(tmp_path, {"mlp.down_proj": (64, 48)})
    assert warning == (
        "down_proj: 48 columns cannot be divided into whole blocks of 16 among 2, 4 or 8 ranks "
        "of tensor parallelism"
        f" (1 module, '{LAYER}.mlp.down_proj')"
    )


def test_what_stays_is_never_warned_of(tmp_path):
    source = write_holes(
        tmp_path / "m",
        "llama",
        iter([(f"{LAYER}.down_proj.weight", (64, 48)), (f"{LAYER}.x.weight", (64, 64))]),
    )
    assert len(forecast(source)["warnings"]) == 1
    assert forecast(source, "nvfp4", "--exclude", "*down_proj")["warnings"] == []


def unpacked_plan(source):
    """A plan in which lm_head was FP8 and becomes bf16: as this version cannot read such a source,
    its step is put together.
    """
    plan = prepare_quantize(take_apart(source, QuantizeOptions("", format="nvfp4")))
    (head,) = (step for step in plan.steps if step.module == "lm_head")
    packed = head.refs[0]._replace(dtype="F8_E4M3")
    unpacked = head._replace(action="dequantize", refs=(packed,), shape=head.refs[0].shape)
    tasks = (
        replace(task, steps=tuple(unpacked if step is head else step for step in task.steps))
        for task in plan.tasks
    )
    return replace(plan, tasks=tuple(tasks))


def test_packed_weights_that_stay_show_what_they_add(tmp_path):
    source = open_source(str(write_llama(tmp_path / "m")))
    document = describe_plan(artifact_job(source, unpacked_plan(source)), Settings("cpu"))
    (row,) = (row for row in document["patterns"] if row["pattern"] == "lm_head")
    assert (row["action"], row["source_bytes"], row["output_bytes"]) == (
        "dequantize",
        96 * 64,
        2 * 96 * 64,
    )
    assert row["format"] is None
    assert document["added_bytes"] == 96 * 64
    assert not any("larger" in warning for warning in document["warnings"])


def test_a_result_larger_than_its_source_is_told(tmp_path):
    head = {"lm_head.weight": weight(0, 96, 64)}
    source = open_source(str(write_single(tmp_path / "m", head)))
    document = describe_plan(artifact_job(source, unpacked_plan(source)), Settings("cpu"))
    assert document["warnings"][-1] == (
        "the result is larger than the source: 6.14 kB become 12.3 kB;"
        " packed weights that are kept add, as bf16, 6.14 kB: see --keep-packed"
    )


def test_a_result_larger_by_less_than_anybody_reads_is_not_told(tmp_path):
    """Integers of four bits in groups of 32 with bf16 scales have 4.5 bits, as NVFP4 has: 8 bytes
    more are no news.
    """
    norm = {
        f"{LAYER}.input_layernorm.weight": weight(0, 4096, 64),
        "model.norm.weight": weight(0, 1, 16),
    }
    source = open_source(str(write_single(tmp_path / "m", norm)))
    plan = prepare_quantize(take_apart(source, QuantizeOptions("", format="nvfp4")))
    sized = [Sized(step, step.source_bytes, step.source_bytes + 8) for step in plan.steps]
    assert find_doubts(sized, plan) == []
    assert find_doubts(
        [Sized(one.step, one.source_bytes, 2 * one.source_bytes) for one in sized], plan
    ) == ["the result is larger than the source: 524 kB become 1.05 MB"]


def test_a_group_that_lacks_a_member_is_in_the_document(tmp_path):
    source = write_single(
        tmp_path / "m",
        {f"{LAYER}.mlp.gate_proj.weight": weight(), f"{LAYER}.mlp.up_proj.weight": weight()},
    )
    warnings = forecast(source, "nvfp4", "--exclude", "*up_proj")["warnings"]
    assert any(
        "1 scale group gate_proj/up_proj: up_proj is kept" in warning for warning in warnings
    )


def test_warnings_of_a_dry_run_come_after_the_plan_and_are_those_of_the_document(tmp_path):
    source = write_holes(
        tmp_path / "m", "llama", iter([(f"{LAYER}.down_proj.weight", (64, 48))]), shards=1
    )
    told = run("quantize", source, "--format", "nvfp4", "--dry-run")
    assert told.err.splitlines()[-1] == f"warning: {forecast(source)['warnings'][0]}"
    assert run("quantize", source, "--format", "nvfp4", "--dry-run", "-q").err == ""


def test_what_comes_from_the_hub_is_hashed_too(hub, tmp_path, rates):
    source = write_llama(tmp_path / "m")
    hub.add("org/m", source)
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    remote, local = (forecast(name)["seconds_estimated"] for name in ("org/m", source))
    assert remote["hashing"] - local["hashing"] == pytest.approx(nbytes / 2e9)


def test_a_dry_run_from_the_hub_transfers_headers_and_small_files(hub, tmp_path):
    """Of 16 GB: the first 32 kB of each shard, what is left of a header, both twice, the index and
    config.json.
    """
    folder = write_holes(tmp_path / "m", "qwen3", QWEN3_8B.tensors(), shards=5)
    hub.add("org/m", folder)
    remote, local = forecast("org/m"), forecast(folder)
    assert remote["patterns"] == local["patterns"]
    headers = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as stream:
            headers += max(32 << 10, 8 + int.from_bytes(stream.read(8), "little"))
    small = sum(
        (folder / file).stat().st_size for file in ("model.safetensors.index.json", "config.json")
    )
    listing = sum(seen.nbytes for seen in hub.seen if "/api/" in seen.path)
    assert listing < 4000
    assert 2 * headers <= hub.sent_nbytes() <= 2 * headers + 2 * small + listing < 500_000
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 16_000_000_000
    assert json.dumps(remote)  # nothing in it but what JSON holds


@pytest.mark.parametrize(
    "words",
    [
        ("--format", "nvfp4"),
        ("--format", "nvfp4", "--dialect", "modelopt", "--kv-cache", "fp8"),
        ("--format", "mxfp4", "--dialect", "quark"),
        ("--format", "nvfp4", "--activations", "4", "--input-scale", "0.01"),
        ("--format", "nvfp4", "--exclude", "*.o_proj", "--scale-rule", "amax"),
        ("--format", "nvfp4", "--target-bits", "6"),
    ],
)
def test_the_size_of_the_result_is_known_to_the_byte(words, tmp_path):
    source, out = write_llama(tmp_path / "m"), tmp_path / "q"
    plan = run("quantize", source, *words, "--dry-run", "--json").json
    made = run("quantize", source, *words, "-o", out, "--json").json
    planned = plan["output_bytes"]
    assert (made["source_bytes"], made["output_bytes"]) == (plan["source_bytes"], planned)
    files = [path for path in out.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files if path.name != REPORT) == planned


@pytest.mark.parametrize("shards", [2, 40])
@pytest.mark.parametrize(
    "words", [("nvfp4",), ("mxfp4", "--dialect", "quark"), ("nvfp4", "--target-bits", "8")]
)
def test_the_disk_holds_no_more_than_is_said(words, shards, tmp_path):
    """All files count, in blocks of the disk: records, the report and .fp4convert."""
    source = tmp_path / "m"
    if shards == 2:
        write_llama(source)
    else:
        write_zeros(source, shards, rows=64, columns=64)
    said = forecast(source, *words)["peak_disk_bytes"]
    assert run("quantize", source, "--format", *words, "-o", tmp_path / "q").code == 0
    used = disk_nbytes(tmp_path / "q")
    assert used <= said <= 1.1 * used + 100_000 + 8_192 * shards
