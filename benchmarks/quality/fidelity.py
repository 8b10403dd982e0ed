"""make bench-fidelity: errors of every rule and method beside other packages' defaults;
benchmarks/results/fidelity.md.

    python benchmarks/bench.py fidelity [FOLDER]

FOLDER holds what takes minutes to make: the small language model, and converted copies (default:
build/fidelity).
Peers that do not resolve with the rest run in .venv-peers, which `make bench-peers` makes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.measure import BENCHMARKS, RESULTS, ROOT, machine, table, verdict
from quality import metrics, models

HERE = {
    "nvfp4": ("modelopt", "compressed_tensors", "torchao", "quark", "mlx"),
    "mxfp4": ("modelopt", "compressed_tensors", "torchao", "torchao_floor", "quark", "mlx"),
}
ELSEWHERE = ("fouroversix", "llmcompressor")
CALIBRATED = {"llmcompressor_gptq": ".venv-peers", "autoround": ".venv-autoround"}  # where they are
FOLDING = "awq"  # MiniLM has too few places for it
RULES = {"nvfp4": ("amax", "four-over-six", "mse"), "mxfp4": ("floor", "even", "ceil", "mse")}
ENDING = ".safetensors"  # of calibrations; no folder's name may have it
SENTENCES = 300  # that MiniLM is calibrated with
SIZED, BITS = "nvfp4", ("4.501", "4.75")  # bits of a weight; the first is all NVFP4
JUDGED, FED = 128, 128  # sequences of the language model: to judge by, to calibrate with


class Bench:
    """The two models, and what was made of them, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.sources = {"MiniLM": models.minilm(), "tiny": models.tiny(folder / "tiny")}
        self._made: dict[tuple[str, ...], Path] = {}

    def artifact(self, model: str, *options: str) -> Path:
        """A converted model."""
        if (model, *options) not in self._made:
            stem = self.folder / "-".join(
                [model, *(Path(word).name.removesuffix(ENDING).strip("-") for word in options)]
            )
            shutil.rmtree(stem, ignore_errors=True)
            shutil.rmtree(_values_beside(stem), ignore_errors=True)
            run("quantize", self.sources[model], "--format", *options, "-o", stem)
            self._made[model, *options] = stem
        return self._made[model, *options]

    def values(self, model: str, *options: str) -> Path:
        """A float32 checkpoint with the values of a converted model."""
        artifact = self.artifact(model, *options)
        values = _values_beside(artifact)
        if not values.exists():
            run("dequantize", artifact, "-o", values, "--dtype", "fp32")
        return values

    def made_by(self, peer: str) -> Path:
        """What a peer makes of the language model in NVFP4, calibrated with what we are."""
        numbers, made = self.folder / "fed.safetensors", self.folder / f"tiny-{peer}"
        shutil.rmtree(made, ignore_errors=True)
        fed = models.tokens(self.sources["tiny"], models.sources("calibrate"), FED)
        save_file({"numbers": fed.contiguous()}, numbers)
        python = ROOT / CALIBRATED[peer] / "bin" / "python"
        script = BENCHMARKS / "peers" / "calibrated.py"
        command = [python, "-P", script, peer, self.sources["tiny"], numbers, made]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return made

    def evaluated(self, artifact: Path, text: Path) -> float:
        """The mean KL that `evaluate` finds for an artifact of the language model."""
        words = ("--source", self.sources["tiny"], "--text", text, "--samples", JUDGED)
        document = run("evaluate", artifact, *words, "--sequence-length", models.SEQUENCE, "--json")
        return float(json.loads(document)["kl"]["mean"])

    def originals(self, model: str) -> dict[str, Tensor]:
        """The matrices that are quantized."""
        made = metrics.weights_of(self.values(model, "nvfp4", "--scale-rule", "amax"))
        return {
            name: x
            for name, x in metrics.weights_of(self.sources[model]).items()
            if not torch.equal(made[name], x)
        }

    def calibration(self, model: str, name: str, *options: str) -> Path:
        file = self.folder / f"{model}-{name}{ENDING}"
        file.unlink(missing_ok=True)
        run("calibrate", self.sources[model], "-o", file, "--gram", "full", *options)
        return file


def _values_beside(artifact: Path) -> Path:
    return artifact.with_name(artifact.name + "-values")


