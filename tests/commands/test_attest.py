"""Signatures of artifacts, judged by model-signing's own command line: it accepts what attest
wrote, and `verify` accepts what it wrote.
"""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import run, write_llama
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)
from model_signing import hashing, signing
from signing_keys import write_pair

RECORD, SIGNATURE = "quantization_config.json", "model.sig"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An artifact, and keys."""
    folder = tmp_path_factory.mktemp("signed")
    files = {"tokenizer.json": b"{}", "README.md": b"# A model\n"}
    source = write_llama(folder / "source", **files)
    assert run("quantize", source, "--format", "nvfp4", "-o", folder / "q", "-q").code == 0
    write_pair(folder, "mine")
    write_pair(folder, "other")
    return folder


@pytest.fixture
def artifact(made, tmp_path):
    return shutil.copytree(made / "q", tmp_path / "q")


def judge(artifact: Path, public: Path) -> tuple[int, str]:
    """What model-signing's own command line says."""
    words = [sys.executable, "-m", "model_signing", "verify", "key", artifact]
    words += ["--signature", artifact / SIGNATURE, "--public_key", public]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def signed(artifact: Path, made: Path, *options: object):
    outcome = run("attest", artifact, "--key", made / "mine.pem", "--json", *options)
    assert outcome.code == 0, outcome.err
    return outcome.json


def codes(outcome) -> set[tuple[str, str]]:
    return {(one["level"], one["code"]) for one in outcome.json["findings"]}


def statement_of(artifact: Path) -> dict:
    bundle = json.loads((artifact / SIGNATURE).read_text())
    return json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))


@pytest.mark.slow
def test_the_package_accepts_what_attest_wrote_and_refuses_every_changed_file(artifact, made):
    found = signed(artifact, made)
    told = statement_of(artifact)
    assert (told["_type"], told["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://model_signing/signature/v1.0",
    )
    files = {
        path.relative_to(artifact).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in artifact.rglob("*")
        if path.is_file() and path.name != SIGNATURE and ".fp4convert" not in path.parts
    }
    listed = {one["name"]: one["digest"] for one in told["predicate"]["resources"]}
    assert listed == files
    assert {"README.md", RECORD, "quantization_report.json"} <= files.keys()
    assert found["files"] == len(files)
    public = (made / "mine.pub").read_bytes()
    assert found["public_key"] == hashlib.sha256(public).hexdigest()
    assert judge(artifact, made / "mine.pub")[0] == 0
    assert judge(artifact, made / "other.pub")[0] == 1
    # A copy without our hidden state, as the Hub has it, is as good.
    shutil.rmtree(artifact / ".fp4convert")
    assert judge(artifact, made / "mine.pub")[0] == 0
    shard = next(artifact.glob("*.safetensors"))
    for file in (shard, artifact / "tokenizer.json", artifact / "README.md"):
        before = file.read_bytes()
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        code, words = judge(artifact, made / "mine.pub")
        assert code == 1
        assert file.name in words
        outcome = run("verify", artifact, "--public-key", made / "mine.pub", "--json")
        assert outcome.code == 6
        named = [one["detail"] for one in outcome.json["findings"] if "signed" in one["detail"]]
        assert [file.name in words for words in named] == [True]
        assert outcome.json["checked"]["signature"] == "refused"
        file.write_bytes(before)


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1, ec.SECP521R1])
def test_verify_accepts_the_right_key_alone(curve, artifact, made, tmp_path):
    key, public = write_pair(tmp_path, "key", ec.generate_private_key(curve()))
    assert run("attest", artifact, "--key", key, "--json").code == 0
    outcome = run("verify", artifact, "--public-key", public, "--json")
    assert (outcome.code, outcome.json["checked"]["signature"]) == (0, "valid")
    assert "signature valid" in run("verify", artifact, "--public-key", public).out
    assert not {code for _, code in codes(outcome) if code.startswith("signature")}
    outcome = run("verify", artifact, "--public-key", made / "other.pub", "--json")
    assert (outcome.code, outcome.json["checked"]["signature"]) == (6, "refused")
    assert ("error", "signature-refused") in codes(outcome)


def test_what_is_signed_and_not_recorded_is_named(artifact, made):
    assert signed(artifact, made)["unrecorded"] == []
    (artifact / "later.txt").write_text("x")
    assert signed(artifact, made, "--force")["unrecorded"] == ["later.txt"]
    told = run("attest", artifact, "--key", made / "mine.pem", "--force").out
    assert "one more is signed and not recorded, the first later.txt" in told


def test_without_a_key_files_are_compared_and_the_signer_is_not(artifact, made):
    assert run("verify", artifact, "--json").json["checked"]["signature"] is None
    signed(artifact, made)
    outcome = run("verify", artifact, "--json")
    assert (outcome.code, outcome.json["checked"]["signature"]) == (0, "not checked")
    assert codes(outcome) == {("note", "signature-unchecked")}
    assert "signed, not checked: give --public-key" in run("verify", artifact).out
    card = artifact / "README.md"  # which the record leaves to people
    card.write_text("# Another\n")
    (artifact / "later.txt").write_text("x")
    outcome = run("verify", artifact, "--json")
    assert outcome.code == 6
    details = [
        one["detail"] for one in outcome.json["findings"] if one["code"] == "signature-differs"
    ]
    assert [words.partition(" ")[0] for words in details] == ["README.md", "later.txt"]


