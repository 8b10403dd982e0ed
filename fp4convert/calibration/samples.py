"""Turn text, a data set or the model's own words into samples.

A causal model gets sequences of one length, packed from all text in order; other models get a line
or a record as a sample, cut to their limit.  A record with images or sound is one sample.  Nothing
is padded.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fp4convert.calibration.layers import MODEL_ERRORS, filled_on_demand, mapped
from fp4convert.calibration.model import Skeleton, import_transformers, reason_of
from fp4convert.calibration.multimodal import SPOKEN, Mixed, listens, open_processor, read_mixed
from fp4convert.calibration.observers import Watch, watching
from fp4convert.calibration.records import read_records, read_texts
from fp4convert.errors import InputError
from fp4convert.storage.disk import hash_file

SEQUENCE_LENGTH, OWN_LENGTH = 2048, 512  # of text; of what a model writes token by token
BATCH_TOKENS = 2048  # at once, of samples of one length
SEED = 0
SHORTEST = 2  # tokens that make a sample


@dataclass(frozen=True, slots=True)
class Sample:
    """One text, with other inputs of the model.

    ids     (length,) tokens
    inputs  other inputs by name, from the model's processor: a batch of one
    """

    ids: NDArray[np.int64]
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return how many tokens it has."""
        return len(self.ids)


Samples = list[Sample]


class Feed(NamedTuple):
    """The origin of samples: one of text, dataset and self_generate.

    self_generate    number of sequences that the model writes
    samples          at most so many
    sequence_length  in tokens; None for the model's limit, up to `usual`, or OWN_LENGTH for
                     sequences that the model writes
    """

    text: tuple[Path, ...] = ()
    dataset: Path | None = None
    self_generate: int | None = None
    samples: int = 128
    sequence_length: int | None = None
    usual: int = SEQUENCE_LENGTH

    def check(self) -> None:
        """Raise InputError unless one of them is given, and can be."""
        given = (bool(self.text), self.dataset is not None, self.self_generate is not None)
        if given.count(True) != 1:
            detail = "text comes from --text FILE, --chat FILE, --dataset FILE or --self-generate N"
            next_step = "With no data at hand: --self-generate 32."
            raise InputError("no-text", f"{detail}; expected one of them", next_step)
        for option, value, least in (
            ("--self-generate", self.self_generate, 1),
            ("--samples", self.samples, 1),
            ("--sequence-length", self.sequence_length, SHORTEST),
        ):
            if value is not None and value < least:
                detail = f"{option} {value}: expected at least {least}"
                raise InputError("bad-number", detail, f"Give {option} {least}, or more.")
        for path in (*self.text, *([self.dataset] if self.dataset else [])):
            if not path.is_file():
                found, next_step = "no such file", "Look for a typing error."
                if path.is_dir():
                    found, next_step = "is a folder", "Name the files in it, each by its option."
                elif path.exists():  # as <(cat t.txt) of a shell
                    found = "is a pipe or a device, and text is read more than once"
                    next_step = "Write the text into a file, and give that."
                detail = f"{path}: {found}; expected a regular file of text"
                raise InputError("no-text", detail, next_step)
        deque(read_texts(self.text, is_by_line=True), 0)  # before a model is read

    def words(self) -> str:
        """Tell how the text came, in the same words for the same content.

        They stand in the file's notes, and tell one feed from another.
        """
        if self.self_generate is not None:
            return f"{self.self_generate} sequences written by the model, seed {SEED}"
        kind, files = ("text", self.text) if self.text else ("dataset", (self.dataset,))
        return f"{kind}: " + ", ".join(
            f"{path.name} (sha256 {hash_file(path)[:16]})" for path in files if path
        )


class Batch(NamedTuple):
    """Samples of one length.

    first   the number of the first
    ids     (samples, length) tokens
    inputs  others by name, of one sample
    """

    first: int
    ids: NDArray[np.int64]
    inputs: Mapping[str, torch.Tensor]


def batches_of(samples: Samples) -> list[Batch]:
    """Group consecutive samples of one length.

    A batch has up to BATCH_TOKENS tokens; one with other inputs is a batch of its own.
    """
    batches: list[list[int]] = []
    for number, sample in enumerate(samples):
        last = batches[-1] if batches else []
        is_alike = last and len(samples[last[0]]) == len(sample)
        is_alike = is_alike and not (sample.inputs or samples[last[0]].inputs)
        if is_alike and (len(last) + 1) * len(sample) <= BATCH_TOKENS:
            last.append(number)
        else:
            batches.append([number])
    return [
        Batch(
            numbers[0],
            np.stack([samples[number].ids for number in numbers]),
            samples[numbers[0]].inputs,
        )
        for numbers in batches
    ]


