"""Write what engines load as tables of README.md and docs/engines.md, from configs/engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from fp4convert.engines.files import OTHERS, Engine, Preset, known_engines
from fp4convert.engines.gpus import engines_with_kernels, known_gpus, use_of
from fp4convert.engines.rows import Condition, Part, Row
from fp4convert.options.writing import QuantizeOptions
from fp4convert.planning.engine_facts import load_code

# Words for what a row says an engine does, but for loading as it should, which has its own table.
TRAPS = {"garbage": "computes garbage", "refuses": "does not load", "slow": "slow"}
KERNELS = (  # no engine, and so no file
    "your own kernels",
    "`fp4convert quantize ./Model --format nvfp4 --dialect plain`",
    "`fp4convert transcode ./Model-NVFP4-plain -o ./Model-128x4 --dialect plain --scale-layout"
    " 128x4`: [every byte](docs/bytes.md)",
    "own decoders",
)


def table(headings: tuple[str, ...], rows: list[tuple[object, ...]]) -> Iterator[str]:
    """Write a table of markdown."""
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def serve() -> Iterator[str]:
    """List what to type for every engine, and how it loads the result."""
    rows: list[tuple[object, ...]] = []
    for engine in known_engines():
        usual = usual_preset(engine)
        words = f"fp4convert quantize {usual.source} --for {engine.key} {usual.options}".strip()
        line = loading(engine, usual)
        then = [f"`{line}`" if line else "", usual.note]
        rows.append((engine.name, f"`{words}`", "; ".join(filter(None, then)), tried(engine)))
    yield from table(("engine", "type this", "then", "tried"), [*rows, KERNELS])


def cards() -> Iterator[str]:
    """List cards with the kernels that vLLM and SGLang choose there."""
    kinds = [Part("nvfp4", 16, False), Part("nvfp4", 4, False), Part("fp8 row", 8, False)]
    kinds.append(Part("kv-nvfp4", 16, False))
    rows: dict[str, tuple[object, ...]] = {}
    for gpu in known_gpus():
        cells = []
        for part in kinds:
            uses = (use_of(gpu, one, part, "compressed-tensors") for one in engines_with_kernels())
            named = {
                use.engine.name: f"{use.kernel.computes}, {use.kernel.kernel}"
                for use in uses
                if use.kernel
            }
            words = [f"{engine}: {word}" for engine, word in named.items()]
            same = len(named) > 1 and len(set(named.values())) == 1
            cells.append(
                next(iter(named.values())) if same else "; ".join(words) or "not looked at"
            )
        names = f"{rows[gpu.arch][0]}, {gpu.name}" if gpu.arch in rows else gpu.name
        rows[gpu.arch] = (names, gpu.arch.upper(), *cells)
    heads = ("card", "", "NVFP4", "with `--activations 4`", "FP8", "NVFP4 cache")
    yield from table(heads, list(rows.values()))


def tried(engine: Engine) -> str:
    """Say how an engine was tried, and with how many classes."""
    if engine.loaded_classes is None:
        return engine.tried
    names = {
        key[0].partition(":")[0] for key, fault in engine.loaded_classes.rows.items() if not fault
    }
    return f"{engine.tried}, {len(names)} classes"


def chosen() -> Iterator[str]:
    """List which options --for chooses for every engine that loads an artifact."""
    rows: list[tuple[object, ...]] = []
    for engine in (one for one in known_engines(OTHERS) if one.dialects):
        presets = (usual_preset(engine), *(each for each in engine.presets if each.models))
        words = "; ".join(f"{each.only} `{each.words}`".strip() for each in presets)
        rows.append((f"`{engine.key}`", words))
    yield from table(("`--for`", "chooses"), rows)


def usual_preset(engine: Engine) -> Preset:
    """Return what is chosen for most models."""
    return next(choice for choice in engine.presets if not choice.models)


def loading(engine: Engine, usual: Preset) -> str:
    """Return the line that loads the usual command's result; "" for unknown."""
    place = PurePath(usual.source.split()[0])
    made = {"format": usual.format, "dialect": usual.dialect, "activations": usual.activations}
    folder = f"./{QuantizeOptions(place.stem, **made).folder}"
    if engine.code:
        return load_code(engine, {"architectures": ["LlamaForCausalLM"]}, folder)[-1]
    names = {"output": folder, "file": f"{folder}/{place.name}", "name": PurePath(folder).name}
    names["place"] = engine.places[-1]["folder"] if engine.places else ""
    return engine.serve.format(**names)


def engines() -> Iterator[str]:
    """List what every engine is known to load."""
    rows: list[tuple[object, ...]] = []
    for engine in known_engines(OTHERS):
        for row in (row for row in engine.rows if row.effect == "loads"):
            what = row.says.removeprefix("loads ") + only(row.condition)
            dialects = ", ".join(row.condition.dialects)
            rows.append((engine.name, versions(row), dialects, what, evidence(row)))
    yield from table(("engine", "versions", "dialect", "what", "tried"), rows)


def versions(row: Row) -> str:
    """Spell the versions of a row; "any" for all that were looked at."""
    return f"`{row.versions}`" if str(row.versions) else "any"


def only(condition: Condition) -> str:
    """Say for which models alone a row is."""
    return f" ({', '.join(f'`{model}`' for model in condition.models)})" if condition.models else ""


def evidence(row: Row) -> str:
    """Say how a row is known: by which test here, or from where."""
    proof = f" by `{row.proof}`" if row.proof else ""
    return f"{row.tried}{proof}: {linked(row.source)}"


def linked(source: str) -> str:
    """Write addresses as links, named as GitHub names threads."""
    thread = r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)"
    return re.sub(thread, r"[\1#\2](\g<0>)", source)


def failures(engine: Engine) -> Iterator[str]:
    """List what an engine is known to fail at, or to do slowly."""
    rows: list[tuple[object, ...]] = []
    for row in (row for row in engine.rows if row.effect in TRAPS):
        trap = (versions(row), TRAPS[row.effect], about(row.condition))
        rows.append((*trap, row.says, row.instead, evidence(row)))
    headings = ("versions", "effect", "artifacts", "it", "instead", "tried")
    yield from table(headings, rows) if rows else ["Nothing is known to fail."]


def about(condition: Condition) -> str:
    """Say which artifacts a row is about, in few words."""
    words = [", ".join(condition.dialects) or "any dialect", *condition.formats]
    words += [f"W4A{condition.activations}"] if condition.activations else []
    words += [f"`{model}`" for model in (*condition.models, *condition.classes)]
    words += [f"not `{model}`" for model in condition.not_models]
    words += [f"beside {word}" for word in condition.beside]
    words += [f"experts beside in {word}" for word in condition.beside_experts]
    words += [f"finding `{code}`" for code in condition.findings]
    words += [f"`{glob}` quantized" for glob in condition.modules]
    words += [f"files `{glob}`" for glob in condition.files]
    words += [" or ".join(f"{cache.upper()} cache" for cache in condition.caches)]
    for name, yes, no in (
        ("has_experts", "experts", "no experts"),
        ("has_others", "other layers than experts", "experts alone"),
        ("is_mixed", "several formats", "one format"),
        ("is_diffusers", "Diffusers", ""),
        ("is_sharded", "several files", "one file"),
        ("is_stacked", "experts in stacks", "experts one by one"),
        ("names_fused", "", "`qkv_proj` or `gate_up_proj` not named as their parts are"),
    ):
        value = getattr(condition, name)
        words += [] if value is None else [yes if value else no]
    return ", ".join(filter(None, words))
