"""make bench-fidelity: what rules, methods and formats lose on real models, beside other packages'
defaults and llama.cpp's types; benchmarks/results/fidelity.md.

    python benchmarks/bench.py fidelity [FOLDER] [--tiny]

FOLDER holds what takes minutes to make: models, calibrations and converted copies (default:
build/fidelity). What is there is used again. --tiny prints the table of methods for a small
language model, which is trained first, and writes no page.
Peers that do not resolve with the rest run in .venv-peers, which `make bench-peers` makes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.measure import BENCHMARKS, RESULTS, ROOT, machine, table, verdict
from quality import metrics, models
from quality.tiny import tiny

HERE = {
    "nvfp4": ("modelopt", "compressed_tensors", "torchao", "quark", "mlx"),
    "mxfp4": ("modelopt", "compressed_tensors", "torchao", "torchao_floor", "quark", "mlx"),
}
ELSEWHERE = ("fouroversix", "llmcompressor")
CALIBRATED = {"llmcompressor_gptq": ".venv-peers", "autoround": ".venv-autoround"}  # where they are
GGML = ("Q4_0", "IQ4_NL", "Q4_K_M", "Q8_0")
RULES = {"nvfp4": ("amax", "four-over-six", "mse"), "mxfp4": ("floor", "even", "ceil", "mse")}
DEFAULT = {"nvfp4": "mse", "mxfp4": "even"}
SPOKEN, WINDOW, JUDGED, FED = 24, 512, 8, 16  # records of speech; tokens, and windows of them
SENTENCES = 300  # that MiniLM is calibrated with
AT_ONCE = 12  # artifacts beside one that all are paired with
JUDGED_TWICE = 4  # windows that torchmetrics judges, too

MINILM, LANGUAGE, SPEECH = "MiniLM", "SmolLM2", "Whisper"


class Row(NamedTuple):
    """What is measured: its name, the row it is paired with, and options of quantize by model."""

    name: str
    beside: str
    options: Mapping[str, Sequence[str]]


class Loss(NamedTuple):
    """What `compare` says of an artifact's predictions."""

    bits: float
    kl: float
    windows: list[float]
    top1: float

    def beside(self, other: Loss) -> str:
        """The difference of means, and its standard error over paired windows."""
        by = [a - b for a, b in zip(self.windows, other.windows, strict=True)]
        error = statistics.stdev(by) / math.sqrt(len(by))
        return f"{self.kl - other.kl:+.4f} ± {error:.4f}"

    @property
    def error(self) -> float:
        return statistics.stdev(self.windows) / math.sqrt(len(self.windows))