@pytest.mark.parametrize("how", ["default", "blake3", "shards"])
def test_verify_accepts_what_the_package_signed_in_its_own_ways(how, artifact, made):
    if how == "default":  # by its command line
        words = [sys.executable, "-m", "model_signing", "sign", "key", artifact]
        words += ["--signature", artifact / SIGNATURE, "--private_key", made / "mine.pem"]
        shutil.rmtree(artifact / ".fp4convert")  # else it would sign that, too
        subprocess.run(words, check=True, capture_output=True)
    else:
        config = hashing.Config().set_ignored_paths(paths=[SIGNATURE, ".fp4convert"])
        if how == "shards":
            config.use_shard_serialization(shard_size=1000)
        else:
            config.use_file_serialization(hashing_algorithm="blake3")
        signer = signing.Config().use_elliptic_key_signer(private_key=made / "mine.pem")
        signer.set_hashing_config(config).sign(artifact, artifact / SIGNATURE)
    assert run("verify", artifact, "--json").json["checked"]["signature"] == "not checked"
    for key, code, word in (("mine", 0, "valid"), ("other", 6, "refused")):
        outcome = run("verify", artifact, "--public-key", made / f"{key}.pub", "--json")
        assert (outcome.code, outcome.json["checked"]["signature"]) == (code, word)
    (artifact / "README.md").write_text("# Another\n")
    outcome = run("verify", artifact, "--public-key", made / "mine.pub", "--json")
    assert outcome.code == 6
    assert any("README.md" in one["detail"] for one in outcome.json["findings"])


def test_an_old_signature_does_not_spoil_the_document(artifact, made):
    """The package prints a warning where a bundle does not name its key."""
    signed(artifact, made)
    bundle = json.loads((artifact / SIGNATURE).read_text())
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    (artifact / SIGNATURE).write_text(json.dumps(bundle))
    assert "WARNING" in judge(artifact, made / "mine.pub")[1]
    outcome = run("verify", artifact, "--public-key", made / "mine.pub", "--json")
    assert (outcome.code, outcome.json["checked"]["signature"]) == (0, "valid")


