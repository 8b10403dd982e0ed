"""Turn text, a data set or the model's own words into tokens.

A causal model gets sequences of one length, packed from everything one after the other; others get a line or a record each, cut
to what they can take.  Nothing is ever padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.layers import filled_on_demand
from fp4convert.calibration.model import Skeleton, import_transformers, reason_of
from fp4convert.calibration.observers import Watch, watching
from fp4convert.errors import InputError
from fp4convert.storage.disk import hash_file

SEQUENCE_LENGTH, OWN_LENGTH = 2048, 512  # of text; of what a model writes token by token
BATCH_TOKENS = 2048  # at once, of samples of one length
SEED = 0
SHORTEST = 2  # tokens that make a sample

Samples = list[NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Feed:
    """What a person feeds: one of text, dataset and self_generate.

    self_generate    how many sequences the model is to write
    samples          at most so many
    sequence_length  tokens of each; None for as many as the model takes, up to SEQUENCE_LENGTH, or OWN_LENGTH of its own
    """

    text: tuple[Path, ...] = ()
    dataset: Path | None = None
    self_generate: int | None = None
    samples: int = 128
    sequence_length: int | None = None

    def check(self) -> None:
        """InputError unless exactly one of them is given, and the numbers can be."""
        if (bool(self.text), self.dataset is not None, self.self_generate is not None).count(
            True
        ) != 1:
            detail = "calibrate is fed by one of --text FILE, --dataset FILE and --self-generate N; expected one of them"
            raise InputError("no-text", detail, "With no data at hand: --self-generate 32.")
        options = (("--self-generate", self.self_generate, 1), ("--samples", self.samples, 1))
        for option, value, least in (
            *options,
            ("--sequence-length", self.sequence_length, SHORTEST),
        ):
            if value is not None and value < least:
                detail = f"{option} {value}: expected at least {least}"
                raise InputError("bad-number", detail, f"Give {option} {least}, or more.")
        for path in (*self.text, *([self.dataset] if self.dataset else [])):
            if not path.is_file():
                found = "is no file" if path.exists() else "no such file"
                raise InputError(
                    "no-text",
                    f"{path}: {found}; expected text to calibrate with",
                    "Look for a typing error.",
                )

    def words(self) -> str:
        """How the text came, for the file's notes and for telling one feed from another: the same for the same content."""
        if self.self_generate is not None:
            return f"{self.self_generate} sequences written by the model, seed {SEED}"
        kind, files = ("text", self.text) if self.text else ("dataset", (self.dataset,))
        return f"{kind}: " + ", ".join(
            f"{path.name} (sha256 {hash_file(path)[:16]})" for path in files if path
        )


class Batch(NamedTuple):
    """Samples of one length: the number of the first, and (samples, length) tokens."""

    first: int
    ids: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return self.ids.size


def batches_of(samples: Samples) -> list[Batch]:
    """Samples that follow each other and are of one length, together up to BATCH_TOKENS tokens."""
    found: list[list[int]] = []
    for number, ids in enumerate(samples):
        last = found[-1] if found else []
        if (
            last
            and len(samples[last[0]]) == len(ids)
            and (len(last) + 1) * len(ids) <= BATCH_TOKENS
        ):
            last.append(number)
        else:
            found.append([number])
    return [
        Batch(numbers[0], np.stack([samples[number] for number in numbers])) for numbers in found
    ]


def longest(skeleton: Skeleton, wanted: int | None, usual: int, tokenizer: Any = None) -> int:
    """How many tokens a sample has at most; InputError where more are wanted than the model has positions for."""
    limits = [getattr(skeleton.model.config.get_text_config(), "max_position_embeddings", None)]
    limits.append(getattr(tokenizer, "model_max_length", None))
    limit = min((int(limit) for limit in limits if limit), default=usual)
    if wanted is not None and wanted > limit:
        detail = (
            f"--sequence-length {wanted} is more than the model takes; expected at most {limit}"
        )
        raise InputError("bad-number", detail, "Leave it out.")
    return wanted or min(limit, usual)


