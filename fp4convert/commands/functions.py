"""Call commands from Python: words by name, results as values.

Made by `make docs` of the options that options/ declares: change those, not this file.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fp4convert.commands.checks import by_name, checked
from fp4convert.options.access import ignore
from fp4convert.options.looking import (
    AnalyzeOptions,
    AttestOptions,
    InspectOptions,
    ReproduceOptions,
    VerifyOptions,
)
from fp4convert.options.measuring import CalibrateOptions, CompareOptions, EvaluateOptions
from fp4convert.options.rewriting import (
    DequantizeOptions,
    MergeOptions,
    PruneOptions,
    PushOptions,
    TranscodeOptions,
)
from fp4convert.options.writing import QuantizeOptions
from fp4convert.progress import Phases
from fp4convert.recipes.options import Globs, Reference

if TYPE_CHECKING:
    from fp4convert.calibration.result import Calibrated
    from fp4convert.execution.settings import Result
    from fp4convert.quality.evaluation import Evaluated
    from fp4convert.quality.verification import Verified


@by_name
def quantize(
    source: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    workers: int = 0,
    force: bool = False,
    phases: Phases | None = None,
    warn: Callable[[Iterable[str]], None] | None = None,
    join: bool = False,
    shard_index: int | None = None,
    num_shards: int | None = None,
    device: str = "auto",
    exclude: Globs = (),
    include: Globs = (),
    recipe: str | None = None,
    stack_order: str | None = None,
    stack_rows: str | None = None,
    format: str | None = None,
    engine: str | None = None,
    output: Reference | None = None,
    dialect: str | None = None,
    activations: int | None = None,
    kv_cache: str | None = None,
    target_size: float | None = None,
    target_bits: float | None = None,
    fit: float | str | None = None,
    context: int | None = None,
    gpu: str | None = None,
    keep_packed: bool = False,
    base: Reference | None = None,
    keep_dtype: str | None = None,
    draft: str | None = None,
    pad_for_tp: int | None = None,
    method: str | None = None,
    damping: float | None = None,
    passes: int | None = None,
    calibration: Reference | None = None,
    text: Reference | Iterable[Reference] | None = None,
    dataset: Reference | None = None,
    self_generate: int | None = None,
    lora: Reference | Iterable[Reference] | None = (),
    lora_scale: float | None = None,
    scale_rule: str | None = None,
    input_scale: str | float | None = None,
    global_scale: Reference | None = None,
    via: str | None = None,
    min_sqnr: float | None = None,
    max_nmse: float | None = None,
    ray: str | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
    no_keep: bool = False,
    disk: float | None = None,
    report: Reference | None = None,
    like: Reference | None = None,
) -> "Result":
    """Convert a checkpoint to NVFP4 or MXFP4: the command `quantize`.

    Returns  what was done, once the artifact is whole; keys of --json are its fields
    Raises   Fp4Error, of the class whose exit code the command would have.  After an InputError
             nothing is written, unless it is a NumericError, for NaN or Inf in weights: then all
             sound shards are finished

    source: A folder, one .safetensors or .gguf file, or ORG/NAME on the Hub.
    format: Format of the quantized weights. --for chooses it. One of: nvfp4, mxfp4, fp8, mxfp8.
    engine: Engine that is to load it. ENGINE:VERSION names a version, vllm,sglang several. One of:
        vllm, sglang, tensorrt-llm, transformers, llama.cpp, mlx, comfyui, diffusers.
    output: New folder. Default: ./NAME-FORMAT, and dialect, activations, method unless usual.
    dialect: Tensor names and config records that your engine reads. Default: compressed-tensors.
        One of: compressed-tensors, modelopt, quark, gpt-oss, deepseek, mlx, comfy, nunchaku, gguf,
        plain.
    activations: 4 lets engines quantize activations too, for the FP4 tensor cores; 8 is for fp8 and
        mxfp8. Default: 16, and for these 8 where the dialect can say it; in dialect nunchaku 4.
    kv_cache: Write scales and records for an FP8 or NVFP4 KV cache; NVFP4 needs --calibration. One
        of: fp8, nvfp4.
    target_size: Largest size of the result: modules get formats by measured loss.
    target_bits: The same as bits per weight, averaged over the quantized modules.
    fit: The card that is to serve it, or its memory: rtx5090, 24GB. The largest size of the result
        is what it leaves beside the cache of --context tokens and a tenth for the engine.
    context: With --fit: tokens of the cache. Default: up to 32768.
    gpu: Card that is to serve it, such as rtx5090: say which kernels run there, and refuse what
        runs in none.
    keep_packed: Do not expand kept FP8, int4 and FP4 modules to bf16.
    base: Take what stays from this FP8 or MXFP8 checkpoint of the same model, bit for bit.
    keep_dtype: Write kept fp32 matrices, and packed ones that become floats, as this; vectors and
        routers stay as they are. q8_0 is for --dialect gguf, and kept matrices of 16 bits become
        it, too. One of: bf16, fp16, q8_0.
    draft: Layers that draft tokens (MTP): the format of the body, or kept. Default: as engines want
        it of the model. One of: same, keep.
    pad_for_tp: Add zeros so that so many ranks of tensor parallelism get whole blocks.
    method: rtn (default) needs no data; all others need --calibration, gptq one with --gram. With
        --lora gptq is the default, and needs none. One of: rtn, gptq, awq.
    damping: With --method gptq: share of H's mean diagonal that is added to it. Default: 0.05.
    passes: With --method gptq: how often codes and block scales are gone over afterwards. Default:
        3.
    calibration: Statistics of this source: a file of fp4convert calibrate, or llama.cpp's imatrix.
    text: Calibrate with this plain text first, and round by gptq; may be given several times.
    dataset: As --text, with conversations ('messages') or 'text' of a jsonl or parquet file.
    self_generate: As --text, with so many sequences that the model writes.
    lora: Merge this LoRA adapter, a folder or ORG/NAME, and round so that it stays.
    lora_scale: With --lora: multiplies the adapter's own scale. Default: 1.
    scale_rule: nvfp4: mse (default), amax, four-over-six, importance; mxfp4: even (default), floor,
        ceil, mse, importance; fp8: amax (default), mse; mxfp8: mse (default), floor, even, ceil.
        With --calibration the default is importance, but for awq.
    input_scale: Activation scales for nvfp4 with --activations 4: one multiplier, an artifact or
        calibration file that has them, or p99.9: with --calibration, the largest input of 99.9 % of
        tokens (p90, p99, p99.99). Default: --calibration, else norms and weights.
    global_scale: Take nvfp4's global scales from an artifact or a file; measure none.
    via: Round weights to FP8 first; less accurate, for comparison only. One of: fp8.
    min_sqnr: Fail when the SQNR of a tensor is below this many dB.
    max_nmse: Fail when the normalized squared error of a tensor is above this.
    ray: Start one worker on every node of this Ray cluster.
    push_to_hub: Upload the result to this repository.
    private: With --push-to-hub: make the repository private.
    no_keep: With --push-to-hub: a shard leaves this disk as soon as it is uploaded.
    disk: With --no-keep: GB that the output folder has at most. Default: what is free.
    report: Write an HTML page that shows the quantization error of every layer.
    like: Take the options that are not given here from an earlier artifact, or from its
        quantization_config.json; statistics, adapters and scales of files are never taken.
    exclude: Keep these modules as they are. Glob, or re:REGEX.
    include: Quantize these modules too, although the recipe keeps them.
    recipe: A recipe that fp4convert recipes lists, or a TOML file of your own.
    stack_order: Layout of fused expert tensors: [experts, out, in] or [experts, in, out]. One of:
        out_in, in_out.
    stack_rows: Order of the gate and up rows in a fused expert tensor. One of: concatenated,
        interleaved.
    device: auto takes the CPU, and GPUs that pass a check where the plan says they win.
    join: Share the work with other processes that write to the same folder.
    shard_index: Convert this part only, from 0; when all are done: fp4convert merge.
    num_shards: Number of parts. Default of both: from Slurm, torchrun or SkyPilot.
    workers: Number of threads; 0 chooses by the device.
    force: Replace what an earlier run of fp4convert left in the output folder.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(QuantizeOptions(**locals()))
    from fp4convert.commands import convert

    return convert.quantize(options)