def test_links_are_followed_as_the_hubs_cache_has_them(artifact, made, tmp_path):
    signed(artifact, made)
    root = tmp_path / "models--a--b"
    snapshot = root / "snapshots" / "c"
    snapshot.mkdir(parents=True)
    shutil.copytree(artifact, root / "blobs", ignore=shutil.ignore_patterns(".fp4convert"))
    for blob in (root / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(blob)
    outcome = run("verify", snapshot, "--public-key", made / "mine.pub", "--json")
    assert (outcome.code, outcome.json["checked"]["signature"]) == (0, "valid")


HOSTILE = {
    "empty": b"",
    "no object": b"[]",
    "no envelope": b"{}",
    "deep": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "no base64": b'{"dsseEnvelope": {"payload": "*"}}',
    "no text": b'{"dsseEnvelope": {"payload": 5}, "verificationMaterial": 7}',
    "a statement of another kind": b'{"dsseEnvelope": {"payload": "%s"}}'
    % base64.b64encode(b'{"predicateType": "https://slsa.dev/provenance/v1", "subject": []}'),
    "resources that are none": b'{"dsseEnvelope": {"payload": "%s"}}'
    % base64.b64encode(
        b'{"predicateType": "https://model_signing/signature/v1.0", "predicate": '
        b'{"serialization": {"method": "files", "hash_type": "sha256"}, "resources": [5]}}'
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_signature_that_is_none_is_a_finding(name, artifact, made):
    (artifact / SIGNATURE).write_bytes(HOSTILE[name])
    for options in ((), ("--public-key", made / "mine.pub")):
        outcome = run("verify", artifact, *options, "--json")
        assert outcome.code == 6
        assert codes(outcome) == {("error", "signature-refused")}


def test_a_signature_names_no_file_outside(artifact, made, tmp_path):
    signed(artifact, made)
    (tmp_path / "secret").write_text("x")
    told = statement_of(artifact)
    told["predicate"]["resources"][0]["name"] = "../secret"
    bundle = json.loads((artifact / SIGNATURE).read_text())
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(told).encode()).decode()
    (artifact / SIGNATURE).write_text(json.dumps(bundle))
    outcome = run("verify", artifact, "--json")
    assert outcome.code == 6
    assert any("../secret" in one["detail"] for one in outcome.json["findings"])
    outcome = run("verify", artifact, "--public-key", made / "mine.pub", "--json")
    assert ("error", "signature-refused") in codes(outcome)


def test_keys_of_other_kinds_are_refused(artifact, made, tmp_path):
    private = ec.generate_private_key(ec.SECP256R1())
    locked = private.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    (tmp_path / "locked.pem").write_bytes(locked)
    (tmp_path / "words.pem").write_text("a key")
    write_pair(tmp_path, "edwards", ed25519.Ed25519PrivateKey.generate())
    write_pair(tmp_path, "rsa", rsa.generate_private_key(65537, 2048))
    write_pair(tmp_path, "koblitz", ec.generate_private_key(ec.SECP256K1()))
    wrong = ["locked.pem", "words.pem", "edwards.pem", "rsa.pem", "koblitz.pem", "absent.pem"]
    for key in [tmp_path / name for name in wrong] + [made / "mine.pub", tmp_path]:
        outcome = run("attest", artifact, "--key", key, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "signature-key"), key
        message = outcome.json["error"]["message"]
        assert str(key) in message
        is_other = "it is of another kind; expected PEM of an elliptic curve" in message
        assert is_other or key.name not in ("edwards.pem", "rsa.pem")
    assert not (artifact / SIGNATURE).exists()
    signed(artifact, made)
    wrong = [tmp_path / name for name in ("edwards.pub", "rsa.pub", "words.pem", "absent.pub")]
    for key in [*wrong, made / "mine.pem"]:
        outcome = run("verify", artifact, "--public-key", key, "--json")
        assert (outcome.code, outcome.json["error"]["code"]) == (2, "signature-key"), key
    shutil.copy(made / "mine.pem", artifact / "key.pem")
    outcome = run("attest", artifact, "--key", artifact / "key.pem", "--force", "--json")
    assert outcome.json["error"]["code"] == "signature-key"


def test_only_a_whole_artifact_is_signed_and_once(artifact, made, tmp_path):
    key = ("--key", made / "mine.pem", "--json")

    def refused(folder: Path) -> tuple[int, str]:
        outcome = run("attest", folder, *key)
        return outcome.code, outcome.json["error"]["code"]

    first = signed(artifact, made)
    assert refused(artifact) == (5, "output-exists")
    before = (artifact / SIGNATURE).read_bytes()
    again = signed(artifact, made, "--force")
    assert (again["files"], again["signature"]) == (first["files"], first["signature"])
    assert (artifact / SIGNATURE).read_bytes() != before  # ECDSA draws a number each time
    assert judge(artifact, made / "mine.pub")[0] == 0
    (artifact / SIGNATURE).unlink()
    assert refused(next(artifact.glob("*.safetensors"))) == (2, "not-signable")
    assert refused(tmp_path / "absent") == (2, "not-signable")
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty") == (2, "no-weights")
    record = (artifact / RECORD).read_bytes()
    (artifact / RECORD).unlink()
    assert refused(artifact) == (2, "unsound-artifact")  # it is not finished
    (artifact / RECORD).write_bytes(record)
    (artifact / "link").symlink_to("config.json")
    assert refused(artifact)[0] == 2
    (artifact / "link").unlink()
    tokenizer = artifact / "tokenizer.json"
    tokenizer.write_text("[]")
    assert refused(artifact) == (2, "not-signable")
    assert not list(artifact.glob("*.sig*"))
    outcome = run("verify", artifact, "--public-key", made / "mine.pub", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-signature")


def test_a_signature_stays_behind_where_other_files_are_made(artifact, made, tmp_path):
    signed(artifact, made)
    words = ("transcode", artifact, "--dialect", "modelopt", "-o", tmp_path / "t", "-q")
    assert run(*words).code == 0
    assert run("dequantize", artifact, "-o", tmp_path / "d", "-q").code == 0
    assert run("quantize", tmp_path / "d", "--format", "mxfp4", "-o", tmp_path / "m").code == 0
    for folder in ("t", "d", "m"):
        assert (tmp_path / folder / "tokenizer.json").exists()
        assert not (tmp_path / folder / SIGNATURE).exists()
    outcome = run("inspect", artifact, "--json")
    assert (outcome.code, outcome.json["findings"]) == (0, [])


def test_it_goes_with_the_plan_that_it_signs(made, tmp_path):
    """The same plan again leaves it; another one, with --force, takes it away and says so."""
    out = tmp_path / "q"
    words = ("quantize", made / "source", "-o", out)
    assert run(*words, "--format", "nvfp4", "-q").code == 0
    signed(out, made)
    assert run(*words, "--format", "nvfp4", "--force").code == 0
    assert judge(out, made / "mine.pub")[0] == 0
    assert run(*words, "--format", "mxfp4", "--json").code == 5
    assert judge(out, made / "mine.pub")[0] == 0
    outcome = run(*words, "--format", "mxfp4", "--force")
    assert outcome.code == 0
    assert "model.sig goes" in " ".join(outcome.err.split())
    assert not (out / SIGNATURE).exists()


def test_without_the_package_the_command_says_what_to_install(artifact, made, monkeypatch):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    outcome = run("attest", artifact, "--key", made / "mine.pem", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-model-signing")
    assert "[sign]" in outcome.json["error"]["next"]
    (artifact / SIGNATURE).write_text("{}")
    outcome = run("verify", artifact, "--public-key", made / "mine.pub", "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (2, "no-model-signing")
