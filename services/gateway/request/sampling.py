"""A request's sampling fields, completed by the model's defaults, as the decoder takes them.

`ChatService.prepare` calls it. Fields that contradict each other, the vocabulary or the context are
an `InvalidRequest`; bounds of single fields are checked by `openai`.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.model_spec import ModelSpec
from services.common.pb.decoder_pb2 import SamplingParams, TokenIds
from services.gateway.forms.openai import ChatRequest

# Completion tokens where neither the request nor generation_config.json names a number.
DEFAULT_MAX_TOKENS = 4096
# Fields of equal names in requests, generation_config.json and `SamplingParams`.
_NUMBERS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_SEED_MASK = (1 << 64) - 1


def model_defaults(spec: ModelSpec) -> SamplingParams:
    """Values for fields that a request leaves out, from generation_config.json, where `do_sample:
    false` means greedy; the stop tokens are the model's end tokens.
    """
    given: Mapping[str, Any] = spec.generation
    found = SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=max(int(given.get("top_k") or 0), 0),
        repetition_penalty=1.0,
        max_tokens=int(given.get("max_new_tokens") or DEFAULT_MAX_TOKENS),
        stop_token_ids=spec.eos_token_ids,
    )
    for name in _NUMBERS:
        setattr(found, name, given.get(name) or getattr(found, name))
    if given.get("do_sample") is False or given.get("temperature") == 0:
        found.temperature = 0.0
    return found


def resolve_sampling(
    request: ChatRequest,
    defaults: SamplingParams,
    *,
    vocab_size: int,
    encode: Callable[[str], list[int]],
) -> SamplingParams:
    """The sampling parameters of a request's first choice; choice i uses seed + i. `max_tokens` is
    for `limit_completion` to set.

    Args:
        vocab_size: ids are below.
        encode: text as the model writes it to token ids, for bad words.

    Raises:
        InvalidRequest: an id outside the vocabulary, or bounds that contradict each other.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_ids(name, getattr(request, name) or (), vocab_size)
    if request.logprob_token_ids and not request.logprobs:
        raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
    # Ids that are named take the place of the most likely ones.
    num_likely = 0 if request.logprob_token_ids else request.top_logprobs or 0
    eos = () if request.ignore_eos else defaults.stop_token_ids
    sampling = SamplingParams(
        **{name: _given(request, defaults, name) for name in _NUMBERS},
        top_k=max(_given(request, defaults, "top_k"), 0),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        seed=choice_seed(secrets.randbits(64) if request.seed is None else request.seed, 0),
        stop_token_ids=dict.fromkeys((*eos, *(request.stop_token_ids or ()))),
        min_tokens=request.min_tokens or 0,
        top_logprobs=num_likely if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
        logprob_token_ids=request.logprob_token_ids,
    )
    sampling.allowed_token_ids.extend(request.allowed_token_ids or ())
    for word in request.bad_words or ():
        sampling.bad_words.extend(TokenIds(ids=ids) for ids in bad_word_ids(word, encode))
    return sampling


def limit_completion(
    sampling: SamplingParams,
    request: ChatRequest,
    defaults: SamplingParams,
    prompt_tokens: int,
    *,
    max_model_len: int,
) -> None:
    """Sets `max_tokens`: what the request wants, at most what a prompt of that length leaves.

    Raises:
        ContextLengthExceeded: the prompt leaves no room for an answer.
        InvalidRequest: `min_tokens` is above the result.
    """
    left = check_room(prompt_tokens, max_model_len)
    sampling.max_tokens = min(left, max_completion_tokens(request, defaults))
    if not sampling.min_tokens:
        return
    allowed = set(sampling.allowed_token_ids)
    if allowed and allowed <= set(sampling.stop_token_ids):
        raise InvalidRequest("min_tokens leaves none of them", param="allowed_token_ids")
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens {sampling.min_tokens} is above the {sampling.max_tokens} tokens allowed",
            param="min_tokens",
        )


def check_room(prompt_tokens: int, max_model_len: int, param: str = "messages") -> int:
    """What a prompt leaves for the answer.

    Raises:
        ContextLengthExceeded: nothing.
    """
    left = max_model_len - prompt_tokens
    if left < 1:
        # In Anthropic's words and in OpenAI's, by which agents know when to shorten a conversation.
        raise ContextLengthExceeded(
            f"prompt is too long: {prompt_tokens} tokens > {max_model_len - 1} maximum: "
            f"the maximum context length is {max_model_len} tokens, and an answer has at least one",
            param=param,
        )
    return left


def bad_word_ids(word: str, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token ids of a word at the start of a text and after a space."""
    bare = word.lstrip()
    return [encode(bare), encode(f" {bare}")] if bare else [encode(word)]


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest if an id of the field is outside the vocabulary."""
    for index, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise InvalidRequest(f"ids must be below {vocab_size}", param=f"{name}[{index}]")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of a request's choices, as an unsigned 64-bit integer."""
    return (seed + choice) & _SEED_MASK


def max_completion_tokens(request: ChatRequest, defaults: SamplingParams) -> int:
    """What the request wants: the smaller of its limits."""
    asked = [n for n in (request.max_completion_tokens, request.max_tokens) if n is not None]
    return min(asked, default=defaults.max_tokens)


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    # int() would accept signs, spaces, underscores and digits of other scripts.
    wrong = [
        name[:20]
        for name in given
        if not (name.isascii() and name.isdigit() and len(name) <= 9 and int(name) < vocab_size)
    ]
    if wrong:
        names = ", ".join(map(repr, wrong[:8]))
        verb = "is not a token id" if len(wrong) == 1 else "are not token ids"
        raise InvalidRequest(f"{names} {verb} below {vocab_size}", param=f"logit_bias.{wrong[0]}")
    return {int(name): value for name, value in given.items()}


def _given(request: ChatRequest, defaults: SamplingParams, name: str) -> Any:  # noqa: ANN401
    value = getattr(request, name)
    return getattr(defaults, name) if value is None else value
