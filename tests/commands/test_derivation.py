"""The statement of what an artifact was made from: its form judged by in-toto's own package, its
signature by model-signing, and its truth by `reproduce` and by a script that needs neither.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from checkpoints import FIRST, run, write_llama
from google.protobuf.json_format import ParseDict
from hub_cases import damage
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from paths import ROOT
from signing_keys import write_pair

import fp4convert

RECORD, STATED, SIGNATURE = "quantization_config.json", "derivation.json", "model.sig"


@pytest.fixture
def made(hub, tmp_path):
    """An artifact of a repository, stated and signed; the repository's files; keys."""
    source = write_llama(tmp_path / "m", **{"tokenizer.json": b"{}"})
    hub.add("org/m", source)
    (source / "notes.txt").unlink(missing_ok=True)
    assert run("quantize", "org/m", "--format", "nvfp4", "-o", tmp_path / "q", "-q").code == 0
    write_pair(tmp_path, "mine")
    write_pair(tmp_path, "other")
    state(tmp_path, "org/m")
    return tmp_path


def state(made, *source, artifact="q"):
    words = ("--key", made / "mine.pem", "--force", "--json")
    more = ("--source", *source) if source else ()
    outcome = run("attest", made / artifact, *words, *more)
    assert (outcome.code, outcome.json["derivation"]) == (0, True), outcome


def check(made, *words, key="mine"):
    """What the script says, in a Python without site-packages of its own but cryptography's."""
    script = ROOT / "deploy" / "check_derivation.py"
    command = [sys.executable, script, made / "q", "--public-key", made / f"{key}.pub", *words]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_the_statement_is_of_in_totos_form_and_names_all_that_was_read(hub, made):
    document = json.loads((made / "q" / STATED).read_text())
    Statement.copy_from_pb(ParseDict(document, statement_pb2.Statement())).validate()
    ParseDict(document["predicate"], Provenance())  # refuses unknown names
    there = {path.name: path.read_bytes() for path in (made / "q").iterdir() if path.is_file()}
    apart = {"README.md", "quantization_report.json", STATED, SIGNATURE}
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in there.items()}
    subject = {one["name"]: one["digest"]["sha256"] for one in document["subject"]}
    assert subject == {name: expected[name] for name in expected.keys() - apart}
    *read, tool = document["predicate"]["buildDefinition"]["resolvedDependencies"]
    commit = hub.repos["org/m"].branches["main"]
    for entry in read:
        data = (made / "m" / entry["name"]).read_bytes()
        assert entry["digest"] == {"sha256": hashlib.sha256(data).hexdigest()}
        assert entry["uri"] == f"hf://org/m@{commit}/{entry['name']}"
    assert {FIRST, "config.json", "tokenizer.json"} < {entry["name"] for entry in read}
    assert tool["uri"] == f"pkg:pypi/fp4convert@{fp4convert.__version__}"


