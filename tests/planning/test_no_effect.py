"""A request that would change nothing is refused, before anything is written."""

import pytest
from checkpoints import LAYER, run, weight, write_checkpoint, write_llama, write_single
from gguf_donors import model, write_donor


def refuse(source, tmp_path, *options, fmt="nvfp4"):
    """The error of a quantize that writes nothing, as its dry run has it, too."""
    out = tmp_path / "out"
    asked = ("quantize", source, "--format", fmt, "-o", out, "--json", *options)
    outcome, planned = run(*asked), run(*asked, "--dry-run")
    assert (outcome.code, planned.code) == (2, 2)
    assert outcome.json == planned.json
    assert not out.exists()
    return outcome.json["error"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("o_proj", "--exclude '*.o_proj' (1 module)"),
        ("q_prj", "--exclude '*.q_proj' (1 module)"),
        ("mlp", "--exclude '*.mlp.*' (3 modules)"),
        (".*mlp.*", "--exclude 're:.*mlp.*' (3 modules)"),
        ("lm_head,o_proj", "--exclude lm_head --exclude '*.o_proj' (2 modules)"),
        (f"{LAYER}.mlp.up_proj.weight", f"--exclude {LAYER}.mlp.up_proj (1 module)"),
    ],
)
def test_a_pattern_without_a_match_is_answered_with_one_that_has_some(given, meant, tmp_path):
    error = refuse(write_llama(tmp_path / "m"), tmp_path, "--exclude", given)
    assert error["code"] == "unmatched-pattern"
    assert error["message"].startswith(f"--exclude {given!r} matches no module")
    assert error["message"].endswith(f"did you mean {meant}?")
    assert error["next"] == f"Use {meant.rpartition(' (')[0]}"


@pytest.mark.parametrize(
    ("option", "given"), [("--exclude", "y"), ("--exclude", "model.layers"), ("--include", "norm")]
)
def test_no_pattern_is_named_that_would_be_refused_in_turn(option, given, tmp_path):
    """'*y*' excludes all that is made, and '*.norm' includes nothing that can be."""
    error = refuse(write_llama(tmp_path / "m"), tmp_path, option, given)
    assert error["code"] == "unmatched-pattern"
    assert "did you mean" not in error["message"]


def test_every_pattern_without_a_match_is_named(tmp_path):
    source = write_llama(tmp_path / "m")
    options = ("--exclude", "zzzzzz", "--include", "re:zzz", "--exclude", "*o_proj")
    first, second = refuse(source, tmp_path, *options)["message"].splitlines()
    assert first.startswith("--include 're:zzz' matches no module")
    assert second.startswith("--exclude 'zzzzzz' matches no module")


@pytest.mark.parametrize("row", ["keep", "format"])
def test_a_row_of_ones_own_recipe_has_to_match(row, tmp_path):
    source, recipe = write_llama(tmp_path / "m"), tmp_path / "own.toml"
    word = {"keep": 'reason = "R"', "format": 'format = "keep"'}[row]
    recipe.write_text(f'[[{row}]]\nmodules = ["o_proj"]\n{word}\n')
    error = refuse(source, tmp_path, "--recipe", recipe)
    assert error["code"] == "unmatched-pattern"
    assert f"own.toml: [[{row}]] 'o_proj' matches no module" in error["message"]
    assert "'*.o_proj' (1 module)" in error["message"]
    recipe.write_text(f'[[{row}]]\nmodules = ["o_proj", "*.o_proj"]\n{word}\n')
    assert run("quantize", source, "--format", "nvfp4", "--recipe", recipe, "--dry-run").code == 0


def test_a_row_of_ones_own_recipe_may_be_absent(tmp_path):
    source, recipe = write_llama(tmp_path / "m"), tmp_path / "own.toml"
    recipe.write_text('[[keep]]\nmodules = ["zzz"]\nreason = "R"\nmay_be_absent = true\n')
    assert run("quantize", source, "--format", "nvfp4", "--recipe", recipe, "--dry-run").code == 0


def test_a_model_of_which_nothing_is_quantized_is_refused_with_counted_reasons(tmp_path):
    tensors = {f"h.{layer}.mlp.c_fc.weight": weight() for layer in range(2)}
    tensors |= {"wte.weight": weight(), "h.0.norm.weight": ("BF16", (64,), b"\0" * 128)}
    source = write_checkpoint(
        tmp_path / "gpt2", {"model.safetensors": tensors}, {"model_type": "gpt2"}
    )
    error = refuse(source, tmp_path)
    assert error["code"] == "no-linears"
    assert error["message"].startswith(
        "gpt2: nothing becomes nvfp4: a Conv1D, whose weight is stored (in, out) (2); "
    )
    assert "1-dimensional" not in error["message"]