def read_samples(feed: Feed, skeleton: Skeleton, folder: Path) -> Samples:
    """The samples of texts or records, in an order that depends on them alone.

    folder  where the tokenizer's files are
    Raises  InputError where there is no tokenizer, no text, or a file that is not what it should be
    """
    tokenizer = _tokenizer(folder)
    length = longest(skeleton, feed.sequence_length, SEQUENCE_LENGTH, tokenizer)
    is_packed = skeleton.model.can_generate()
    texts = _texts(feed, tokenizer, is_by_line=not is_packed)
    tokens = [
        np.asarray(tokenizer(text, **options)["input_ids"], np.int64) for text, options in texts
    ]
    tokens = [ids for ids in tokens if len(ids)]
    if is_packed and tokens:
        whole = np.concatenate(tokens)
        count = max(1, len(whole) // length)
        tokens = [whole[number * length : (number + 1) * length] for number in range(count)]
    tokens = [ids[:length] for ids in tokens if len(ids) >= SHORTEST]
    if not tokens:
        raise InputError(
            "no-text",
            "the text to calibrate with makes no sample of two tokens; expected prose or code",
            "Add more.",
        )
    chosen = [tokens[number * len(tokens) // feed.samples] for number in range(feed.samples)]
    return sorted(tokens if len(tokens) <= feed.samples else chosen, key=len)


def _tokenizer(folder: Path) -> Any:
    transformers = import_transformers()
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # of many kinds: tokenizers, sentencepiece, json
        is_there = any(not path.name.endswith("config.json") for path in folder.iterdir())
        why = (
            f"no tokenizer that transformers can use: {reason_of(error)}"
            if is_there
            else "no tokenizer"
        )
        next_step = "Put the tokenizer's files beside the weights, or: --self-generate 32."
        raise InputError("no-tokenizer", f"the source has {why}", next_step) from None
    if not len(found):
        raise InputError(
            "no-tokenizer",
            "the source has no tokenizer: its vocabulary is empty",
            "Or: --self-generate 32.",
        )
    return found


def _texts(feed: Feed, tokenizer: Any, is_by_line: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """Texts, and how each is to be tokenized."""
    for path in feed.text:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                "bad-text", f"{path} cannot be read as UTF-8 text: {error}", "Give plain text."
            ) from None
        for part in text.splitlines() if is_by_line else [text]:
            if part.strip():
                yield part, {}
    if feed.dataset is None:
        return
    for number, record in enumerate(_records(feed.dataset), 1):
        where = f"{feed.dataset}: record {number}"
        if isinstance(record.get("text"), str):
            yield _sayable(record["text"], where), {}
        elif isinstance(record.get("messages"), list):
            yield (
                _sayable(_chat(tokenizer, record["messages"], where), where),
                {"add_special_tokens": False},
            )
        else:
            detail = f"{where} has neither a 'text' that is a string nor a list of 'messages', but {sorted(map(str, record))[:5]}"
            raise InputError("bad-dataset", detail, "Give every record one of them.")


def _sayable(text: str, where: str) -> str:
    """The text itself; InputError for half a surrogate pair, which JSON can hold and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = (
            f"{where} holds half a surrogate pair at character {error.start}; expected Unicode text"
        )
        raise InputError("bad-dataset", detail, "Leave the record out.") from None
    return text


def _chat(tokenizer: Any, messages: object, where: str) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates raise what they like
        detail = f"{where} cannot be written by the tokenizer's chat template: {reason_of(error)}"
        raise InputError("bad-dataset", detail, "Give records with 'text'.") from None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a jsonl or parquet file."""
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    with path.open(encoding="utf-8") as stream:
        try:
            for number, line in enumerate(stream, 1):
                try:
                    record = json.loads(line) if line.strip() else None
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from None
                if record is not None and not isinstance(record, dict):
                    raise ValueError(f"line {number} is no object")
                if record is not None:
                    yield record
        except (ValueError, RecursionError) as error:
            detail = f"{path} is not jsonl, one JSON object on each line: {error}"
            raise InputError("bad-dataset", detail, "Give jsonl or parquet.") from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        detail = f"{path}: reading parquet needs the package pyarrow; it is not installed"
        raise InputError(
            "no-pyarrow", detail, "Install it: pip install pyarrow. Or give jsonl."
        ) from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise InputError(
            "bad-dataset", f"{path} is no parquet file: {error}", "Give jsonl or parquet."
        ) from None


def own_shape(feed: Feed, skeleton: Skeleton) -> tuple[int, int]:
    """How many sequences the model is to write, and how long they are; InputError where it writes no text."""
    if not skeleton.model.can_generate():
        detail = f"{type(skeleton.model).__name__} writes no text, so it cannot be fed with its own"
        raise InputError("no-text", detail, "Give --text FILE.")
    return int(feed.self_generate or 1), longest(skeleton, feed.sequence_length, OWN_LENGTH)


def write_samples(
    feed: Feed, skeleton: Skeleton, held_nbytes: int, report: Callable[[str, int], None]
) -> Samples:
    """Sequences that the model writes itself from its first token on, at temperature 1: the same ones every time.

    held_nbytes  where all weights take no more they are held; else each layer is read again for every token
    report       called with every layer that is read, and 0, and with the tokens that were written, of all sequences together
    """
    count, length = own_shape(feed, skeleton)
    config = skeleton.model.config.get_text_config()
    generator = torch.Generator().manual_seed(SEED)
    start = getattr(config, "bos_token_id", None)
    ids = (
        torch.full((count, 1), start)
        if isinstance(start, int)
        else torch.randint(config.vocab_size, (count, 1), generator=generator)
    )
    written = [ids]
    is_held = sum(map(skeleton.nbytes, skeleton.layers)) <= held_nbytes
    blind = Watch(skeleton, "none", {}, is_looking=False)
    from transformers import DynamicCache

    cache = DynamicCache()
    with (
        filled_on_demand(skeleton, is_headless=False),
        _layers_on_demand(skeleton, is_held, report),
        watching(blind),
    ):
        for number in range(2, length + 1):
            given = written[-1].to(skeleton.device)
            logits = (
                skeleton.model(input_ids=given, past_key_values=cache, use_cache=True)
                .logits[:, -1]
                .float()
                .cpu()
            )
            if not torch.isfinite(logits).all():
                raise InputError(
                    "calibration-nan",
                    "the model writes NaN or Inf instead of text",
                    "Check the weights.",
                )
            written.append(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))
            report(f"token {number} of {length}", count)
    return list(torch.cat(written, 1).numpy())


class _layers_on_demand:  # noqa: N801 - a context manager, used as a function
    """Meanwhile every layer is filled when it is used, and emptied after it or, where they are held, in the end."""

    def __init__(
        self, skeleton: Skeleton, is_held: bool, report: Callable[[str, int], None]
    ) -> None:
        self._skeleton, self._is_held, self._report = skeleton, is_held, report
        self._handles: list[Any] = []
        self._filled: set[str] = set()

    def __enter__(self) -> None:
        for path in self._skeleton.layers:
            layer = self._skeleton.module(path)
            self._handles.append(
                layer.register_forward_pre_hook(lambda m, args, path=path: self._fill(path))
            )
            if not self._is_held:
                self._handles.append(
                    layer.register_forward_hook(lambda m, args, out, path=path: self._empty(path))
                )

    def _fill(self, path: str) -> None:
        if path not in self._filled:
            self._report(path, 0)
            self._skeleton.fill(path)
            self._filled.add(path)

    def _empty(self, path: str) -> None:
        self._filled.discard(path)
        self._skeleton.empty(path)

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        for path in sorted(self._filled):
            self._skeleton.empty(path)


def save_samples(path: Path, samples: Sequence[NDArray[np.int64]]) -> None:
    """Keep tokens for a run that continues."""
    lengths = np.array([len(ids) for ids in samples], np.int64)
    with path.open("wb") as out:
        np.savez(out, lengths=lengths, tokens=np.concatenate(list(samples)))


def load_samples(path: Path) -> Samples:
    """What save_samples kept."""
    with np.load(path, allow_pickle=False) as kept:
        return np.split(kept["tokens"], np.cumsum(kept["lengths"])[:-1])
