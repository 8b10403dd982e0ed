"""The lists of models that engines have classes for are what their packages say."""

import importlib.util
import sys
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "tests" / "engines" / "judges"))
from model_lists import LISTS, PACKAGES, text_of, version_in, written

pytestmark = pytest.mark.engine
JUDGED = sorted((ROOT / ".venv-engines").glob("*-*"))  # the wheels of make engines


def roots(package: str) -> list[Path]:
    """Folders with a package: this environment's, then that of make engines; none is imported."""
    found = importlib.util.find_spec(package)
    here = [Path(found.origin).parent.parent] if found and found.origin else []
    return [root for root in (*here, *JUDGED) if version_in(root, package)]


@pytest.mark.parametrize("engine", PACKAGES)
def test_a_list_is_what_the_package_says(engine: str) -> None:
    package = PACKAGES[engine].folder
    said = [
        root for root in roots(package) if version_in(root, package) in written(engine)["source"]
    ]
    if not said:
        pytest.skip(f"needs `make engines`: {written(engine)['source']} is not here")
    assert (LISTS / f"{engine}.toml").read_text() == text_of(engine, said[0])


def test_transformers_own_tables_are_read_whole() -> None:
    """By its own import, where the script reads the text."""
    modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    tables = (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    expected = {name for table in tables for name in table}
    assert set(written("transformers")["names"]) == expected


def test_mlx_lm_has_what_the_list_names_and_nothing_beside() -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    for name in ("llama", "qwen3_moe", "mistral", "kimi_k2", "gpt_oss"):
        assert name in written("mlx")["names"]
        utils._get_classes({"model_type": name})
    for name in ("bert", "t5", "whisper"):
        assert name not in written("mlx")["names"]
        with pytest.raises(ValueError, match="not supported"):
            utils._get_classes({"model_type": name})