def test_whoever_has_the_files_can_check_it(hub, made, tmp_path):
    wheel = tmp_path / "fp4convert.whl"
    package = Path(fp4convert.__file__).parent
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(package.parent))
        archive.writestr("fp4convert-0.dist-info/RECORD", "")
    commit = hub.repos["org/m"].branches["main"]
    words = ("--source", made / "m", "--commit", commit, "--package", wheel)
    code, out = check(made, *words)
    assert (code, out.strip()) == (0, "derived as stated, and signed by this key")
    assert "not checked: --package" in check(made)[1]
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("fp4convert/more.py", "")
    assert check(made, *words)[0] == 1
    judge = ("verify", "key", made / "q", "--signature", made / "q" / SIGNATURE)
    command = [sys.executable, "-m", "model_signing", *judge, "--public_key", made / "mine.pub"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert run("push", made / "q", "me/q").code == 0
    assert hub.read("me/q")[STATED] == (made / "q" / STATED).read_bytes()
    again = run("reproduce", "me/q", "--json")
    assert (again.code, again.json["derivation"]) == (0, []), again


LIES = {
    "a bit of the artifact": lambda q: damage(q / FIRST, 2000),
    "a bit of the statement": lambda q: damage(q / STATED, 500),
    "an added shard": lambda q: shutil.copyfile(q / FIRST, q / "model-more.safetensors"),
    "a linked folder": lambda q: (q / "more").symlink_to(q.parent / "m"),
    "a device for the statement": lambda q: (
        (q / STATED).unlink() or (q / STATED).symlink_to("/dev/null")
    ),
    "a deep signature": lambda q: (q / SIGNATURE).write_text("[" * 100_000),
    "a file less": lambda q: (q / "tokenizer.json").unlink(),
    "no statement": lambda q: (q / STATED).unlink(),
    "a cut signature": lambda q: (q / SIGNATURE).write_bytes((q / SIGNATURE).read_bytes()[:-9]),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_was_changed_after_the_signature_is_refused(lie, made):
    LIES[lie](made / "q")
    assert check(made)[0] == 1


def test_another_key_and_another_source_are_refused(hub, made):
    assert check(made, key="other")[0] == check(made, key="none")[0] == 1
    assert check(made, "--commit", "0" * 40)[0] == 1
    assert check(made, "--source", made / "m")[0] == 0
    damage(made / "m" / FIRST, 2000)
    assert check(made, "--source", made / "m")[0] == 1


def build(document):
    return document["predicate"]["buildDefinition"]


def set_option(options):
    options["scale_rule"] = "amax"


FALSE = {
    "kind of statement": lambda d: d.update(predicateType="x"),
    "kind of document": lambda d: d.update(_type="x"),
    "kind of build": lambda d: build(d).update(buildType="x"),
    "format": lambda d: build(d)["externalParameters"].update(format="mxfp4"),
    "options": lambda d: set_option(build(d)["externalParameters"]["options"]),
    "repository or commit": lambda d: build(d)["externalParameters"]["source"].update(
        revision="0" * 40
    ),
    "files of the source": lambda d: build(d)["resolvedDependencies"][0]["digest"].update(
        sha256="0" * 64
    ),
    "files of the artifact": lambda d: d["subject"].pop(),
    "version of fp4convert": lambda d: d["predicate"]["runDetails"]["builder"].update(id="x"),
}


def double(document):
    document.insert(0, document[0] | {"digest": {"sha256": "0" * 64}})


SLY = [
    lambda d: double(d["subject"]),
    lambda d: double(build(d)["resolvedDependencies"]),
    lambda d: build(d).update(resolvedDependencies=[]),
    lambda d: build(d)["resolvedDependencies"][0].update(uri="hf://evil/m@0/config.json"),
    lambda d: build(d)["externalParameters"]["source"].update(repo="evil/m"),
    lambda d: build(d)["resolvedDependencies"][0].update(name="\ud800"),
]


def test_a_script_without_our_reader_takes_no_sly_statement(made):
    path = made / "q" / STATED
    kept = path.read_text()
    for change in SLY:
        path.write_text(kept)
        edit(path, change)
        state(made)
        assert check(made, "--source", made / "m")[0] == 1, change
    path.write_text(kept.replace('"predicateType"', '"predicateType": "x", "predicateType"', 1))
    state(made)
    assert "twice" in check(made)[1]


@pytest.mark.parametrize("what", FALSE)
def test_a_false_statement_is_refused_though_it_is_signed(what, made):
    """By reproduce, which reads record and source; the script with the source's files."""
    edit(made / "q" / STATED, FALSE[what])
    state(made)
    refused = run("reproduce", made / "q", "--json")
    assert (refused.code, refused.json["derivation"], refused.json["differing"]) == (6, [what], [])
    assert check(made, "--source", made / "m")[0] == 1


def test_a_consistent_lie_is_found_by_making_the_artifact_again(made):
    """Record and statement agree on an option that was not used."""
    edit(made / "q" / RECORD, lambda record: set_option(record["options"]))
    state(made, "org/m")
    assert check(made)[0] == 0  # nobody who makes nothing again can see it
    refused = run("reproduce", made / "q", "--json")
    assert refused.code == 6
    assert refused.json["differing"]


def test_a_statement_stays_with_the_files_that_it_is_of(made):
    """What is made of the artifact has none, and what replaces it neither."""
    source = shutil.copytree(made / "q", made / "copy")
    assert run("transcode", source, "--dialect", "modelopt", "-o", made / "t", "-q").code == 0
    assert not (made / "t" / STATED).exists()
    words = ("--format", "mxfp4", "-o", made / "q", "--force", "-q")
    assert run("quantize", made / "m", *words).code == 0
    assert not (made / "q" / STATED).exists()


def test_a_failed_signature_leaves_the_earlier_statement_as_it_is(made):
    edit(made / "m" / "config.json", lambda config: config.update(more=1))
    words = ("attest", made / "q", "--source", made / "m", "--force", "--key")
    assert run(*words, made / "mine.pub").code == 2
    assert check(made)[0] == 0
    (made / "q" / STATED).unlink()
    assert run(*words, made / "mine.pub").code == 2
    assert not (made / "q" / STATED).exists()