@by_name
def preview_quantize(
    source: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    workers: int = 0,
    force: bool = False,
    phases: Phases | None = None,
    warn: Callable[[Iterable[str]], None] | None = None,
    join: bool = False,
    shard_index: int | None = None,
    num_shards: int | None = None,
    device: str = "auto",
    exclude: Globs = (),
    include: Globs = (),
    recipe: str | None = None,
    stack_order: str | None = None,
    stack_rows: str | None = None,
    format: str | None = None,
    engine: str | None = None,
    output: Reference | None = None,
    dialect: str | None = None,
    activations: int | None = None,
    kv_cache: str | None = None,
    target_size: float | None = None,
    target_bits: float | None = None,
    fit: float | str | None = None,
    context: int | None = None,
    gpu: str | None = None,
    keep_packed: bool = False,
    base: Reference | None = None,
    keep_dtype: str | None = None,
    draft: str | None = None,
    pad_for_tp: int | None = None,
    method: str | None = None,
    damping: float | None = None,
    passes: int | None = None,
    calibration: Reference | None = None,
    text: Reference | Iterable[Reference] | None = None,
    dataset: Reference | None = None,
    self_generate: int | None = None,
    lora: Reference | Iterable[Reference] | None = (),
    lora_scale: float | None = None,
    scale_rule: str | None = None,
    input_scale: str | float | None = None,
    global_scale: Reference | None = None,
    via: str | None = None,
    min_sqnr: float | None = None,
    max_nmse: float | None = None,
    ray: str | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
    no_keep: bool = False,
    disk: float | None = None,
    report: Reference | None = None,
    like: Reference | None = None,
) -> dict[str, Any]:
    """Plan what `quantize` would do, from headers alone.

    As `quantize --dry-run --json` does.

    Writes nothing; raises as `quantize` does. Where the disk has too little room, the document
    has the error of that under "error".

    The options are those of `quantize`.
    """
    options = checked(QuantizeOptions(**locals()))
    from fp4convert.commands import convert

    return convert.preview_quantize(options)


