"""Names of whole models of transformers, and what is said of names under a config.json."""

from __future__ import annotations

from typing import Any

from meta_models import model_of

from fp4convert.checkpoint.missing_parts import Judgement, judge_names
from fp4convert.recipes.recipe import model_recipe


def whole(model_type: str) -> tuple[list[str], dict[str, Any]]:
    """The names and the config.json of a model that transformers makes."""
    model = model_of(model_type)
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    ties = config.get("tie_word_embeddings")
    return [name for name in model.state_dict() if not (ties and name in tied)], config


def judged(names: list[str], config: dict[str, Any]) -> Judgement:
    """What is said of names alone."""
    return judge_names(names, {}, config, model_recipe(config))


def unsound(names: list[str], config: dict[str, Any]) -> tuple[set[str], set[str | None]]:
    """The names that are unexplained, and those that are missing."""
    found = judged(names, config)
    assert found.kept, config["architectures"]
    missing = {one.tensor for one in found.faults if one.code == "module-missing"}
    return {one.name for one in found.unexplained}, missing


def with_experts_apart(names: list[str], config: dict[str, Any]) -> list[str]:
    """The names of a Qwen3-MoE, each expert's matrices by themselves."""
    return [name for name in names if ".experts." not in name] + [
        f"model.layers.{layer}.mlp.experts.{expert}.{one}_proj.weight"
        for layer in range(config["num_hidden_layers"])
        for expert in range(config["num_local_experts"])
        for one in ("gate", "up", "down")
    ]
