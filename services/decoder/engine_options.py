"""Options of the engine process and of the other ranks, from the decoder's settings."""

import logging

import torch

from services.common.families import read_spec
from services.common.model_spec import ModelSpecError
from services.common.nn.checkpoint import Checkpoint
from services.common.process.engine_process import REFUSED
from services.common.process.pod_limits import num_cpus
from services.decoder.engine.run.runner_factory import RunnerOptions
from services.decoder.models.draft_head_files import has_draft_head
from services.decoder.settings import DecoderSettings

# Seconds for which an idle engine with a GPU polls before its thread blocks. A client needs less to
# send its next request, and an encoder to encode an image.
AWAKE_S = 0.05
# The most tokens of a step. They decide how much memory a step takes; the time of a step is usually
# limited by `DECODER_STEP_MS` before.
_MAX_TOKENS_GPU, _MAX_TOKENS_CPU = 8192, 1024
# Default numbers of drafts in a step: with recurrent states or the model's own layer, and without.
# With the token before them, the latter fill a tile of 16 rows.
_FEW_DRAFTS, _MANY_DRAFTS = 8, 15
_OUT_OF_MEMORY = (
    "the device is out of memory (%s): lower DECODER_MAX_NUM_SEQUENCES, DECODER_MAX_MODEL_LEN or "
    "DECODER_MEMORY_FRACTION, or serve an FP8 checkpoint"
)

log = logging.getLogger(__name__)


def log_failure(error: Exception, log: logging.Logger, what: str) -> int:
    """Logs why a process of the engine ends, and returns its exit status.

    Called while the error is handled.

    Args:
        error: the error that ends the process.
        log: the logger of the process.
        what: log line for an unexpected error.
    """
    if isinstance(error, ModelSpecError | ValueError):
        log.critical("%s", error, exc_info=log.isEnabledFor(logging.DEBUG))
        return REFUSED
    if isinstance(error, torch.OutOfMemoryError):
        log.critical(_OUT_OF_MEMORY, str(error).partition(". ")[0])
        return 1
    log.critical("%s", what, exc_info=True)
    return 1


def set_threads(num_ranks: int) -> None:
    """Bounds torch's threads by the CPUs that each rank may use, until the model is loaded."""
    torch.set_num_threads(max(1, min(torch.get_num_threads(), num_cpus() // num_ranks)))


def use_one_thread(device: str) -> None:
    """Lets torch compute on the calling thread alone if the device is a GPU.

    Called when the model is loaded: reading its files and folding an adapter into its weights need
    threads. A step computes nothing on the CPU that is worth dividing. Threads that share an
    operation wait for the last of them, for tens of milliseconds if all CPUs are busy.

    Args:
        device: device of the rank, `cpu` or `cuda:N`.
    """
    if device != "cpu":
        torch.set_num_threads(1)


def speculation_of(settings: DecoderSettings, device: str) -> str:
    """Returns the source of drafts on a device: `off`, `lookup` or `mtp`.

    With `auto`, a GPU uses the checkpoint's own layer for multi-token prediction if there is one,
    unless `kv_host_bytes` is set, which the layer does not support. Otherwise drafts come from the
    lookup, except for a model for search, which generates no tokens.

    Args:
        settings: the decoder's settings.
        device: device of the rank, `cpu` or `cuda:N`.
    """
    if settings.speculation != "auto":
        return settings.speculation
    if device == "cpu" or settings.kv_host_bytes or settings.model is None:
        return "lookup"
    spec = read_spec(settings.model, settings.task)
    if spec.search is not None:
        return "off"
    has_head = spec.text.num_mtp_layers == 1
    if has_head and settings.load_format == "auto":
        has_head = has_draft_head(Checkpoint.open(settings.model))
    if not has_head:
        log.info("--speculation auto: the model has no layer for multi-token prediction: lookup")
    return "mtp" if has_head else "lookup"


def _max_drafts(settings: DecoderSettings, speculation: str) -> int:
    """Returns the most drafts of a sequence in a step. By default there are fewer for models with
    recurrent states, which keep the inputs of drafts for each row.
    """
    if speculation == "off":
        return 0
    if settings.speculation_tokens is not None:
        return settings.speculation_tokens
    if speculation == "mtp" or settings.model is None:
        return _FEW_DRAFTS
    text = read_spec(settings.model, settings.task).text
    return _MANY_DRAFTS if text.linear_attention is None else _FEW_DRAFTS


def runner_options(settings: DecoderSettings, device: str) -> RunnerOptions:
    """Returns the options of the runner of one rank.

    Args:
        settings: the decoder's settings.
        device: device of the rank, `cpu` or `cuda:N`.
    """
    on_gpu, speculation = device != "cpu", speculation_of(settings, device)
    max_num_sequences = settings.max_num_sequences or (256 if on_gpu else 64)
    return RunnerOptions(
        model_directory=settings.model,
        task=settings.task,
        merge_adapter=settings.merge_adapter,
        adapters=tuple(settings.named_adapters.values()),
        max_adapters=settings.num_slots,
        max_adapter_rank=settings.max_adapter_rank,
        device=device,
        dtype=settings.dtype,
        load_format=settings.load_format,
        quantization=settings.quantization,
        fp8_cache=settings.kv_cache_dtype != "auto",
        max_num_sequences=max_num_sequences,
        max_batched_tokens=max(_MAX_TOKENS_GPU if on_gpu else _MAX_TOKENS_CPU, max_num_sequences),
        max_model_len=settings.max_model_len,
        memory_fraction=settings.memory_fraction,
        kv_cache_bytes=settings.kv_cache_bytes,
        kv_host_bytes=settings.kv_host_bytes,
        kernels=settings.kernels,
        max_drafts=_max_drafts(settings, speculation),
        draft_head=speculation == "mtp",
        draft_head_directory=settings.speculation_head,
    )
