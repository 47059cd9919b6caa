"""Checks a gateway's Submit and converts it to the engine's AddSequence.

The engine can compute every sequence that passes these checks. A sequence with invalid values must
not reach code where an error would end all sequences of the batch.
"""

import math

import numpy as np
from msgspec.structs import replace

from services.common.embeddings.embedding import EmbeddingSpec
from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.images.image_key import KEY_BYTES, MAX_SALT_BYTES
from services.common.pb import decoder_pb2 as pb
from services.common.transport.rpc import MAX_REQUEST_ID_CHARS
from services.decoder.engine.messages import AddSequence, EngineInfo, ImageSpan, SamplingParams
from services.decoder.front.adapter_table import LoadedAdapter, salted
from services.decoder.front.token_constraints import read_constraints
from services.decoder.front.token_ids import (
    INT_BYTES,
    MAX_STOP_TOKEN_IDS,
    check_ids,
    count_packed_ids,
)
from services.decoder.images.embedding_source import ImageRequest
from services.decoder.masks.grammar import TokenConstraints

MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PROMPT_LOGPROBS = 1 << 18  # prompt tokens times the logprobs of each token
MAX_LOGIT_BIAS = 1024
MAX_TENANT_CHARS = 128
# The parameters of each sequence of a model for search.
_POOLING = SamplingParams(max_tokens=1)