def inputs_of(skeleton: Skeleton, batch: Batch) -> dict[str, torch.Tensor]:
    """Make the arguments of the model for a batch.

    A decoder beside an encoder of text reads the same text, one token later.
    """
    ids = torch.from_numpy(batch.ids).to(skeleton.device)
    model = skeleton.model
    given = {
        name: each.to(skeleton.device, model.dtype if each.is_floating_point() else each.dtype)
        for name, each in batch.inputs.items()
    }
    if model.main_input_name not in given:
        given["input_ids"] = ids
    config = model.config
    if not config.is_encoder_decoder:
        return given
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    starts = (*(getattr(config, name, None) for name in names), 0)
    start = next(token for token in starts if isinstance(token, int))
    first = torch.full((len(ids), 1), start, device=ids.device)
    return {**given, "decoder_input_ids": torch.cat([first, ids[:, :-1]], 1)}


def sequence_length(
    skeleton: Skeleton, wanted: int | None, usual: int, tokenizer: Any = None
) -> int:
    """Choose how many tokens a text has at most.

    Raises InputError where more are wanted than the model has positions for
    """
    limit = _position_limit(skeleton, tokenizer) or usual
    if wanted is not None and wanted > limit:
        detail = f"--sequence-length {wanted} is more than the model takes"
        raise InputError("bad-number", f"{detail}; expected at most {limit}", "Leave it out.")
    return wanted or min(limit, usual)


def _position_limit(skeleton: Skeleton, tokenizer: Any) -> int | None:
    """Return the limit of tokens of the model, or None if unknown."""
    config = skeleton.model.config.get_text_config()
    names = ("max_position_embeddings", "max_target_positions")
    limits = [getattr(config, name, None) for name in names]
    limits.append(getattr(tokenizer, "model_max_length", None))
    return min((int(limit) for limit in limits if limit), default=None)


