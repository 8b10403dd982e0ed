"""Adapters in PEFT's layout: merged byte for byte as PEFT does, or refused by name."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from checkpoints import run
from peft_models import CASES, change_config, merge_by_peft, write_adapter
from safetensors.numpy import load_file, save_file
from tiny_models import make_llama

from fp4convert.checkpoint.adapters.merging import merge_adapter
from fp4convert.checkpoint.adapters.peft import open_adapter
from fp4convert.checkpoint.encodings.base import Linear
from fp4convert.checkpoint.linears import find_linears
from fp4convert.recipes.recipe import model_recipe
from fp4convert.storage.open import open_source
from fp4convert.storage.source import Access

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
WEIGHTS = "adapter_model.safetensors"
LINEAR = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A folder with a base model and an adapter of it."""
    folder = tmp_path_factory.mktemp("plain")
    write_adapter(make_llama(folder / "base"), folder / "adapter", LINEAR)
    return folder


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    """The same adapter, to be changed."""
    return Path(shutil.copytree(plain / "adapter", tmp_path / "adapter"))


def merged_bytes(base: Path, adapter: Path, scale: float = 1.0) -> dict[str, bytes]:
    """Every tensor that the adapter changes."""
    source = open_source(str(base))
    linears = find_linears(source, model_recipe(source.checkpoint.config))
    changed = merge_adapter(linears, open_adapter(str(adapter), scale, Access()), source.checkpoint)

    def data(linear: Linear) -> bytes:
        rows = linear.coding.weights(linear, source).rows(0, linear.shape[0])
        assert rows.dtype == linear.refs[0].dtype
        return bytes(rows.data)

    of = {one.name: data(one) for one in changed.of.values() if one.coding.change}
    return of | {name: data(one) for name, one in changed.vectors.items()}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, "bf16") for case in CASES]
    + [(case, dtype) for case in ("llama", "embedding", "gpt2") for dtype in ("fp16", "fp32")],
)
@pytest.mark.sweep(3)
def test_merged_weights_are_pefts_byte_for_byte(case, dtype, tmp_path):
    make, config = CASES[case]
    base = make(tmp_path / "base", dtype) if dtype != "bf16" else make(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", config)
    judge = open_source(str(merge_by_peft(base, adapter, tmp_path / "merged")))
    expected = {ref.name: bytes(judge.read(ref)) for ref in judge.checkpoint.tensors}
    before = open_source(str(base))
    own = {ref.name: bytes(before.read(ref)) for ref in before.checkpoint.tensors}
    changed = {name for name, data in expected.items() if data != own[name]}
    found = merged_bytes(base, adapter)
    assert changed == found.keys()
    assert {name for name in changed if found[name] != expected[name]} == set()


def test_a_scale_multiplies_the_adapters_own(plain, tmp_path):
    judge = open_source(
        str(merge_by_peft(plain / "base", plain / "adapter", tmp_path / "merged", scale=0.37))
    )
    found = merged_bytes(plain / "base", plain / "adapter", 0.37)
    refs = {ref.name: ref for ref in judge.checkpoint.tensors}
    assert len(found) == 4
    assert all(bytes(judge.read(refs[name])) == data for name, data in found.items())


def refusal(plain: Path, adapter: Path, *words: object) -> dict[str, str]:
    """The error of quantize, which wrote nothing."""
    out = adapter.parent / "out"
    command = ("quantize", plain / "base", "--format", "nvfp4", "--lora", adapter, "-o", out)
    outcome = run(*command, *words, "--json")
    assert (outcome.code, out.exists()) == (2, False)
    return outcome.json["error"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": "VERA"}, "peft_type is 'VERA'"),
        ({"use_dora": True}, "use_dora is set (DoRA"),
        ({"use_qalora": True}, "use_qalora is set (QALoRA"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices is set"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is set"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"something_new": {"a": 1}}, "something_new is set (which fp4convert does not know)"),
    ],
)
def test_other_kinds_are_refused_by_name(plain, copied, changed, words):
    error = refusal(plain, change_config(copied, **changed))
    assert error["code"] == "adapter-kind"
    assert words in error["message"]


