"""Check what an artifact was derived from, without fp4convert and without torch.

    python check_derivation.py ARTIFACT --public-key public.pem
        [--source FOLDER] [--commit SHA] [--package fp4convert.whl]

model.sig is a Sigstore bundle: a DSSE envelope (https://github.com/secure-systems-lab/dsse) around
an in-toto statement with the sha256 of every file, derivation.json among them. derivation.json is
an in-toto statement with the predicate https://slsa.dev/provenance/v1. Needs `cryptography`. Every
objection is a line, and the exit code 1. What no argument gives is not checked, and said so.
"""

import argparse
import base64
import hashlib
import json
import sys
import zipfile
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

CURVES = {256: hashes.SHA256, 384: hashes.SHA384, 521: hashes.SHA512}
APART = {"README.md", "quantization_report.json", "report.html", "derivation.json"}
RECORD = "quantization_config.json"
KIND = (
    "https://in-toto.io/Statement/v1",
    "https://slsa.dev/provenance/v1",
    "pkg:pypi/fp4convert#quantize",
)


def sha256_of(path):
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def no_doubles(pairs):
    """Return pairs as a dict; ValueError for a second one, which other readers may take."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"one of {sorted(key for key, _ in pairs)} is there twice")
    return dict(pairs)


def read_json(data):
    return json.loads(data, object_pairs_hook=no_doubles)


def read_envelope(folder, key):
    """Return the statement of model.sig; raise where another key signed it."""
    envelope = read_json((folder / "model.sig").read_bytes())["dsseEnvelope"]
    kind, payload = envelope["payloadType"], base64.b64decode(envelope["payload"])
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
    signature = base64.b64decode(envelope["signatures"][0]["sig"])
    key.verify(signature, signed, ec.ECDSA(CURVES[key.key_size]()))
    return read_json(payload)


def check_files(folder, statement):
    """Yield the files that differ from the signed ones; hidden ones are nobody's weights."""
    signed = digests(statement["predicate"]["resources"])
    every = (path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    there = {path.relative_to(folder) for path in every}
    names = {path.as_posix() for path in there if not any(p.startswith(".") for p in path.parts)}
    yield from (f"{name} is not signed" for name in sorted(names - {*signed, "model.sig"}))
    for name, digest in sorted(signed.items()):
        if not (folder / name).is_file() or sha256_of(folder / name) != digest:
            yield f"{name} is not the file that was signed"


def digests(entries):
    return no_doubles([(one["name"], one["digest"]) for one in entries])


def package_digest(wheel):
    """Return the dirHash of fp4convert/ in a wheel, as the specification of DigestSet says."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("fp4convert/")]
        names = sorted((name for name in names if name[-1] != "/"), key=str.encode)
        lines = [f"{hashlib.sha256(archive.read(name)).hexdigest()}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_derivation(folder, given):
    """Yield what of derivation.json is not so, of the record and of what is given."""
    statement = read_json((folder / "derivation.json").read_bytes())
    record = read_json((folder / RECORD).read_bytes())
    build = statement["predicate"]["buildDefinition"]
    kind = statement["_type"], statement["predicateType"], build["buildType"]
    if kind != KIND:
        yield "derivation.json: another kind of statement"
    stated = build["externalParameters"]
    files = {name: {"sha256": sha256} for name, sha256 in record["files"].items()}
    files = {name: digest for name, digest in files.items() if name not in APART}
    if digests(statement["subject"]) != files | {RECORD: {"sha256": sha256_of(folder / RECORD)}}:
        yield "derivation.json: its subjects are not the files of the record"
    for key in ("options", "format"):
        if json.dumps(stated[key]) != json.dumps(record.get(key)):  # 1 is not true
            yield f"derivation.json: its {key} are not those of the record"
    origin = {key: record["source"].get(key) for key in ("repo", "revision")}
    if stated["source"] != origin or given.commit not in (None, origin["revision"]):
        yield f"made from {stated['source']}: not the given commit, or not the record's"
    builder = statement["predicate"]["runDetails"]["builder"]["id"]
    if builder != f"pkg:pypi/fp4convert@{record['producer']['version']}":
        yield f"{builder} is not the version of the record"
    dependencies = digests(build["resolvedDependencies"])
    tool = dependencies.pop("fp4convert", {})
    begin = "hf://{repo}@{revision}/".format(**origin) if origin["repo"] else ""
    places = {one["name"]: one["uri"] for one in build["resolvedDependencies"]}
    if not dependencies or any(places[name] != begin + name for name in dependencies):
        yield "derivation.json: it names no file of the source, or one of another place"
    if given.package and package_digest(given.package) != tool.get("dirHash"):
        yield f"{given.package} is not the package that made it"
    for name, digest in dependencies.items() if given.source else ():
        path = Path(given.source, name)
        if not path.is_file() or sha256_of(path) != digest["sha256"]:
            yield f"{path} is not the file that it was made from"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--public-key", required=True, type=Path)
    for option in ("--source", "--commit", "--package"):
        parser.add_argument(option)
    given = parser.parse_args()
    try:
        key = serialization.load_pem_public_key(given.public_key.read_bytes())
        faults = [*check_files(given.artifact, read_envelope(given.artifact, key))]
        faults = faults or [*check_derivation(given.artifact, given)]  # reads only what is signed
    except Exception as error:  # whatever hostile files make of the packages below
        faults = [f"no signature by this key, or no statement: {type(error).__name__} {error}"]
    faults = ["".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in faults]
    skipped = [name for name in ("source", "commit", "package") if getattr(given, name) is None]
    print(*faults or ["derived as stated, and signed by this key"], sep="\n")
    print(*(f"not given, so not checked: --{name}" for name in skipped), sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
