"""The model card says what the artifact is, and nothing in a checkpoint can make it say anything
else.
"""

import json
import re
import subprocess

import pytest
from checkpoints import LLAMA, run, weight, write_checkpoint, write_llama, write_single
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from fp4convert.conversion.quantize import prepare_quantize, quantize
from fp4convert.conversion.request import take_apart
from fp4convert.execution.settings import Settings
from fp4convert.options.writing import QuantizeOptions
from fp4convert.report.evaluation_card import EVALUATION, EVALUATION_END
from fp4convert.report.model_card import CardRequest, code, describe_plan, make_card
from fp4convert.storage.open import open_source

REPO = "me/m-NVFP4"
HOSTILE = [
    "a`b",
    "``` ",
    "a|b",
    "<script>alert(1)</script>",
    "<!-- ",
    "[x](javascript:alert(1))",
    "![x](https://evil.example/x.png)",
    "https://evil.example",
    "www.evil.example",
    "# heading\n# another",
    "\x1b[31m",
    "\u202eevil",
    "**bold**",
    "\\`",
    "\\|",
    "&lt;b&gt;",
    " ",
    "",
    "\x85",
    "\ud800",
]


def card_of(folder, output, options=None, **more) -> tuple[str, object]:
    """The card of an artifact that is made now, and what making it told."""
    asked = QuantizeOptions("", **({"format": "nvfp4"} | (options or {})))
    source = open_source(str(folder))
    plan = prepare_quantize(take_apart(source, asked))
    result = quantize(source, plan, output, Settings("cpu"))
    subject = describe_plan(plan, result, source)
    request = CardRequest(REPO, asked.that_make_bytes(), **more)
    return make_card(subject, source, request), result


def render(card: str) -> str:
    return MarkdownIt("gfm-like", {"linkify": False}).render(ModelCard(card).text)


def test_front_matter_of_a_repository_on_the_hub(hub, tmp_path):
    own = (
        b"---\nlicense: other\nlicense_name: llama\nlicense_link: LICENSE\nlanguage: [en, "
        b"de]\nmetrics: [f1]\n---\n# Mine\n"
    )
    commit = hub.add("org/m", write_llama(tmp_path / "m", **{"README.md": own}))
    card, _ = card_of("org/m", tmp_path / "q")
    data = ModelCard(card).data
    assert (data.base_model, data.base_model_relation, data.library_name) == (
        "org/m",
        "quantized",
        "transformers",
    )
    assert (data.license, data.license_name, data.license_link, data.language) == (
        "other",
        "llama",
        "LICENSE",
        ["en", "de"],
    )
    assert data.tags == ["fp4convert", "nvfp4", "compressed-tensors"]
    assert "metrics" not in data.to_dict()
    assert f"`org/m` at commit `{commit}`" in card
    options = "--format nvfp4 --dialect compressed-tensors --activations 16 --method rtn"
    assert f"\nfp4convert quantize org/m {options} --revision {commit}\n" in card
    assert card.endswith("## The model card of the source\n\n# Mine\n")


def test_front_matter_of_a_folder_names_no_base_and_no_path(tmp_path):
    card, _ = card_of(write_llama(tmp_path / "m"), tmp_path / "q")
    assert "base_model" not in card
    assert str(tmp_path) not in card
    assert "fp4convert quantize ./m --format nvfp4" in card
    assert "The model card of the source" not in card


def made_from(folder, output) -> dict[str, tuple[bool, bool]]:
    """Whether what is made from an artifact has a card, and whether a warning tells of it."""
    commands = [
        ["dequantize"],
        ["transcode", "--dialect", "modelopt"],
        ["quantize", "--format", "nvfp4"],
    ]
    found = {}
    for words in commands:
        outcome = run(*words, folder, "-o", output / words[0], "--json")
        told = any("README.md is left out" in line for line in outcome.json["warnings"])
        found[words[0]] = ((output / words[0] / "README.md").exists(), told)
    return found


@pytest.mark.parametrize("kind", ["pushed", "edited", "evaluated"])
def test_a_card_of_ours_is_not_of_what_is_made_from_the_artifact(kind, tmp_path):
    card, _ = card_of(write_llama(tmp_path / "m"), tmp_path / "q")
    if kind == "edited":
        card = card.replace("# `m-NVFP4`", "# Mine").replace("\n", "\r\n") + "More.\r\n"
    elif kind == "evaluated":
        card = f"{EVALUATION}\n\n## Predictions\n\n{EVALUATION_END}\n"
    (tmp_path / "q" / "README.md").write_bytes(card.encode())
    found = made_from(tmp_path / "q", tmp_path / "out")
    assert found == dict.fromkeys(("dequantize", "transcode", "quantize"), (False, True))