def read_submit(
    submit: pb.Submit,
    number: int,
    engine: EngineInfo,
    end_ids: tuple[int, ...],
    adapter: LoadedAdapter | None = None,
) -> tuple[AddSequence, list[ImageRequest], TokenConstraints | None]:
    """Reads a gateway's message.

    Args:
        submit: the gateway's message.
        number: the engine's number of the sequence.
        engine: description of the engine.
        end_ids: end tokens of the model.
        adapter: adapter of the sequence. None for the base model alone.

    Returns:
        The engine's message, the distinct images of the sequence, and the constraints on its
        tokens. The constraints are None if no token is masked.

    Raises:
        InvalidRequest: a field has an invalid value. The error names the field.
    """
    if submit.images and not engine.num_features:
        raise InvalidRequest(f"{engine.model_name} is a text model and takes no images")
    num_tokens = _check_prompt(submit, engine)
    _check_positions(submit, num_tokens, engine)
    spans, images = _images(submit, num_tokens, engine)
    if len(submit.cache_salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"cache_salt has more than {MAX_SALT_BYTES} bytes")
    if len(submit.tenant) > MAX_TENANT_CHARS:
        raise InvalidRequest(f"tenant has more than {MAX_TENANT_CHARS} characters")
    if not (math.isfinite(submit.timeout_s) and submit.timeout_s >= 0):
        raise InvalidRequest("timeout_s is negative or not finite")
    sampling = _sampling(submit.sampling, engine, engine.max_model_len - num_tokens)
    _check_generated(submit, sampling, engine)
    count_packed_ids("prediction", submit.prediction, engine)
    sampling, constraints = read_constraints(submit, sampling, engine, end_ids)
    pooling = replace(_POOLING, prompt_logprobs=0 if engine.task == "token_embed" else None)
    if engine.task != "generate" and (sampling != pooling or constraints is not None):
        raise InvalidRequest(
            f"{engine.model_name} generates no text: a sequence has max_tokens 1 and no other "
            "sampling parameter"
        )
    wanted = sampling.prompt_logprobs
    if wanted is not None and num_tokens * (wanted + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs asks for more than {MAX_PROMPT_LOGPROBS} values")
    message = AddSequence(
        sequence_id=number,
        prompt_token_ids=submit.prompt_token_ids,
        positions=submit.positions,
        position_delta=submit.position_delta,
        images=spans,
        sampling=sampling,
        generated_token_ids=submit.generated_token_ids,
        cache_salt=salted(submit.cache_salt, adapter),
        adapter=-1 if adapter is None else adapter.slot,
        prediction=submit.prediction,
        priority=submit.priority,
        tenant=submit.tenant,
        tenant_weight=_tenant_weight(submit.tenant_weight),
        background=submit.background,
        request="" if engine.task == "generate" else submit.request_id[:MAX_REQUEST_ID_CHARS],
        token_masks=constraints is not None,
    )
    return message, images, constraints


def _check_generated(submit: pb.Submit, sampling: SamplingParams, engine: EngineInfo) -> None:
    count = count_packed_ids("generated_token_ids", submit.generated_token_ids, engine)
    if count and count >= sampling.max_tokens:
        raise InvalidRequest(
            f"generated_token_ids has {count} tokens, so max_tokens leaves no token to generate"
        )


def _check_prompt(submit: pb.Submit, engine: EngineInfo) -> int:
    count = count_packed_ids("prompt_token_ids", submit.prompt_token_ids, engine)
    if not count:
        raise InvalidRequest("prompt_token_ids is empty")
    if count >= engine.max_model_len:
        raise ContextLengthExceeded.of(count, engine.max_model_len)
    return count


def _check_positions(submit: pb.Submit, num_tokens: int, engine: EngineInfo) -> None:
    # An image's tokens share positions, so a position never exceeds its token's index.
    if not -num_tokens <= submit.position_delta <= 0:
        raise InvalidRequest(f"position_delta is outside [-{num_tokens}, 0]")
    if not submit.positions:
        return
    if len(submit.positions) != 3 * num_tokens * INT_BYTES:
        raise InvalidRequest(f"positions is not int32 [3, {num_tokens}]")
    positions = np.frombuffer(submit.positions, "<i4")
    if int(positions.min()) < 0 or int(positions.max()) >= engine.max_model_len:
        raise InvalidRequest(f"positions has values outside [0, {engine.max_model_len})")


def _images(
    submit: pb.Submit, num_tokens: int, engine: EngineInfo
) -> tuple[list[ImageSpan], list[ImageRequest]]:
    """Returns the places of the images in the prompt, and the distinct images."""
    spans: list[ImageSpan] = []
    requests: dict[bytes, ImageRequest] = {}
    end = 0
    for image in submit.images:
        key = image.image_key
        if len(key) != KEY_BYTES:
            raise InvalidRequest(f"an image key has {len(key)} bytes, not {KEY_BYTES}")
        if image.num_tokens == 0 or image.offset < end:
            raise InvalidRequest("images are empty, overlap, or are not in order of their offsets")
        end = image.offset + image.num_tokens
        if end > num_tokens:
            raise InvalidRequest(f"an image ends at {end}, beyond the {num_tokens} prompt tokens")
        spans.append(ImageSpan(key, image.offset, image.num_tokens))
        spec = EmbeddingSpec(engine.dtype, engine.num_features, image.num_tokens, engine.hidden)
        request = ImageRequest(key, spec, image.encoder_address)
        if requests.setdefault(key, request).spec != spec:
            raise InvalidRequest("one image key is used for images of two sizes")
    return spans, list(requests.values())


def _sampling(params: pb.SamplingParams, engine: EngineInfo, max_completion: int) -> SamplingParams:
    """Reads the sampling parameters.

    Args:
        params: the gateway's parameters.
        engine: description of the engine.
        max_completion: number of tokens that fit behind the prompt.
    """
    _check_range("temperature", params.temperature, 0.0, 1e4)
    _check_range("min_p", params.min_p, 0.0, 1.0)
    _check_range("presence_penalty", params.presence_penalty, -1e4, 1e4)
    _check_range("frequency_penalty", params.frequency_penalty, -1e4, 1e4)
    _check_range("top_p", params.top_p, 0.0, 1.0, open_below=True)
    # Logits stay finite in float32 when they are divided by this penalty and by the temperature.
    _check_range("repetition_penalty", params.repetition_penalty, 1e-7, 1e4)
    if params.max_tokens < 1:
        raise InvalidRequest("max_tokens is less than 1")
    logit_bias = dict(params.logit_bias)
    check_ids("logit_bias", list(logit_bias), engine, MAX_LOGIT_BIAS)
    check_ids("stop_token_ids", params.stop_token_ids, engine, MAX_STOP_TOKEN_IDS)
    check_ids("logprob_token_ids", params.logprob_token_ids, engine, MAX_LOGPROB_TOKEN_IDS)
    for bias in logit_bias.values():
        _check_range("logit_bias", bias, -1e4, 1e4)
    top_logprobs = _num_logprobs("top_logprobs", params)
    prompt_logprobs = _num_logprobs("prompt_logprobs", params)
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k if params.top_k < engine.vocab_size else 0,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=logit_bias,
        seed=params.seed,
        stop_token_ids=tuple(params.stop_token_ids),
        max_tokens=min(params.max_tokens, max_completion),
        min_tokens=min(params.min_tokens, engine.max_model_len),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(dict.fromkeys(params.logprob_token_ids)),
    )


def _num_logprobs(name: str, params: pb.SamplingParams) -> int | None:
    count: int | None = getattr(params, name) if params.HasField(name) else None
    if count is not None and count > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{name} is more than {MAX_TOP_LOGPROBS}")
    return count


def _tenant_weight(weight: float) -> float:
    if weight == 0.0:
        return 1.0
    _check_range("tenant_weight", weight, 1e-3, 1e3)
    return weight


def _check_range(
    name: str, value: float, low: float, high: float, *, open_below: bool = False
) -> None:
    # These comparisons put NaN outside of every range.
    inside = low < value <= high if open_below else low <= value <= high
    if not inside:
        bracket = "(" if open_below else "["
        raise InvalidRequest(f"{name} is {value:g}, outside {bracket}{low:g}, {high:g}]")