class Bench:
    """The models, and what was made of them, each once."""

    def __init__(self, folder: Path, is_tiny: bool) -> None:
        self.folder, self.is_tiny = folder, is_tiny
        folder.mkdir(parents=True, exist_ok=True)
        self.sources = {MINILM: models.minilm(), SPEECH: models.whisper(folder / SPEECH)}
        self.sources[LANGUAGE] = (
            tiny(folder / "tiny") if is_tiny else models.smollm2(folder / LANGUAGE)
        )
        self.stem = self.sources[LANGUAGE].name
        texts = folder / "texts"
        texts.mkdir(exist_ok=True)
        self.calibrating = {
            MINILM: ("--text", texts / "sentences.txt", "--samples", SENTENCES),
            LANGUAGE: ("--text", models.write_text("calibrate", texts / "calibrate.txt"), *_fed()),
            SPEECH: ("--chat", models.write_speech("calibrate", SPOKEN, folder / "heard")),
        }
        sentences = "\n".join(models.sentences("calibrate")[:SENTENCES])
        (texts / "sentences.txt").write_text(sentences, encoding="utf-8")
        (texts / "prose.txt").write_text("\n".join(models.sentences("train")), encoding="utf-8")
        self.text = models.write_text("judge", texts / "judge.txt")
        self.judging = {
            LANGUAGE: ("--text", self.text, "--samples", JUDGED, "--sequence-length", WINDOW),
            SPEECH: ("--chat", models.write_speech("judge", SPOKEN, folder / "judged")),
        }

    def name(self, model: str) -> str:
        return self.stem if model == LANGUAGE else model

    def artifact(self, model: str, options: Sequence[str]) -> Path:
        """A converted model."""
        words = [Path(word).stem.strip("-") for word in options]
        made = self.folder / "made" / "-".join([self.name(model), *words])
        if not (made / "quantization_config.json").exists():
            run("quantize", self.sources[model], "--format", *options, "-o", made, "--force")
        return made

    def values(self, model: str, options: Sequence[str]) -> Path:
        """A float32 checkpoint with the values of a converted model."""
        artifact = self.artifact(model, options)
        values = artifact.with_name(artifact.name + "-values")
        if not values.exists():
            run("dequantize", artifact, "-o", values, "--dtype", "fp32")
        return values

    def made_by(self, peer: str) -> Path:
        """What a peer makes of the language model in NVFP4, calibrated with what we are."""
        made = self.folder / "made" / f"{self.stem}-{peer}"
        if made.exists():
            return made
        numbers, (_, text, *_) = self.folder / "fed.safetensors", self.calibrating[LANGUAGE]
        words = Path(str(text)).read_text(encoding="utf-8")
        fed = models.tokens(self.sources[LANGUAGE], words, FED, WINDOW)
        save_file({"numbers": fed.contiguous()}, numbers)
        python = ROOT / CALIBRATED[peer] / "bin" / "python"
        script = BENCHMARKS / "peers" / "calibrated.py"
        command = [python, "-P", script, peer, self.sources[LANGUAGE], numbers, made]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return made

    def ggml(self, kind: str) -> Path:
        """The language model as a GGUF file of one of ggml's types, by ggml's quantizer."""
        file = self.folder / "made" / f"{self.stem}-{kind}.gguf"
        if not file.exists():
            script = BENCHMARKS / "peers" / "ggml_types.py"
            command = [sys.executable, script, self.sources[LANGUAGE], file, kind]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return file

    def losses(self, model: str, artifacts: Mapping[str, Path], first: str) -> dict[str, Loss]:
        """What all lose on the same windows; the first is in every run of `compare`."""
        losses: dict[str, Loss] = {}
        others = [name for name in artifacts if name != first]
        for at in range(0, len(others), AT_ONCE):
            names = [first, *others[at : at + AT_ONCE]]
            words = [artifacts[name] for name in names]
            source = ("--source", self.sources[model])
            document = json.loads(run("compare", *words, *source, *self.judging[model], "--json"))
            for name, (letter, side) in zip(names, document["artifacts"].items(), strict=True):
                losses[name] = loss_of(side)._replace(bits=linear_bits(document, letter))
            print(f"{model}: {len(losses)} of {len(artifacts)} judged", file=sys.stderr, flush=True)
        return losses

    def originals(self, model: str) -> dict[str, Tensor]:
        """The matrices that are quantized."""
        made = metrics.weights_of(self.values(model, ("nvfp4", "--scale-rule", "amax")))
        return {
            name: x
            for name, x in metrics.weights_of(self.sources[model]).items()
            if not made[name].equal(x)
        }

    def calibration(self, model: str, name: str, *options: object) -> str:
        """A file of statistics, of the model's own text unless options name one."""
        file = self.folder / f"{self.name(model)}-{name}.safetensors"
        if not file.exists():
            words = options if "--text" in options else (*self.calibrating[model], *options)
            run("calibrate", self.sources[model], "-o", file, *words)
        return str(file)


def _fed() -> tuple[object, ...]:
    return ("--samples", FED, "--sequence-length", WINDOW)


def loss_of(side: Mapping[str, Any]) -> Loss:
    kl = side["predictions"]["kl"]
    top1 = side["predictions"]["top1"]
    return Loss(side["bits_per_weight"], kl["mean"], kl["windows"], top1)