@pytest.mark.parametrize(
    "card",
    [
        "---\ntags:\n- fp4convert\n---\n\n# Mine\n\nMy own words.\n",
        f"# Mine\n\n{EVALUATION}\n\n## Predictions\n\n{EVALUATION_END}\n",
    ],
)
def test_a_card_of_a_person_goes_along(card, tmp_path):
    card_of(write_llama(tmp_path / "m"), tmp_path / "q")
    (tmp_path / "q" / "README.md").write_text(card)
    found = made_from(tmp_path / "q", tmp_path / "out")
    assert found == dict.fromkeys(("dequantize", "transcode", "quantize"), (True, False))
    assert (tmp_path / "out" / "transcode" / "README.md").read_text() == card


def test_paths_of_files_that_were_given_stay_private(tmp_path):
    """Of another artifact that scales were copied from, the name of its folder is told."""
    source = write_llama(tmp_path / "m")
    assert (
        run(
            "quantize", source, "--format", "nvfp4", "--activations", 4, "-o", tmp_path / "donor"
        ).code
        == 0
    )
    more = {
        "format": "nvfp4",
        "activations": 4,
        "input_scale": str(tmp_path / "donor"),
        "kv_cache": "fp8",
    }
    card, _ = card_of(source, tmp_path / "q", more)
    assert str(tmp_path) not in card
    assert "--activations 4" in card
    assert "--input-scale ./donor" in card
    assert (
        "| cache of keys and values | FP8, with a scale for each attention's keys and values |"
        in card
    )


def test_what_it_says_of_the_artifact(tmp_path):
    card, result = card_of(write_llama(tmp_path / "m"), tmp_path / "q")
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", card, re.MULTILINE))
    assert rows["dialect"] == "compressed-tensors"
    assert (
        rows["format"]
        == "`nvfp4: E2M1 codes, 16 to a block, fp8_e4m3 block scales, a float32 global scale`"
    )
    assert (rows["scale rule"], rows["activations"], rows["digest"]) == (
        "mse",
        "16 bits",
        result.digest,
    )
    assert (
        rows["size"]
        == f"{result.source_bytes / 1e6:.2f} MB before, {result.output_bytes / 1e6:.2f} MB after"
    )
    assert "7 linear layers in NVFP4" in card
    assert (
        "- `model.layers.*.input_layernorm.weight`: 1 tensor, 1-dimensional, not a matrix" in card
    )
    assert "- `lm_head.weight`: 1 tensor, an output head" in card
    assert "## Errors" not in card


def test_layers_are_folded_and_many_patterns_are_counted(tmp_path):
    tensors = {f"layers.{n}.norm.bias": ("F32", (1,), b"\0" * 4) for n in range(12)}
    names = {
        f"{chr(97 + n // 26)}{chr(97 + n % 26)}.bias": ("F32", (1,), b"\0" * 4) for n in range(60)
    }
    card, _ = card_of(
        write_single(tmp_path / "m", {"o_proj.weight": weight(), **tensors, **names}),
        tmp_path / "q",
    )
    assert "- 21 patterns more, 72 tensors in all" in card
    assert "layers.3" not in card