@by_name
def dequantize(
    artifact: Reference,
    output: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    workers: int = 0,
    force: bool = False,
    phases: Phases | None = None,
    warn: Callable[[Iterable[str]], None] | None = None,
    device: str = "auto",
    dtype: str = "bf16",
) -> "Result":
    """Turn an artifact back into a checkpoint of ordinary weights.

    The command `dequantize`.

    The values are exactly those that engines compute; FP8 and int4 of other makers are read, too.
    Raises  Fp4Error, as `quantize` does; NumericError beyond the range of fp16

    artifact: A quantized checkpoint: a folder, one file, or ORG/NAME on the Hub.
    output: New folder.
    dtype: Data type of the restored weights. One of: bf16, fp16, fp32.
    device: auto takes the CPU, and GPUs that pass a check where the plan says they win.
    workers: Number of threads; 0 chooses by the device.
    force: Replace what an earlier run of fp4convert left in the output folder.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(DequantizeOptions(**locals()))
    from fp4convert.commands import convert

    return convert.dequantize(options)


@by_name
def transcode(
    artifact: Reference,
    output: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    workers: int = 0,
    force: bool = False,
    phases: Phases | None = None,
    warn: Callable[[Iterable[str]], None] | None = None,
    dialect: str,
    format: str | None = None,
    scale_layout: str | None = None,
    template: Reference | None = None,
    keep_dtype: str | None = None,
) -> "Result":
    """Spell an artifact in another dialect, never rounded again.

    The command `transcode`.

    Raises  Fp4Error, as `quantize` does; InputError for what the dialect cannot say

    artifact: A quantized checkpoint: a folder, one file, or ORG/NAME on the Hub.
    output: New folder.
    dialect: Tensor names and config records that your engine reads. One of: compressed-tensors,
        modelopt, quark, gpt-oss, deepseek, mlx, comfy, nunchaku, gguf, plain.
    format: nvfp4 converts an mxfp4 artifact. Default: its own format.
    scale_layout: Block scale layout of dialect plain. Default: linear. One of: linear, 128x4, 8x4,
        deepgemm, k_major, interleaved, appended.
    template: With --dialect gguf: a GGUF file of the model, for names and metadata.
    keep_dtype: Write kept fp32 matrices, and packed ones that become floats, as this; vectors and
        routers stay as they are. q8_0 is for --dialect gguf, and kept matrices of 16 bits become
        it, too. One of: bf16, fp16, q8_0.
    workers: Number of threads; 0 chooses by the device.
    force: Replace what an earlier run of fp4convert left in the output folder.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(TranscodeOptions(**locals()))
    from fp4convert.commands import convert

    return convert.transcode(options)