def linear_bits(document: Mapping[str, Any], letter: str) -> float:
    """Bits per weight of linear layers, without the embedding, which other tools quantize."""
    rows = [row for row in document["tensors"] if ".layers." in row["name"]]
    nbits = sum(row["weights"] * row["held"][letter]["bits_per_weight"] for row in rows)
    return nbits / sum(row["weights"] for row in rows)


def run(*words: object) -> str:
    """Run the command; what it printed."""
    command = [sys.executable, "-m", "fp4convert", *map(str, words), "--quiet"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def peers_of(fmt: str, originals: dict[str, Tensor], folder: Path) -> dict[str, dict[str, Tensor]]:
    """What every peer makes of the matrices by default."""
    source = folder / "originals.safetensors"
    save_file({name: x.contiguous() for name, x in originals.items()}, source)
    made: dict[str, dict[str, Tensor]] = {}
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
        made |= {name: {key: values[f"{name}_{fmt}/{key}"] for key in originals} for name in names}
    return made


def rows_of_weights(bench: Bench, fmt: str) -> Iterable[list[str]]:
    """Every rule and peer: SQNR of the weights of each model, and the squared error beside that of
    mse, tensor by tensor.
    """
    originals = {
        f"{model}/{name}": x
        for model in bench.sources
        for name, x in bench.originals(model).items()
    }
    made: dict[str, dict[str, Tensor]] = {}
    for rule in RULES[fmt]:
        options = (fmt, "--scale-rule", rule)
        made[f"fp4convert {rule}"] = {
            f"{model}/{name}": x
            for model in bench.sources
            for name, x in metrics.weights_of(bench.values(model, options)).items()
        }
    made |= peers_of(fmt, originals, bench.folder)
    best = made["fp4convert mse"]
    errors = {name: metrics.squared_error(best[name], x) for name, x in originals.items()}
    for maker, values in made.items():
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
            maker,
            *(f"{value:.2f}" for value in sqnrs),
            f"{min(ratios):.4f} - {max(ratios):.4f}",
            f"{better} of {len(ratios)}",
        ]


def methods(bench: Bench) -> Iterable[Row]:
    """What is measured; models that a row does not name have no figure there."""
    heard = {
        model: ("--calibration", bench.calibration(model, "text", "--gram", "full"))
        for model in bench.sources
    }
    prose = ("--text", bench.folder / "texts" / "prose.txt", *_fed(), "--gram", "full")
    prose_file = bench.calibration(LANGUAGE, "prose", *prose)
    _, sized = heard[LANGUAGE]
    if bench.is_tiny:  # it takes 16 runs for each layer
        sized = bench.calibration(LANGUAGE, "sized", "--gram", "full", "--sensitivity")
    for fmt, rules in RULES.items():
        default = f"{fmt} {DEFAULT[fmt]}"
        for rule in rules:
            options = (fmt, "--scale-rule", rule)
            yield Row(f"{fmt} {rule}", default, dict.fromkeys(bench.sources, options))
        ways = {
            "importance": ("--scale-rule", "importance"),
            "awq": ("--method", "awq", "--scale-rule", DEFAULT[fmt]),
            "gptq": ("--method", "gptq"),
        }
        for way, options in ways.items():
            named = {model: (fmt, *options, *file) for model, file in heard.items()}
            if way == "awq":  # MiniLM has too few places for it, and Whisper none
                named = {LANGUAGE: named[LANGUAGE]}
            yield Row(f"{fmt} {way}", default, named)
        goal = ("--for-method", "gptq", "--format", fmt)
        gptq = (fmt, "--method", "gptq", "--calibration")
        through = bench.calibration(LANGUAGE, f"prefix-{fmt}", "--gram", "full", *goal)
        yield Row(f"{fmt} gptq, other text", f"{fmt} gptq", {LANGUAGE: (*gptq, prose_file)})
        yield Row(f"{fmt} gptq, prefix", f"{fmt} gptq", {LANGUAGE: (*gptq, through)})
    target = ("nvfp4", "--target-bits", "4.75")
    known = ("--calibration", sized)
    by_weights = "nvfp4 4.75 bits by weights"
    yield Row(by_weights, "nvfp4 mse", {LANGUAGE: target})
    yield Row("nvfp4 4.75 bits by inputs", by_weights, {LANGUAGE: (*target, *known)})
    gptq = ("--method", "gptq", *known)
    yield Row("nvfp4 4.75 bits by inputs, gptq", "nvfp4 gptq", {LANGUAGE: (*target, *gptq)})
    yield from with_inputs(bench, heard)