def test_a_table_of_errors(tmp_path):
    rows = [("tensor", "SQNR dB"), ("a|b", 20.123456), ("c", None)]
    card, _ = card_of(write_llama(tmp_path / "m"), tmp_path / "q", errors=rows)
    assert (
        "## Errors\n\n| tensor | SQNR dB |\n|---|---|\n| `a\\x7cb` | 20.12 |\n| c | None |\n"
        in card
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_names_mean_nothing_but_themselves(name, tmp_path):
    """Rendered, a hostile name is the text of one code element: in a list and in a table."""
    for text, row in (
        (f"- {code(name)}: 1\n- after", "li"),
        (f"| a | b |\n|---|---|\n| {code(name)} | after |", "td"),
    ):
        html = MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(text)
        tags = re.findall(r"<(\w+)", html)
        assert tags.count("code") == 1
        assert tags.count(row) == 2
        assert set(tags) <= {"ul", "li", "code", "table", "thead", "tbody", "tr", "th", "td"}


def test_a_hostile_checkpoint(tmp_path):
    bad = "x`|<img src=x onerror=alert(1)>\n\n# owned\n\n[a](javascript:b).o_proj"
    tensors = {
        f"{bad}.weight": weight(),
        "a.o_proj.weight": weight(1),
        f"{bad}.bias": ("F32", (1,), b"\0" * 4),
    }
    excluded = {"exclude": (f"{bad[:3]}*", "www.evil.example")}
    card, _ = card_of(write_single(tmp_path / "m", tensors), tmp_path / "q", excluded)
    html = render(card)
    assert "<img" not in html
    assert "owned</h1>" not in html
    assert "href" not in html
    assert set(re.findall(r"<h\d>(.*?)</h\d>", html)) >= {
        "What is not quantized",
        "How it was made",
    }
    assert html.count("<h1>") == 1


@pytest.mark.parametrize(
    "readme",
    [
        b"---\nlicense: [\n---\nbody",
        b"---\n- a\n---\nbody",
        b"---\nlicense: {a: b}\nlanguage: [1]\npipeline_tag: 3\n---\nbody",
        b"---\n2024-13-99: x\nlicense: 2024-13-99\n---\nbody",
        b"---\n" + b"[" * 3000 + b"\n---\nbody",
        b"---\nmodel-index: 3\nlicense_name: |\n  a\n  b\n---\nbody",
        b"\xff\xfe---\nbody",
        b"",
    ],
)
@pytest.mark.sweep(3)
def test_a_damaged_card_of_the_source_is_left_out(readme, tmp_path, caplog):
    card, _ = card_of(write_llama(tmp_path / "m", **{"README.md": readme}), tmp_path / "q")
    known = set(ModelCard(card).data.to_dict())
    assert known == {"library_name", "tags"}
    assert not [record for record in caplog.records if record.name.startswith("huggingface_hub")]


@pytest.mark.parametrize(
    "word", ["a b", "it's", "$(rm -rf ~)", "`x`", "a\nb", "\x1b'\\", "\x85", "re:.*\\.k_proj"]
)
def test_the_command_can_be_pasted(word, tmp_path):
    card, _ = card_of(write_llama(tmp_path / "m"), tmp_path / "q", {"exclude": (word,)})
    command = re.search(
        r"^(`{3,})sh\n(fp4convert quantize .*?)\n\1", card, re.MULTILINE | re.DOTALL
    )[2]
    assert "\n" not in command
    printed = subprocess.run(
        ["bash", "-c", command.replace("fp4convert", r"printf '%s\0'", 1)],
        capture_output=True,
        check=True,
        env={"LC_ALL": "C.UTF-8"},
    )
    words = printed.stdout.decode().split("\0")
    assert words[words.index("--exclude") + 1] == word


def engines(card: str) -> set[str]:
    return set(re.findall(r"^## With (.*)$", card, re.MULTILINE))


@pytest.mark.parametrize(
    ("format", "dialect", "known", "library"),
    [
        ("nvfp4", "compressed-tensors", {"transformers", "vLLM", "SGLang"}, "transformers"),
        ("mxfp4", "compressed-tensors", {"transformers", "vLLM"}, "transformers"),
        ("nvfp4", "modelopt", {"vLLM", "SGLang"}, None),
        ("mxfp4", "quark", {"transformers", "vLLM"}, "transformers"),
        ("nvfp4", "quark", set(), None),
        ("mxfp4", "mlx", {"mlx-lm"}, "mlx"),
        ("nvfp4", "plain", set(), None),
    ],
)
def test_engines_are_named_where_the_readme_names_them(format, dialect, known, library, tmp_path):
    card, _ = card_of(
        write_llama(tmp_path / "m"), tmp_path / "q", {"format": format, "dialect": dialect}
    )
    assert engines(card) == known
    table = card.partition("## What loads it\n\n")[2].partition("\n\n")[0].splitlines()
    assert {row.split(" | ")[0].strip("| `") for row in table[2:]} == known
    assert ModelCard(card).data.get("library_name") == library
    assert ("AutoModelForCausalLM" in card) == ("transformers" in known)


def test_transformers_is_not_named_where_it_would_compute_garbage(tmp_path):
    tensors = {
        f"model.layers.0.mlp.experts.0.{name}_proj.weight": weight(n)
        for n, name in enumerate(("gate", "up"))
    }
    folder = write_checkpoint(tmp_path / "m", {"model.safetensors": tensors}, LLAMA)
    card = card_of(folder, tmp_path / "q")[0]
    assert engines(card) == {"vLLM", "SGLang"}
    assert "## Known not to load it\n\n- transformers 5.23 ignores the global scales" in card
    card = card_of(folder, tmp_path / "r", {"format": "mxfp4"})[0]
    assert engines(card) == {"transformers", "vLLM"}
    assert "Known not to load it\n\n- SGLang 0.5.23 does not read the codes" in card


def test_no_library_is_named_for_what_is_no_model_of_it(tmp_path):
    folder = write_single(tmp_path / "m", {"a.o_proj.weight": weight()}, {"model_type": "x"})
    card, _ = card_of(folder, tmp_path / "q")
    assert "library_name" not in ModelCard(card).data.to_dict()
    assert json.dumps(REPO) not in card
