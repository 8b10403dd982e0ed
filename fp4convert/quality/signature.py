"""Sign a folder by the package model-signing; check a signature.

model.sig is a Sigstore bundle: a DSSE envelope around an in-toto statement with the hash of every
file (predicate https://model_signing/signature/v1.0). The package signs, and checks a signature
with a public key. Without a key the statement is compared with the files here, which shows changed
files and proves nothing about the signer.
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fp4convert.checkpoint.artifact import Artifact
from fp4convert.errors import Finding, InputError, describe_missing, shell_line
from fp4convert.progress import Phases
from fp4convert.storage.checkpoint_files import CONFIG, INDEXES, PLAN_FILE, SIGNATURE
from fp4convert.storage.disk import temporary_folder
from fp4convert.storage.json_text import parse_json_object
from fp4convert.storage.sha256 import hash_each
from fp4convert.storage.source import Source, read_whole

STATEMENT = "https://model_signing/signature/v1.0"
EARLY_STATEMENT = "https://model_signing/Digests/v0.1"  # of model-signing 0.2
# What no loader reads: our state, and what the Hub's client keeps beside a download.
UNSIGNED = (SIGNATURE, PLAN_FILE.partition("/")[0], ".cache")
CURVES = "expected PEM of an elliptic curve: P-256, P-384 or P-521"
MISMATCH = "Signature mismatch: "  # how the package begins where the key is right, a file not


class Statement(NamedTuple):
    """The statement of a signature about the files of a model.

    files      digest by name
    algorithm  of all digests, "sha256" as a rule
    method     "files", or "shards" for parts of files, with two more words in their names
    ignored    files and folders without a digest
    hint       of the public key, in the package's words; None for another kind of signer
    shard_nbytes  of parts of files
    """

    files: Mapping[str, str]
    algorithm: str
    method: str
    ignored: tuple[str, ...]
    hint: str | None
    shard_nbytes: float | None


def sign_folder(folder: Path, key: Path) -> bytes:
    """Return the signature of all files of a folder.

    key     a private key; the package hashes the files, and signs
    Raises  InputError for a key that cannot sign, a folder that cannot be signed, and without the
            package
    """
    package = _import_package("attest needs the package model-signing")
    _refuse_pipe("--key", key)
    try:
        signer = package.signing.Config().use_elliptic_key_signer(private_key=key)
    except Exception as error:  # whatever the packages below it make of a file
        raise _bad_key("--key", key, error, f"{CURVES}, private and without a password") from None
    hashing = package.hashing.Config().set_ignored_paths(paths=UNSIGNED)
    with temporary_folder() as scratch:
        made = scratch / SIGNATURE
        try:
            signer.set_hashing_config(hashing).sign(folder, made)
        except (ValueError, OSError) as error:  # a link, a pipe; a file that cannot be read
            detail = f"{folder} cannot be signed: {error}"
            raise InputError("not-signable", detail) from None
        return made.read_bytes()


def open_verifier(source: Source, public_key: Path) -> Any:
    """Return a verifier of an artifact's signature with a key.

    Raises  InputError without a signature, for files that are not on this disk, for a key of
            another kind, and without the package
    """
    if not source.has_file(SIGNATURE):
        detail = f"--public-key is for a signature, and {source.name} has no {SIGNATURE}"
        raise InputError("no-signature", detail)
    if source.is_streamed:
        repo = source.checkpoint.repo or source.name
        detail = f"--public-key is for files on this disk, and {repo} is on the Hub"
        words = ("hf", "download", repo, "--local-dir", source.name)
        raise InputError("signature-hub", detail, f"Download it first: {shell_line(*words)}")
    package = _import_package("--public-key needs the package model-signing")
    _refuse_pipe("--public-key", public_key)
    try:
        return package.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:
        raise _bad_key("--public-key", public_key, error, f"{CURVES}, public") from None


def _import_package(needing: str) -> Any:
    try:
        import model_signing
        import model_signing.hashing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        missing = f"{needing} ({error.name})" if error.name != "model_signing" else needing
        raise InputError("no-model-signing", *describe_missing(missing, "sign")) from None
    return model_signing


def _refuse_pipe(option: str, key: Path) -> None:
    """Raise InputError for a pipe or device, which may never answer."""
    if key.exists() and not key.is_file():
        raise _bad_key(option, key, ValueError("it is no regular file"), CURVES)


def _bad_key(option: str, key: Path, error: Exception, expected: str) -> InputError:
    words = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
    if isinstance(error, AttributeError):  # how the package meets RSA and Ed25519
        words = "it is of another kind"
    detail = f"{option} {key} is no key for this: {str(words)[:200]}"
    return InputError("signature-key", f"{detail}; {expected}")


def read_statement(data: bytes) -> Statement:
    """Read the statement of a signature, without a check of it.

    Raises  InputError for another kind of file
    """
    bundle: Any = parse_json_object(data, SIGNATURE)
    try:
        payload = base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True)
        told: Any = parse_json_object(payload, f"{SIGNATURE}: statement")
        known = bundle.get("verificationMaterial", {}).get("publicKey", {}).get("hint")
        hint = known if isinstance(known, str) else None
        if told["predicateType"] == EARLY_STATEMENT:
            files = {str(one["name"]): str(one["digest"]["sha256"]) for one in told["subject"]}
            return Statement(files, "sha256", "files", (), hint, None)
        if told["predicateType"] != STATEMENT:
            raise ValueError(f"its statement is of the type {str(told['predicateType'])[:100]!r}")
        predicate = told["predicate"]
        how, resources = predicate["serialization"], predicate["resources"]
        return Statement(
            {str(one["name"]): str(one["digest"]) for one in resources},
            str(how["hash_type"]),
            str(how["method"]),
            tuple(map(str, how.get("ignore_paths", ()))),
            hint,
            how.get("shard_size"),
        )
    except (AttributeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        found = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, AttributeError | TypeError):  # Python's words for it help nobody
            found = "something in it is of another type than a statement has there"
        detail = f"{SIGNATURE} is no signature of a model: {found}"
        raise InputError("bad-signature", detail) from None


def check_signature(
    artifact: Artifact, verifier: Any, hashes: Mapping[str, str], phases: Phases
) -> tuple[str | None, list[Finding]]:
    """Check the signature of an artifact, if it has one.

    verifier  from open_verifier; None without a key
    hashes    sha256 of files that were read already
    Returns   "valid", "not checked", "refused", or None without a signature; and the findings
    """
    source = artifact.source
    if not source.has_file(SIGNATURE):
        return None, []
    try:
        statement = read_statement(read_whole(source, SIGNATURE))
    except InputError as error:
        return "refused", [Finding("error", "signature-refused", None, error.message)]
    differing = list(_find_differing(source, statement, hashes, phases))
    if verifier is None:
        compared = "its hashes were compared with the files, which does not tell who signed"
        if (statement.method, statement.algorithm) != ("files", "sha256"):
            compared = f"its hashes are {statement.algorithm} of {statement.method}: not compared"
        detail = f"signed, not checked: give --public-key FILE ({compared})"
        note = Finding("note", "signature-unchecked", None, detail)
        return "refused" if differing else "not checked", [*differing, note]
    words = _ask(verifier, source, statement)
    if words is None:  # the package has read every file, too
        return "valid", []
    if not (words.startswith(MISMATCH) and differing):
        detail = f"{SIGNATURE} is not by this key, or not of these files: {words[:300]}"
        differing.insert(0, Finding("error", "signature-refused", None, detail))
    return "refused", differing


def _find_differing(
    source: Source, statement: Statement, hashes: Mapping[str, str], phases: Phases
) -> Iterator[Finding]:
    """Find files that differ from a statement of sha256 digests."""
    if (statement.method, statement.algorithm) != ("files", "sha256"):
        return
    phases.begin("signature")
    unread = statement.files.keys() - hashes.keys()
    read = dict(hash_each(sorted(unread), source.open_file, InputError, phases.report))
    for file, digest in statement.files.items():
        if isinstance(found := read.get(file) or hashes[file], InputError):
            detail = f"{file} is signed, and cannot be read: {found.message}"
            yield Finding("error", "signature-differs", None, detail)
            continue
        if found != digest:
            detail = f"{file} is not the file that was signed: its sha256 differs"
            yield Finding("error", "signature-differs", None, detail)
    checkpoint = source.checkpoint
    there = [*(shard.file for shard in checkpoint.shards), *checkpoint.sidecars]
    there += [*checkpoint.left_out, *(name for name in (CONFIG, *INDEXES) if source.has_file(name))]
    for file in there:
        is_ignored = any(PurePosixPath(file).is_relative_to(one) for one in statement.ignored)
        if file not in statement.files and file != SIGNATURE and not is_ignored:
            detail = f"{file} is not signed: it was added later"
            yield Finding("error", "signature-differs", None, detail)


def _ask(verifier: Any, source: Source, statement: Statement) -> str | None:
    """Check a signature by the package; return its objection, or None.

    Files may be links, as in the Hub's cache: their bytes count.
    """
    hashing = _import_package("--public-key needs the package model-signing").hashing.Config()
    with source.open_file(SIGNATURE) as stream:
        place = Path(stream.name)
    try:
        if statement.method == "shards":
            algorithm = statement.algorithm.partition("-")[0]  # sha256-sharded-1000000000
            nbytes = int(statement.shard_nbytes or 0)  # JSON made it a float
            hashing.use_shard_serialization(hashing_algorithm=algorithm, shard_size=nbytes)
        else:
            hashing.use_file_serialization(hashing_algorithm=statement.algorithm)
        verifier.set_hashing_config(hashing.set_allow_symlinks(True))
        with redirect_stdout(sys.stderr):  # where it has something to say of an old signature
            verifier.verify(place.parent, place)
    except Exception as error:  # whatever the packages below it make of a hostile file
        return str(error) or f"{type(error).__name__}"
    return None