def with_inputs(bench: Bench, heard: Mapping[str, Sequence[str]]) -> Iterable[Row]:
    """Rows of W4A4: inputs are rounded, too."""
    inputs = ("--activations", "4")
    four = ("nvfp4", *inputs)
    plain = "nvfp4 W4A4"
    both = (LANGUAGE, SPEECH)
    yield Row(plain, "nvfp4 mse", dict.fromkeys(both, four))
    gptq = (*four, "--method", "gptq", "--calibration")
    seen = ("--gram", "full", "--format", "nvfp4", *inputs)
    rounded = {model: (*gptq, bench.calibration(model, "inputs", *seen)) for model in both}
    yield Row(
        f"{plain} gptq",
        plain,
        {model: (*four, "--method", "gptq", *heard[model]) for model in both},
    )
    yield Row(f"{plain} gptq, rounded inputs", f"{plain} gptq", rounded)
    goal = ("--for-method", "gptq", "--format", "nvfp4", *inputs)
    through = bench.calibration(LANGUAGE, "prefix-inputs", "--gram", "full", *goal)
    yield Row(f"{plain} gptq, prefix", f"{plain} gptq", {LANGUAGE: (*gptq, through)})
    yield Row("mxfp4 W4A4", "mxfp4 even", dict.fromkeys(both, ("mxfp4", *inputs)))


def rows_of_outputs(bench: Bench, rows: Sequence[Row]) -> Iterable[list[str]]:
    """Every rule, method and peer: what it does to predictions, and to MiniLM's layers."""
    made = {
        model: {
            row.name: bench.artifact(model, row.options[model])
            for row in rows
            if model in row.options
        }
        for model in (LANGUAGE, SPEECH)
    }
    made[LANGUAGE] |= {kind: bench.ggml(kind) for kind in GGML}
    made[LANGUAGE] |= {
        f"nvfp4 {peer}": bench.made_by(peer)
        for peer, place in CALIBRATED.items()
        if (ROOT / place).exists()
    }
    losses = {model: bench.losses(model, each, "nvfp4 mse") for model, each in made.items()}
    beside = {row.name: row.beside for row in rows}
    outputs = dict(outputs_of_minilm(bench, rows))
    for name, loss in losses[LANGUAGE].items():
        other = beside.get(name, "nvfp4 gptq" if name.startswith("nvfp4") else "nvfp4 mse")
        cells = [name, f"{loss.bits:.3f}", f"{loss.kl:.4f} ± {loss.error:.4f}"]
        cells += [f"{other}: {loss.beside(losses[LANGUAGE][other])}", f"{loss.top1:.1%}"]
        if name in losses[SPEECH]:
            spoken, alike = losses[SPEECH][name], losses[SPEECH][other]
            cells += [f"{spoken.kl:.4f} ± {spoken.error:.4f}", spoken.beside(alike)]
        else:
            cells += ["-", "-"]
        yield [*cells, outputs.get(name, "-")]


def outputs_of_minilm(bench: Bench, rows: Sequence[Row]) -> Iterable[tuple[str, str]]:
    """(row, SQNR of the outputs of MiniLM's layers)"""
    originals = bench.originals(MINILM)
    sentences = models.sentences("judge")
    moments = metrics.minilm_moments(bench.sources[MINILM], sentences, list(originals))
    for row in rows:
        if MINILM in row.options:
            weights = metrics.weights_of(bench.values(MINILM, row.options[MINILM]))
            yield row.name, f"{metrics.output_sqnr_db(weights, originals, moments):.2f}"