def test_an_option_for_what_the_source_lacks(tmp_path):
    """Those that have it are in test_decisions.py and test_expert_stacks.py."""
    source = write_llama(tmp_path / "m")
    for words in (("--keep-packed",), ("--stack-order", "out_in", "--stack-rows", "concatenated")):
        error = refuse(source, tmp_path, *words)
        assert (error["code"], error["next"]) == ("idle-option", "Leave the option out.")
        assert error["message"].startswith(f"{words[0]} is for ")
        assert error["message"].endswith("; the source has none")
    gguf = write_donor(tmp_path / "m.gguf", model())
    assert refuse(gguf, tmp_path, "--keep-packed", "--dialect", "gguf", fmt="mxfp4")["code"] == (
        "idle-option"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--include", "odd"], "1 module, all of which stay; odd: 24 columns, not a multiple of"),
        (["--include", "model.norm"], "model.norm: no matrix of BF16, F16, F32"),
        (["--include", "*.q_proj", "--exclude", "*.q_proj"], ".q_proj: excluded by '*.q_proj'"),
    ],
)
def test_an_include_that_quantizes_nothing(words, message, tmp_path):
    """One that has some effect, or names what is quantized anyway, is none."""
    tensors = {f"{LAYER}.self_attn.q_proj.weight": weight(), "odd.weight": weight(0, 2, 24)}
    tensors["model.norm.weight"] = ("BF16", (64,), b"\0" * 128)
    source = write_single(tmp_path / "m", tensors)
    error = refuse(source, tmp_path, *words)
    assert error["code"] == "idle-option"
    assert error["message"].startswith(f"--include {words[1]!r} quantizes nothing: ")
    assert message in error["message"]
    assert run("analyze", source, *words, "--json").json["error"]["code"] == "idle-option"
    fine = ("--include", "*.q_proj", "--include", "re:odd|.*q_proj", "--dry-run")
    assert run("quantize", source, "--format", "nvfp4", *fine).code == 0


def test_the_next_step_of_an_empty_plan_is_that_of_its_reason(tmp_path):
    source = write_single(tmp_path / "m", {f"{LAYER}.self_attn.o_proj.weight": weight()})
    assert refuse(source, tmp_path, "--exclude", "*")["next"].startswith("Exclude fewer")
    packed = write_donor(tmp_path / "q.gguf", model(), kind="Q8_1")
    error = refuse(packed, tmp_path, "--dialect", "gguf", fmt="mxfp4")
    assert (error["code"], "original weights" in error["next"]) == ("no-linears", True)


def test_matrices_of_float64_are_to_be_saved_as_float32(tmp_path):
    """They are the original weights: there are no others to start from."""
    name = f"{LAYER}.self_attn.o_proj.weight"
    source = write_single(tmp_path / "m", {name: ("F64", (32, 64), bytes(32 * 64 * 8))})
    errors = [refuse(source, tmp_path), refuse(source, tmp_path, "--target-bits", 5)]
    errors.append(run("analyze", source, "--json").json["error"])
    assert {error["code"] for error in errors} == {"no-linears"}
    assert all("save it as float32 first" in error["next"] for error in errors)


def test_analyze_refuses_such_a_pattern_too(tmp_path):
    outcome = run("analyze", write_llama(tmp_path / "m"), "--exclude", "o_proj", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "unmatched-pattern")


@pytest.mark.parametrize("table", ["[[keep]]\nreason = 'x'", "[[format]]\nformat = 'mxfp8'"])
@pytest.mark.parametrize("layers", ["{0:num_layerz}", "{1:0}"])
def test_a_range_without_layers_is_refused(layers, table, tmp_path):
    """A key that config.json lacks, and a range that ends before it begins."""
    recipe = tmp_path / "own.toml"
    recipe.write_text(f'about = "x"\n{table}\nmodules = ["model.layers.{layers}.*"]\n')
    source = write_llama(tmp_path / "m")
    words = ("--format", "nvfp4", "--recipe", recipe, "-o", tmp_path / "out", "--json")
    error = run("quantize", source, *words).json["error"]
    assert (error["code"], layers in error["message"]) == ("unmatched-pattern", True)