@by_name
def push(
    artifact: Reference,
    repo: str,
    *,
    private: bool = False,
    token: str | None = None,
    min_sqnr: float | None = None,
    max_nmse: float | None = None,
    evaluation: Reference | None = None,
    max_kl: float | str | None = None,
    min_top1: float | None = None,
    phases: Phases | None = None,
    tell: Callable[[str], None] = ignore,
) -> dict[str, Any]:
    """Upload a finished artifact: the command `push`.

    Every file is hashed and every scale read before anything is sent.
    Returns  what `push --json` prints
    Raises   InputError for what is no artifact of fp4convert on this disk, and for an evaluation
             of another one; GateError for a missed gate or a damaged file; errors of the Hub as
             `quantize --push-to-hub` has them

    artifact: The folder of an artifact that fp4convert made.
    repo: Repository that receives it: ORG/NAME.
    private: Make the repository private.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    min_sqnr: Fail when the SQNR of a tensor is below this many dB.
    max_nmse: Fail when the normalized squared error of a tensor is above this.
    evaluation: What evaluate --json printed of this artifact, for the card and the gates of KL.
        Default: ARTIFACT.evaluation.json, where it is there.
    max_kl: Fail when the mean KL divergence is above this many nats. usual and damage: above 1.3 or
        3 times what is usual for this format, method and size.
    min_top1: Fail when the likeliest token is the same less often; 0.95 is 95 %.
    """
    options = checked(PushOptions(**locals()))
    from fp4convert.commands import upload

    return upload.push(options)