def judged_twice(bench: Bench) -> tuple[float, float]:
    """The mean KL of a few windows by `evaluate`, and by torchmetrics over transformers' logits."""
    options = ("nvfp4", "--scale-rule", "mse")
    words = ("--source", bench.sources[LANGUAGE], "--text", bench.text)
    words += ("--samples", JUDGED_TWICE, "--sequence-length", WINDOW)
    document = run("evaluate", bench.artifact(LANGUAGE, options), *words, "--json")
    text = bench.text.read_text(encoding="utf-8")
    numbers = models.tokens(bench.sources[LANGUAGE], text, JUDGED_TWICE, WINDOW)
    ours, original = (
        metrics.log_probabilities(folder, numbers)
        for folder in (bench.values(LANGUAGE, options), bench.sources[LANGUAGE])
    )
    return float(json.loads(document)["kl"]["mean"]), metrics.divergence(ours, original)


def bars(weights: Mapping[str, list[list[str]]], bench: Bench) -> Iterable[list[str]]:
    """What was promised of weights, and whether it holds."""
    for fmt, rows in weights.items():
        sqnr = {row[0]: statistics.mean(map(float, row[1:4])) for row in rows}
        gains = {"nvfp4": {"amax": 1.2, "four-over-six": 0.5}, "mxfp4": {"floor": 0.2}}[fmt]
        for rule, bar in gains.items():
            gain = round(sqnr["fp4convert mse"] - sqnr[f"fp4convert {rule}"], 2)
            yield [f"{fmt}: mse over {rule}, dB", f"{gain:.2f}", verdict(gain, bar)]
        lost = sum(int(row[-1].split()[0]) for row in rows)
        name = f"{fmt}: tensors on which anything has less error than mse"
        yield [name, str(lost), verdict(lost, 0, is_floor=False)]
    ours, judged = judged_twice(bench)
    apart = abs(ours / judged - 1)
    name = f"KL of {JUDGED_TWICE} windows, by evaluate {ours:.5f}, by torchmetrics {judged:.5f}"
    yield [name, f"{apart:.3%}", verdict(round(apart, 5), 0.01, is_floor=False)]


def write_page(bench: Bench, weights: Mapping[str, list[list[str]]], outputs: str) -> None:
    """benchmarks/results/fidelity.md."""
    sqnrs = [f"{model}, dB" for model in bench.sources]
    headings = ["values by", *sqnrs, "squared error beside mse", "tensors with less error"]
    page = [
        f"# Fidelity\n\n{machine()}. Repeat with `make bench-fidelity`.\n",
        (Path(__file__).with_name("about.md")).read_text(encoding="utf-8"),
        f"## Predictions\n\n{outputs}\n",
        *(f"## Weights, {fmt}\n\n{table(headings, rows)}\n" for fmt, rows in weights.items()),
        f"## Bars\n\n{table(['what', 'measured', 'bar'], list(bars(weights, bench)))}\n",
    ]
    (RESULTS / "fidelity.md").write_text("\n".join(page), encoding="utf-8")
    print("\n".join(page))


def main(arguments: list[str]) -> int:
    """Write fidelity.md."""
    description = "Measure what rules, methods and formats lose."
    parser = argparse.ArgumentParser(prog="bench.py fidelity", description=description)
    default = ROOT / "build" / "fidelity"
    help_folder = "for what is made, and kept"
    parser.add_argument("folder", nargs="?", type=Path, default=default, help=help_folder)
    parser.add_argument("--tiny", action="store_true", help="a small language model, no page")
    chosen = parser.parse_args(arguments)
    bench = Bench(chosen.folder, chosen.tiny)
    outputs = list(rows_of_outputs(bench, list(methods(bench))))
    name = bench.stem
    headings = ["method", "bits", f"{name}, KL", "minus that of", "top-1"]
    headings += [f"{SPEECH}, KL", "minus the same row's", f"{MINILM}, output SQNR, dB"]
    predictions = table(headings, outputs)
    if chosen.tiny:
        print(predictions)
    else:
        write_page(bench, {fmt: list(rows_of_weights(bench, fmt)) for fmt in RULES}, predictions)
    return 0
