"""Of every family, what --for makes is loaded by that engine: `inspect --for` reads the result."""

import pytest
from checkpoints import done, run
from families import FAMILIES
from family import Family, build
from judged_families import JUDGED
from judged_families import source as judged_source

from fp4convert.engines.files import ENGINES

pytestmark = pytest.mark.engine
REFUSALS = {  # of an engine that has no place for the family, and of its dialect
    *("engine-refuses", "dialect-container", "dialect-format", "dialect-module"),
    *("no-linears", "unmatched-pattern"),
}
NOWHERE = {"axk2"}  # families that no engine loads in four bits; the gallery says why


@pytest.mark.sweep(36)
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_what_is_made_for_an_engine_is_loaded_by_it(family: Family, tmp_path) -> None:
    source = tmp_path / "source"
    if family.name in JUDGED:  # of sizes that engines take
        judged_source(family, source)
    else:
        build(family, source)
    loaded = []
    for engine in ENGINES:
        out = tmp_path / engine
        made = run("quantize", source, "--for", engine, "-o", out, "-q", "--json")
        if error := made.json.get("error"):
            assert (made.code, error["code"] in REFUSALS) == (2, True), (engine, error)
            assert not out.exists()
            continue
        found = done("inspect", out, "--for", engine, "--json")
        named = {each["engine"]: each["loads"] for each in found.json["engines"]}
        assert named[engine] is not False
        loaded.append(engine)
    is_transformer = "_class_name" in family.config  # of a pipeline of several files
    assert bool(loaded) == (not is_transformer and family.name not in NOWHERE), loaded
