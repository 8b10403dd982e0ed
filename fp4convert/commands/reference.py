"""explain and recipes: the meanings of codes, and the known recipes."""

from __future__ import annotations

from typing import Any

from fp4convert.errors import InputError
from fp4convert.options.looking import ExplainOptions, RecipesOptions


def explain(options: ExplainOptions) -> dict[str, Any]:
    """Return the meaning of a code, the codes of a subject, or all codes.

    Of an engine or a card: what is known of it.

    "agents" is the page for agents.
    """
    from fp4convert.report import text

    if options.code == "agents":
        return {"page": text.AGENTS.read_text(encoding="utf-8")}

    if options.code is None:
        return text.explain_all()
    if text.is_subject(options.code):
        return text.explain_all(options.code)
    if found := _explain_serving(options.code):
        return found
    return text.explain(options.code)


def _explain_serving(word: str) -> dict[str, Any] | None:
    """Describe an engine or a card by its name; None for other words."""
    from fp4convert.engines import gpus
    from fp4convert.engines.files import find_engine

    if gpu := gpus.find_gpu(word):
        return {"gpu": gpus.describe_uses(gpu, gpus.every_use(gpu))}
    engine = find_engine(word)
    return {"engine": engine.as_json()} if engine else None


def recipes(options: RecipesOptions) -> dict[str, Any]:
    """Return one recipe, all of them, or variants for vLLM's recipes."""
    from fp4convert.recipes import toml_files

    if options.yaml or options.engine:
        if not (options.yaml and options.engine == "vllm" and options.name):
            detail = "--yaml writes variants of one family for vLLM; expected NAME, --for vllm"
            step = "For example: fp4convert recipes llama --for vllm --yaml."
            raise InputError("usage", f"{detail} and --yaml", step)
        from fp4convert.report.vllm_recipes import as_yaml, vllm_variants

        variants = vllm_variants(options.name)
        return {"variants": variants, "yaml": as_yaml(variants)}
    if options.name is None:
        return toml_files.describe_known()
    return toml_files.describe(options.name)