@by_name
def inspect(
    artifact: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    engine: str | None = None,
    gpu: str | None = None,
    source: Reference | None = None,
    full: bool = False,
    sarif: Reference | None = None,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """Tell what an artifact is and whether it is healthy.

    The command `inspect`.

    Returns  what `inspect --json` prints; `healthy` is False where the command exits with 6
    Raises   Fp4Error: InputError where it is no artifact, SourceError and AccessError from the Hub

    artifact: A quantized checkpoint: a folder, one file, or ORG/NAME on the Hub.
    engine: Engine that is to load it. ENGINE:VERSION names a version, vllm,sglang several. One of:
        vllm, sglang, tensorrt-llm, transformers, llama.cpp, mlx, comfyui, diffusers.
    gpu: Card that is to serve it, such as rtx5090: say which kernels run there, and refuse what
        runs in none.
    source: The original checkpoint: compare values with it, too.
    full: Read every block scale, not a sample.
    sarif: Write the findings as SARIF 2.1.0, for code scanning.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(InspectOptions(**locals()))
    from fp4convert.commands import quality

    return quality.inspect(options)


@by_name
def verify(
    artifact: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    engine: str | None = None,
    source: Reference | None = None,
    lora: Reference | Iterable[Reference] | None = (),
    min_sqnr: float | None = None,
    max_nmse: float | None = None,
    calibration: Reference | None = None,
    max_output_error: float | None = None,
    public_key: Reference | None = None,
    report: Reference | None = None,
    sarif: Reference | None = None,
    phases: Phases | None = None,
) -> "Verified":
    """Hash every file again and read every scale; measure with a source.

    The command `verify`.

    Returns   tensors, summary and findings; `passed` is False where the command exits with 6
    Raises    Fp4Error, as `inspect` does; InputError for a gate without a source

    artifact: A quantized checkpoint: a folder, one file, or ORG/NAME on the Hub.
    engine: Engine that is to load it. ENGINE:VERSION names a version, vllm,sglang several. One of:
        vllm, sglang, tensorrt-llm, transformers, llama.cpp, mlx, comfyui, diffusers.
    source: The original checkpoint, to measure every tensor against.
    lora: The LoRA adapter that --source was merged with, as quantize --lora had it.
    min_sqnr: Fail when the SQNR of a tensor is below this many dB.
    max_nmse: Fail when the normalized squared error of a tensor is above this.
    calibration: Measure the output error of every linear layer, for the inputs recorded here.
    max_output_error: With --calibration: fail when the output error of a layer is above this; 0.1
        is 10 %.
    public_key: Whose signature the artifact must have: a public key in PEM.
    report: Write an HTML page that shows the quantization error of every layer.
    sarif: Write the findings as SARIF 2.1.0, for code scanning.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(VerifyOptions(**locals()))
    from fp4convert.commands import quality

    return quality.verify(options)


@by_name
def evaluate(
    artifact: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    text: Reference | Iterable[Reference] | None = None,
    dataset: Reference | None = None,
    self_generate: int | None = None,
    samples: int = 128,
    sequence_length: int | None = None,
    device: str = "auto",
    hold: float = 8.0,
    source: Reference,
    lora: Reference | Iterable[Reference] | None = (),
    by_layer: bool = False,
    max_kl: float | str | None = None,
    min_top1: float | None = None,
    max_ppl_ratio: float | None = None,
    baseline: Reference | None = None,
    card: Reference | None = None,
    report: Reference | None = None,
    sarif: Reference | None = None,
    phases: Phases | None = None,
) -> "Evaluated":
    """Measure how an artifact's predictions differ from its source's.

    A layer of each is in memory at a time.  One of text, dataset and self_generate is given: the
    command `evaluate`.
    Returns  the figures; `passed` is False where the command exits with 6
    Raises   Fp4Error: InputError for text or models that cannot be used or are not one model, or
             without the packages that run them

    artifact: A quantized checkpoint: a folder, one file, or ORG/NAME on the Hub.
    source: The original checkpoint, to compare with.
    lora: The LoRA adapter that --source was merged with, as quantize --lora had it.
    by_layer: Also what each layer costs: two more runs for every layer.
    max_kl: Fail when the mean KL divergence is above this many nats. usual and damage: above 1.3 or
        3 times what is usual for this format, method and size.
    min_top1: Fail when the likeliest token is the same less often; 0.95 is 95 %.
    max_ppl_ratio: Fail when perplexity over the source's is above this; 1.02 is 2 % more.
    baseline: Fail when KL is worse than in this record of evaluate --json. It is of the same text;
        worse is above 1.05 times, and by more than two standard errors.
    card: Write the figures into a model card; what else it says stays.
    report: Write an HTML page that shows the quantization error of every layer.
    sarif: Write the findings as SARIF 2.1.0, for code scanning.
    sequence_length: Tokens of a window; each is read by itself. Default: up to 512.
    text: A file of plain text; may be given several times.
    dataset: jsonl or parquet: conversations ('messages'), which the model's chat template writes,
        with images or sound its processor, or 'text'.
    self_generate: No data: let the model write this many sequences.
    samples: Largest number of samples, spread evenly over the data.
    device: auto takes a GPU, else the CPU.
    hold: With --self-generate: GB of weights held in memory.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(EvaluateOptions(**locals()))
    from fp4convert.commands import evaluation

    return evaluation.evaluate(options)


@by_name
def compare(
    artifacts: Iterable[Reference],
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    text: Reference | Iterable[Reference] | None = None,
    dataset: Reference | None = None,
    self_generate: int | None = None,
    samples: int = 128,
    sequence_length: int | None = None,
    device: str = "auto",
    hold: float = 8.0,
    source: Reference,
    lora: Reference | Iterable[Reference] | None = (),
    calibration: Reference | None = None,
    by_layer: bool = False,
    report: Reference | None = None,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """Rank artifacts and other tools' weights of one source.

    The command `compare`.

    They may be of any formats, dialects and makers; a revision is that of all.
    Returns  what `compare --json` prints
    Raises   Fp4Error, as `inspect` does; InputError for fewer than two, for an artifact that is
             not sound, or of another source; with a text what `evaluate` raises

    artifacts: Two or more of one model: artifacts in any format and dialect, GGUF files, GPTQ, AWQ,
        MLX's integers.
    source: The original checkpoint, to measure all against.
    lora: The LoRA adapter that --source was merged with, as quantize --lora had it.
    calibration: Measure output errors for the inputs that a calibration file recorded.
    by_layer: Also what each layer costs: two more runs for every layer.
    report: Write an HTML page of all artifacts, and its figures beside it as .csv and .json.
    sequence_length: Tokens of a window; each is read by itself. Default: up to 512.
    text: A file of plain text; may be given several times.
    dataset: jsonl or parquet: conversations ('messages'), which the model's chat template writes,
        with images or sound its processor, or 'text'.
    self_generate: No data: let the model write this many sequences.
    samples: Largest number of samples, spread evenly over the data.
    device: auto takes a GPU, else the CPU.
    hold: With --self-generate: GB of weights held in memory.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(CompareOptions(**locals()))
    from fp4convert.commands import quality

    return quality.compare(options)


@by_name
def calibrate(
    source: Reference,
    output: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    text: Reference | Iterable[Reference] | None = None,
    dataset: Reference | None = None,
    self_generate: int | None = None,
    samples: int = 128,
    sequence_length: int | None = None,
    device: str = "auto",
    hold: float = 8.0,
    gram: str | None = None,
    for_method: str | None = None,
    format: str | None = None,
    scale_rule: str | None = None,
    activations: int = 16,
    sensitivity: bool = False,
    lora: Reference | Iterable[Reference] | None = (),
    lora_scale: float | None = None,
    force: bool = False,
    phases: Phases | None = None,
) -> "Calibrated":
    """Run text through the model and keep the inputs of linear layers.

    A layer is in memory at a time.  One of text, dataset and self_generate is given: the command
    `calibrate`.
    goal     how quantize will round, where its options say that
    Returns  what was written; `warnings` says what a person should know of it
    Raises   Fp4Error: InputError for text or a model that cannot be used, or without the packages
             that run it, OutputError for a file that cannot be written

    source: A folder, one .safetensors or .gguf file, or ORG/NAME on the Hub.
    output: New safetensors file.
    gram: Input statistics: diag (default) for importance and awq, block:N or full for gptq. With
        --for-method full where it takes at most 16 GB, else block:128.
    for_method: Round layer by layer meanwhile: statistics of inputs behind rounded weights, for
        this method of quantize. Needs --format. One of: gptq.
    format: With --for-method or --activations 4: of quantize. One of: nvfp4, mxfp4.
    scale_rule: With --for-method: of quantize.
    activations: 4: record Grams of inputs as engines round them. One of: 16, 4.
    sensitivity: Also measure what outputs lose by each part in each format, for --target-bits.
    lora: Merge this LoRA adapter, a folder or ORG/NAME, and round so that it stays.
    lora_scale: With --lora: multiplies the adapter's own scale. Default: 1.
    force: Replace what an earlier run of fp4convert left in the output folder.
    text: A file of plain text; may be given several times.
    dataset: jsonl or parquet: conversations ('messages'), which the model's chat template writes,
        with images or sound its processor, or 'text'.
    self_generate: No data: let the model write this many sequences.
    samples: Largest number of samples, spread evenly over the data.
    sequence_length: Tokens of a sample. Default: up to 2048, or 512 with --self-generate.
    device: auto takes a GPU, else the CPU.
    hold: With --self-generate: GB of weights held in memory.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(CalibrateOptions(**locals()))
    from fp4convert.commands import calibration

    return calibration.calibrate(options)


@by_name
def merge(
    output: Reference,
    *,
    phases: Phases | None = None,
    tell: Callable[[str], None] = ignore,
) -> dict[str, Any]:
    """Finish a conversion whose parts are done: the command `merge`.

    Every shard is checked, scale groups are compared, the records are written.  Shards that no
    seal proves untouched are read again (docs/machines.md).
    Returns  what `merge --json` prints
    Raises   InputError where it holds no plan; OutputError where a shard is missing or damaged

    output: The folder that holds all parts.
    """
    options = checked(MergeOptions(**locals()))
    from fp4convert.commands import convert

    return convert.merge(options)


@by_name
def analyze(
    source: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    exclude: Globs = (),
    include: Globs = (),
    recipe: str | None = None,
    stack_order: str | None = None,
    stack_rows: str | None = None,
    calibration: Reference | None = None,
    sample: float | None = None,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """Measure what every kind of module loses in each form, on a sample.

    The command `analyze`.

    Writes nothing.
    Returns  what `analyze --json` prints; docs/methods.md has every key
    Raises   Fp4Error: InputError for a source, a sample or a recipe that cannot be; SourceError
             and AccessError from the Hub

    source: A folder, one .safetensors or .gguf file, or ORG/NAME on the Hub.
    calibration: Statistics of this source: a file of fp4convert calibrate, or llama.cpp's imatrix.
    sample: GB of the source to read, from every kind of module. Default: 0.02.
    exclude: Keep these modules as they are. Glob, or re:REGEX.
    include: Quantize these modules too, although the recipe keeps them.
    recipe: A recipe that fp4convert recipes lists, or a TOML file of your own.
    stack_order: Layout of fused expert tensors: [experts, out, in] or [experts, in, out]. One of:
        out_in, in_out.
    stack_rows: Order of the gate and up rows in a fused expert tensor. One of: concatenated,
        interleaved.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(AnalyzeOptions(**locals()))
    from fp4convert.commands import quality

    return quality.analyze(options)


@by_name
def prune(
    source: Reference,
    output: Reference,
    calibration: Reference,
    keep: int,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    workers: int = 0,
    force: bool = False,
    phases: Phases | None = None,
    warn: Callable[[Iterable[str]], None] | None = None,
    join: bool = False,
    shard_index: int | None = None,
    num_shards: int | None = None,
    recipe: str | None = None,
) -> "Result":
    """Leave out the experts that matter least (REAP): the command `prune`.

    Raises  Fp4Error, as `quantize` does

    source: A folder, one .safetensors or .gguf file, or ORG/NAME on the Hub.
    output: New folder.
    calibration: Statistics of SOURCE, a file made by fp4convert calibrate.
    keep: Number of experts to keep in every MoE layer.
    recipe: A recipe that fp4convert recipes lists, or a TOML file of your own.
    join: Share the work with other processes that write to the same folder.
    shard_index: Convert this part only, from 0; when all are done: fp4convert merge.
    num_shards: Number of parts. Default of both: from Slurm, torchrun or SkyPilot.
    workers: Number of threads; 0 chooses by the device.
    force: Replace what an earlier run of fp4convert left in the output folder.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(PruneOptions(**locals()))
    from fp4convert.commands import convert

    return convert.prune(options)


@by_name
def preview_prune(
    source: Reference,
    output: Reference,
    calibration: Reference,
    keep: int,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    workers: int = 0,
    force: bool = False,
    phases: Phases | None = None,
    warn: Callable[[Iterable[str]], None] | None = None,
    join: bool = False,
    shard_index: int | None = None,
    num_shards: int | None = None,
    recipe: str | None = None,
) -> dict[str, Any]:
    """Plan what `prune` would do: `prune --dry-run --json`.

    Writes nothing; raises as `prune` does, and tells of too little room as preview_quantize.

    The options are those of `prune`.
    """
    options = checked(PruneOptions(**locals()))
    from fp4convert.commands import convert

    return convert.preview_prune(options)


@by_name
def reproduce(
    artifact: Reference,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | None = None,
    memory: float = 1.0,
    config: Reference | None = None,
    follow_links: bool = False,
    tell: Callable[[str], None] = ignore,
    workers: int = 0,
    force: bool = False,
    phases: Phases | None = None,
    warn: Callable[[Iterable[str]], None] | None = None,
    device: str = "auto",
    source: Reference | None = None,
    base: Reference | None = None,
    calibration: Reference | None = None,
    lora: Reference | Iterable[Reference] | None = (),
    global_scale: Reference | None = None,
    input_scale: Reference | None = None,
    recipe: str | None = None,
) -> dict[str, Any]:
    """Make an artifact again from its record alone, and compare hashes.

    The command `reproduce`.

    Every shard passes through a file in the folder for temporary files, which is removed as soon
    as its hash is known; the input of a transcode step lies there whole until the step ends.
    Returns  what `reproduce --json` prints; `reproduced` is False where the command exits with 6
    Raises   Fp4Error, as `quantize` does; InputError for a record without options or hashes, and
             for a file that differs from the recorded one

    artifact: An artifact, or its quantization_config.json alone: a folder, a file, or ORG/NAME.
    source: What it was made from. Default: the repository and commit in the record.
    base: What quantize had as --base.
    calibration: Statistics of this source: a file of fp4convert calibrate, or llama.cpp's imatrix.
    lora: The LoRA adapter that --source was merged with, as quantize --lora had it.
    global_scale: What quantize had as --global-scale.
    input_scale: The artifact or file that quantize had as --input-scale.
    recipe: A recipe that fp4convert recipes lists, or a TOML file of your own.
    device: auto takes the CPU, and GPUs that pass a check where the plan says they win.
    workers: Number of threads; 0 chooses by the device.
    force: Replace what an earlier run of fp4convert left in the output folder.
    revision: Branch, tag or commit. Default: main.
    subfolder: Subfolder that holds the checkpoint.
    token: Access token. Better: hf auth login. [env: HF_TOKEN]
    memory: GB of memory at most, unless one scale group needs more.
    config: Folder with the config.json of a GGUF file's model: the file is read as safetensors.
    follow_links: The folders are yours: links in them may lead out of them.
    """
    options = checked(ReproduceOptions(**locals()))
    from fp4convert.commands import reproduction

    return reproduction.reproduce(options)


@by_name
def attest(
    artifact: Reference,
    *,
    key: Reference,
    source: Reference | None = None,
    force: bool = False,
    phases: Phases | None = None,
) -> dict[str, Any]:
    """Sign the files of an artifact: the command `attest`.

    The signature, model.sig, is of every file beside it, by the package model-signing; with a
    source also of derivation.json, which states what the artifact was made from.
    Returns  what `attest --json` prints
    Raises   InputError for what is no finished artifact, has damaged files, or for a key that
             cannot sign; OutputError for a signature that is there, or cannot be written

    artifact: The folder of an artifact on this disk.
    key: Private key in PEM of an elliptic curve: P-256, P-384 or P-521; no password.
    source: What it was made from: derivation.json will state its hashes, the options and the
        version.
    force: Replace the signature that is there.
    """
    options = checked(AttestOptions(**locals()))
    from fp4convert.commands import attestation

    return attestation.attest(options)