def run(*words: object) -> str:
    """Run the command; what it printed."""
    command = [sys.executable, "-m", "fp4convert", *map(str, words), "--quiet"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def peers_of(fmt: str, originals: dict[str, Tensor], folder: Path) -> dict[str, dict[str, Tensor]]:
    """What every peer makes of the matrices by default."""
    source = folder / "originals.safetensors"
    save_file({name: x.contiguous() for name, x in originals.items()}, source)
    found: dict[str, dict[str, Tensor]] = {}
    for python, names in (
        (sys.executable, HERE[fmt]),
        (ROOT / ".venv-peers" / "bin" / "python", ELSEWHERE),
    ):
        words = [f"{name}_{fmt}" for name in names]
        command = [
            python,
            "-P",
            BENCHMARKS / "peers" / "quantizers.py",
            "values",
            source,
            folder / "peers.safetensors",
            *words,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        values = load_file(folder / "peers.safetensors")
        found |= {name: {key: values[f"{name}_{fmt}/{key}"] for key in originals} for name in names}
    return found


def rows_of_weights(bench: Bench, fmt: str) -> Iterable[list[str]]:
    """Every rule and peer: SQNR of the weights of both models, and the squared error beside that of
    mse, tensor by tensor.
    """
    originals = {
        f"{model}/{name}": x
        for model in bench.sources
        for name, x in bench.originals(model).items()
    }
    made: dict[str, dict[str, Tensor]] = {}
    for rule in RULES[fmt]:
        made[f"fp4convert {rule}"] = {
            f"{model}/{name}": x
            for model in bench.sources
            for name, x in metrics.weights_of(
                bench.values(model, fmt, "--scale-rule", rule)
            ).items()
        }
    made |= peers_of(fmt, originals, bench.folder)
    best = made["fp4convert mse"]
    errors = {name: metrics.squared_error(best[name], x) for name, x in originals.items()}
    for what, values in made.items():
        ratios = [
            metrics.squared_error(values[name], x) / errors[name] for name, x in originals.items()
        ]
        sqnrs = [
            metrics.mean_sqnr_db(
                values, {name: x for name, x in originals.items() if name.startswith(model)}
            )
            for model in bench.sources
        ]
        better = sum(ratio < 1 for ratio in ratios)
        yield [
            what,
            *(f"{value:.2f}" for value in sqnrs),
            f"{min(ratios):.4f} - {max(ratios):.4f}",
            f"{better} of {len(ratios)}",
        ]


def rows_of_outputs(bench: Bench) -> Iterable[list[str]]:
    """Every rule and method: what its error does to outputs of MiniLM's layers, and to the language
    model's predictions.
    """
    originals = bench.originals("MiniLM")
    moments = metrics.minilm_moments(
        bench.sources["MiniLM"], models.sentences("judge"), list(originals)
    )
    text = bench.folder / "judge.txt"
    text.write_text(models.judge_text(JUDGED), encoding="utf-8")
    numbers = models.tokens(bench.sources["tiny"], text.read_text(encoding="utf-8"), JUDGED)
    predicted = metrics.log_probabilities(bench.sources["tiny"], numbers)
    for name, choices in methods(bench):
        weights = (
            metrics.weights_of(bench.values("MiniLM", *choices["MiniLM"]))
            if "MiniLM" in choices
            else None
        )
        values = bench.values("tiny", *choices["tiny"])
        kl = bench.evaluated(bench.artifact("tiny", *choices["tiny"]), text)
        judged = metrics.divergence(metrics.log_probabilities(values, numbers), predicted)
        output = f"{metrics.output_sqnr_db(weights, originals, moments):.2f}" if weights else "-"
        yield [name, output, f"{kl:.4g}", f"{judged:.4g}"]
    for peer in CALIBRATED:
        made = values = bench.made_by(peer)
        kl = bench.evaluated(made, text)
        if "quantization_config" in json.loads((made / "config.json").read_text(encoding="utf-8")):
            values = _values_beside(made)
            shutil.rmtree(values, ignore_errors=True)
            run("dequantize", made, "-o", values, "--dtype", "fp32")
        judged = metrics.divergence(metrics.log_probabilities(values, numbers), predicted)
        yield [f"nvfp4 {peer}", "-", f"{kl:.4g}", f"{judged:.4g}"]


def methods(bench: Bench) -> Iterable[tuple[str, dict[str, tuple[str, ...]]]]:
    """(what is measured, options of quantize by model)"""
    texts = bench.folder / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "sentences.txt").write_text(
        "\n".join(models.sentences("calibrate")[:SENTENCES]), encoding="utf-8"
    )
    (texts / "sources.txt").write_text(models.sources("calibrate"), encoding="utf-8")
    (texts / "prose.txt").write_text("\n".join(models.sentences("train")), encoding="utf-8")
    fed = ("--samples", str(FED), "--sequence-length", str(models.SEQUENCE))
    files = {
        ("MiniLM", "text"): bench.calibration(
            "MiniLM", "text", "--text", str(texts / "sentences.txt"), "--samples", str(SENTENCES)
        ),
        ("tiny", "text"): bench.calibration(
            "tiny", "text", "--text", str(texts / "sources.txt"), *fed
        ),
        ("tiny", "self"): bench.calibration("tiny", "self", "--self-generate", str(FED), *fed[2:]),
        ("tiny", "prose"): bench.calibration(
            "tiny", "prose", "--text", str(texts / "prose.txt"), *fed
        ),
        ("tiny", "sized"): bench.calibration(
            "tiny", "sized", "--text", str(texts / "sources.txt"), *fed, "--sensitivity"
        ),
    }
    for fmt, rules in RULES.items():
        for rule in rules:
            yield f"{fmt} {rule}", dict.fromkeys(bench.sources, (fmt, "--scale-rule", rule))
        ways = {
            "importance": ("--scale-rule", "importance"),
            "awq, rule mse": ("--method", "awq", "--scale-rule", "mse"),
            "gptq": ("--method", "gptq"),
        }
        for way, options in ways.items():
            with_file = {
                model: (fmt, *options, "--calibration", str(files[model, "text"]))
                for model in bench.sources
            }
            yield (
                f"{fmt} {way}",
                with_file if not way.startswith(FOLDING) else {"tiny": with_file["tiny"]},
            )
        if fmt == SIZED:
            yield from sizes(bench, files)
        for text in ("self", "prose"):
            yield (
                f"{fmt} gptq, {text}",
                {"tiny": (fmt, "--method", "gptq", "--calibration", str(files["tiny", text]))},
            )


def sizes(
    bench: Bench, files: dict[tuple[str, str], Path]
) -> Iterable[tuple[str, dict[str, tuple[str, ...]]]]:
    """Formats of modules chosen for a size: by weights, and by what the outputs lose."""
    for bits in BITS:
        target = (SIZED, "--target-bits", bits)
        if float(bits) > float(BITS[0]):  # four bits and nothing else are no choice of weights
            yield f"{bits} bits by weights", {"tiny": target}
        known = (*target, "--calibration", str(files["tiny", "sized"]))
        yield f"{bits} bits by outputs", {"tiny": known}


def bars(weights: dict[str, list[list[str]]], outputs: list[list[str]]) -> Iterable[list[str]]:
    """What was promised, and whether it holds."""
    for fmt, rows in weights.items():
        sqnr = {row[0]: (float(row[1]) + float(row[2])) / 2 for row in rows}
        gains = {"nvfp4": {"amax": 1.2, "four-over-six": 0.5}, "mxfp4": {"floor": 0.2}}[fmt]
        for rule, bar in gains.items():
            gain = sqnr["fp4convert mse"] - sqnr[f"fp4convert {rule}"]
            yield [f"{fmt}: mse over {rule}, dB", f"{gain:.2f}", verdict(round(gain, 2), bar)]
        lost = sum(int(row[4].split()[0]) for row in rows)
        yield [
            f"{fmt}: tensors on which anything has less error than mse",
            str(lost),
            verdict(lost, 0, is_floor=False),
        ]
    found = {row[0]: row for row in outputs}
    gain = float(found["nvfp4 gptq"][1]) - float(found["nvfp4 amax"][1])
    yield ["nvfp4: output SQNR of gptq over amax, dB", f"{gain:.2f}", verdict(round(gain, 2), 5.5)]
    apart = max(abs(float(row[2]) / float(row[3]) - 1) for row in outputs)
    yield [
        "KL by evaluate beside torchmetrics', largest difference",
        f"{apart:.3%}",
        verdict(round(apart, 5), 0.01, is_floor=False),
    ]
    for what, over, bar in (
        ("nvfp4 gptq", "nvfp4 amax", 0.2),
        ("nvfp4 gptq, self", "nvfp4 gptq", 1.1),
        (f"{BITS[1]} bits by outputs", f"{BITS[1]} bits by weights", 0.5),
        (f"{BITS[0]} bits by outputs", "nvfp4 mse", 1.0),
    ):
        ratio = float(found[what][2]) / float(found[over][2])
        yield [
            f"KL of {what} beside {over}",
            f"{ratio:.3f}",
            verdict(round(ratio, 3), bar, is_floor=False),
        ]


def write_page(weights: dict[str, list[list[str]]], outputs: list[list[str]]) -> None:
    """benchmarks/results/fidelity.md."""
    headings = [
        "values by",
        "MiniLM, dB",
        "tiny, dB",
        "squared error beside mse",
        "tensors with less error",
    ]
    outputs_named = ["method", "MiniLM, output SQNR, dB", "tiny, KL", "by torchmetrics"]
    page = [
        f"# Fidelity\n\n{machine()}. Repeat with `make bench-fidelity`.\n",
        (Path(__file__).with_name("about.md")).read_text(encoding="utf-8"),
        *(f"## Weights, {fmt}\n\n{table(headings, rows)}\n" for fmt, rows in weights.items()),
        f"## Outputs\n\n{table(outputs_named, outputs)}\n",
        f"## Bars\n\n{table(['what', 'measured', 'bar'], list(bars(weights, outputs)))}\n",
    ]
    (RESULTS / "fidelity.md").write_text("\n".join(page), encoding="utf-8")
    print("\n".join(page))


def main(arguments: list[str]) -> int:
    """Write fidelity.md."""
    parser = argparse.ArgumentParser(
        prog="bench.py fidelity", description="Measure the errors of every rule and method."
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=ROOT / "build" / "fidelity",
        help="for what is made, and kept",
    )
    bench = Bench(parser.parse_args(arguments).folder)
    weights = {fmt: list(rows_of_weights(bench, fmt)) for fmt in RULES}
    write_page(weights, list(rows_of_outputs(bench)))
    return 0