def read_samples(feed: Feed, skeleton: Skeleton, folder: Path) -> Samples:
    """Read samples of texts or records, in an order by their contents alone.

    folder  with the files of tokenizer and processor, and nameless files of images
    Raises  InputError without a tokenizer or text, and for damaged files
    """
    tokenizer = _open_tokenizer(folder)
    length = sequence_length(skeleton, feed.sequence_length, feed.usual, tokenizer)
    is_packed = skeleton.model.can_generate()
    tokens: list[NDArray[np.int64]] = []
    mixed: list[Mixed] = []
    texts = read_texts(feed.text, is_by_line=not is_packed)
    records = read_records(feed.dataset, tokenizer) if feed.dataset else ()
    for found in itertools.chain(texts, records):
        if isinstance(found, Mixed):
            mixed.append(found)
            continue
        text, options = found
        if listens(skeleton.model):
            detail = f"{type(skeleton.model).__name__} reads sound, and this is text"
            raise InputError("calibration-model", f"{detail}; expected sound", SPOKEN)
        ids = np.asarray(tokenizer(text, **options)["input_ids"], np.int64)
        if len(ids):
            tokens.append(ids)
    if is_packed and tokens:
        whole = np.concatenate(tokens)
        count = max(1, len(whole) // length)
        tokens = [whole[number * length : (number + 1) * length] for number in range(count)]
    tokens = [ids[:length] for ids in tokens if len(ids) >= SHORTEST]
    chosen: list[NDArray[np.int64] | Mixed] = [*tokens, *mixed]
    if not chosen:
        detail = "the text has no sample of two tokens; expected prose or code"
        raise InputError("no-text", detail, "Add more.")
    if len(chosen) > feed.samples:  # evenly over all of them
        chosen = [chosen[number * len(chosen) // feed.samples] for number in range(feed.samples)]
    processor = open_processor(folder, skeleton.model) if mixed else None
    limit = _position_limit(skeleton, tokenizer)
    samples = [
        _read_sample(each, processor, skeleton, limit, folder)
        if isinstance(each, Mixed)
        else Sample(each)
        for each in chosen
    ]
    return sorted(samples, key=len)


def _read_sample(
    record: Mixed, processor: Any, skeleton: Skeleton, limit: int | None, folder: Path
) -> Sample:
    """Make a sample of a record with images or sound, which is never cut."""
    made = read_mixed(record, processor, skeleton.model)
    ids = made.pop("input_ids")[0].numpy().astype(np.int64)
    if not SHORTEST <= len(ids) <= (limit or len(ids)):
        detail = f"{record.where} has {len(ids):,} tokens; expected {SHORTEST} or more"
        detail += f", and at most the {limit:,} that the model takes" if limit else ""
        raise InputError("bad-dataset", detail, "Leave the record out.")
    return Sample(ids, {name: mapped(each, iter(()), folder) for name, each in made.items()})


def _open_tokenizer(folder: Path) -> Any:
    transformers = import_transformers()
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # of many kinds: tokenizers, sentencepiece, json
        why = "no tokenizer"
        if any(not path.name.endswith("config.json") for path in folder.iterdir()):
            why = f"no tokenizer that transformers can use: {reason_of(error)}"
        next_step = "Put the tokenizer's files next to the weights, or: --self-generate 32."
        raise InputError("no-tokenizer", f"the source has {why}", next_step) from None
    if not len(found):
        detail = "the source has no tokenizer: its vocabulary is empty"
        raise InputError("no-tokenizer", detail, "Or: --self-generate 32.")
    return found


def own_shape(feed: Feed, skeleton: Skeleton) -> tuple[int, int]:
    """Return how many sequences the model is to write, and their length.

    Raises InputError where it writes no text
    """
    if not skeleton.model.can_generate():
        detail = f"{type(skeleton.model).__name__} generates no text for --self-generate"
        raise InputError("no-text", detail, "Give --text FILE.")
    if skeleton.model.config.is_encoder_decoder:
        detail = f"{type(skeleton.model).__name__} answers a text, and writes none by itself"
        raise InputError("no-text", f"{detail} for --self-generate", "Give --text FILE.")
    length = sequence_length(skeleton, feed.sequence_length, OWN_LENGTH)
    return int(feed.self_generate or 1), length


def write_samples(
    feed: Feed, skeleton: Skeleton, held_nbytes: int, report: Callable[[str, int], None]
) -> Samples:
    """Let the model write sequences, from its first token on.

    They are drawn at temperature 1, and are the same every time.
    held_nbytes  where all weights take no more they are held; else each layer is read again for
                 every token
    report       called with every layer that is read, and 0, and with the tokens that were written,
                 of all sequences together
    """
    count, length = own_shape(feed, skeleton)
    config = skeleton.model.config.get_text_config()
    generator = torch.Generator().manual_seed(SEED)
    start = getattr(config, "bos_token_id", None)
    if isinstance(start, int):
        ids = torch.full((count, 1), start)
    else:
        ids = torch.randint(config.vocab_size, (count, 1), generator=generator)
    written = [ids]
    is_held = sum(map(skeleton.nbytes, skeleton.layers)) <= held_nbytes
    blind = Watch(skeleton, "none", {}, is_looking=False)
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    with (
        filled_on_demand(skeleton, is_headless=False),
        _layers_filled_on_demand(skeleton, is_held, report),
        watching(blind),
    ):
        for number in range(2, length + 1):
            given = written[-1].to(skeleton.device)
            try:
                made = skeleton.model(input_ids=given, past_key_values=cache, use_cache=True)
            except MODEL_ERRORS as error:
                detail = f"{type(skeleton.model).__name__} of transformers cannot write text"
                detail += f" token by token: {reason_of(error)}"
                raise InputError("calibration-model", detail, "Give --text FILE.") from None
            logits = made.logits[:, -1].float().cpu()
            if not torch.isfinite(logits).all():
                detail = "the model writes NaN or Inf instead of text"
                raise InputError("calibration-nan", detail, "Check the weights.")
            written.append(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator))
            report(f"token {number} of {length}", count)
    return [Sample(ids) for ids in torch.cat(written, 1).numpy()]


@contextmanager
def _layers_filled_on_demand(
    skeleton: Skeleton, is_held: bool, report: Callable[[str, int], None]
) -> Iterator[None]:
    """Fill every layer when it is used, and empty it after it.

    is_held  it is emptied in the end only
    """
    handles: list[Any] = []
    filled: set[str] = set()

    def fill(path: str) -> None:
        if path not in filled:
            report(path, 0)
            skeleton.fill(path)
            filled.add(path)

    def empty(path: str) -> None:
        filled.discard(path)
        skeleton.empty(path)

    try:
        for path in skeleton.layers:
            layer = skeleton.module(path)
            handles.append(layer.register_forward_pre_hook(lambda m, args, path=path: fill(path)))
            if not is_held:
                handles.append(
                    layer.register_forward_hook(lambda m, args, made, path=path: empty(path))
                )
        yield
    finally:
        for handle in handles:
            handle.remove()
        for path in sorted(filled):
            skeleton.empty(path)


def hash_samples(samples: Sequence[Sample]) -> str:
    """Return the sha256 of the tokens and other inputs of all samples."""
    digest = hashlib.sha256()
    for sample in samples:
        for name, each in {"ids": torch.from_numpy(sample.ids), **sample.inputs}.items():
            digest.update(f"{name} {each.dtype} {tuple(each.shape)}".encode())
            digest.update(each.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Save samples for a run that continues."""
    arrays = {f"{number:05}": sample.ids for number, sample in enumerate(samples)}
    for number, sample in enumerate(samples):
        arrays |= {f"{number:05}.{name}": each.numpy() for name, each in sample.inputs.items()}
    with path.open("wb") as out:
        np.savez(out, **arrays)  # type: ignore[arg-type]


def load_samples(path: Path) -> Samples:
    """Load what save_samples saved."""
    ids: dict[str, NDArray[np.int64]] = {}
    inputs: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    with np.load(path, allow_pickle=False) as kept:
        for key in kept.files:
            number, _, name = key.partition(".")
            if name:
                each = torch.from_numpy(kept[key])
                inputs[number][name] = mapped(each, iter(()), path.parent)
            else:
                ids[number] = kept[key]
    return [Sample(ids[number], inputs[number]) for number in sorted(ids)]