def replace_tensors(adapter: Path, change) -> Path:
    """The adapter, with its tensors changed."""
    tensors = load_file(adapter / WEIGHTS)
    change(tensors)
    save_file(tensors, adapter / WEIGHTS)
    return adapter


MODEL = "base_model.model"
BEYOND, LAYER = f"{MODEL}.model.layers.7.mlp.up_proj", f"{MODEL}.model.layers.0.mlp.down_proj"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
UNFIT = {  # shapes of tensors that are added or replaced, and the code, by words of the message
    "lora_magnitude_vector": ({f"{LAYER}.lora_magnitude_vector": (4,)}, "adapter-kind"),
    "a convolution": ({A: (4, 8, 3, 3), B: (8, 4, 1, 1)}, "adapter-kind"),
    "its rank is 4": ({A: (3, 256)}, "adapter-tensors"),
    "is for a tensor of [128, 250], and the model has [128, 256]": (
        {A: (4, 250)},
        "adapter-mismatch",
    ),
    "model.layers.7.mlp.up_proj changes what the model does not have": (
        {f"{BEYOND}.lora_A.weight": (4, 128), f"{BEYOND}.lora_B.weight": (256, 4)},
        "adapter-mismatch",
    ),
    "score.weight changes what the model does not have": (
        {f"{MODEL}.score.weight": (2, 128)},
        "adapter-mismatch",
    ),
}


@pytest.mark.parametrize("words", UNFIT)
def test_tensors_that_do_not_fit_are_refused(plain, copied, words):
    shapes, code = UNFIT[words]
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    error = refusal(plain, replace_tensors(copied, lambda tensors: tensors.update(ones)))
    assert (error["code"], words in error["message"]) == (code, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(B), "expected two factors, lora_A and lora_B"),
        (lambda tensors: tensors[A].fill(np.nan), "NaN or Inf"),
        (lambda tensors: tensors.clear(), "holds no tensors"),
    ],
)
def test_damaged_tensors_are_refused(plain, copied, change, words):
    error = refusal(plain, replace_tensors(copied, change))
    assert (error["code"], words in error["message"]) == ("adapter-tensors", True)


def test_files_of_another_kind_are_refused(plain, copied):
    (copied / WEIGHTS).rename(copied / "adapter_model.bin")
    assert refusal(plain, copied)["code"] == "pickle"
    (copied / "adapter_model.bin").unlink()
    assert refusal(plain, copied)["code"] == "adapter-files"
    assert refusal(plain, plain / "base")["code"] == "adapter-kind"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--lora", "another"), "adapter-several"),
        (("--lora-scale", "0"), "adapter-scale"),
        (("--lora-scale", "nan"), "adapter-scale"),
        (("--method", "awq", "--calibration", "x"), "adapter-option"),
        (("--via", "fp8"), "adapter-option"),
    ],
)
def test_options_that_contradict_an_adapter_are_refused(plain, copied, words, code):
    assert refusal(plain, copied, *words)["code"] == code


def test_a_scale_without_an_adapter_is_refused(plain, tmp_path):
    command = ("quantize", plain / "base", "--format", "nvfp4", "--lora-scale", "2")
    assert run(*command, "-o", tmp_path / "out", "--json").json["error"]["code"] == "usage"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"target_modules": ["lm_head"]}, "the embedding, which it was not made to change"),
        ({"target_modules": ["embed_tokens"]}, "output layer, which it was not made to change"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
            "lm_head is one matrix with the embedding, and the adapter has one for each",
        ),
    ],
)
def test_a_matrix_at_both_ends_of_the_model_is_refused(config, why, tmp_path):
    base = make_llama(tmp_path / "base", is_tied=True)
    adapter = write_adapter(base, tmp_path / "adapter", {"r": 4, **config})
    error = refusal(tmp_path, adapter)
    assert error["code"] == "adapter-tied"
    assert why in error["message"]


def test_names_with_another_beginning_are_found(plain, copied):
    def change(tensors):
        for name in list(tensors):
            bare = name.removeprefix("base_model.model.")
            tensors[f"base_model.model.language_{bare}"] = tensors.pop(name)

    renamed = replace_tensors(copied, change)
    assert merged_bytes(plain / "base", renamed) == merged_bytes(plain / "base", plain / "adapter")
