"""Sampling parameters: a request's fields, completed by the model's defaults, for the decoder.

`ChatService.prepare` calls `SamplingReader`. Fields that contradict each other, the vocabulary or
the context are an `InvalidRequest`. The bounds of single fields are checked in `forms.openai`.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.model_spec import ModelSpec
from services.common.pb.decoder_pb2 import SamplingParams, TokenIds
from services.gateway.forms.openai import ChatRequest
from services.gateway.tokenizer.tokenizer import ModelTokenizer

# Completion tokens if neither the request nor generation_config.json names a number.
DEFAULT_MAX_TOKENS = 4096
# Fields with the same name in requests, generation_config.json and `SamplingParams`.
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_SEED_MASK = (1 << 64) - 1
_MAX_CACHED_WORDS = 1024


def model_defaults(spec: ModelSpec, overrides: Mapping[str, Any] = _NOTHING) -> SamplingParams:
    """Returns the values of fields that a request leaves out, from generation_config.json.

    `do_sample: false` there means greedy sampling. The stop tokens are the model's end tokens.

    Args:
        overrides: entries that replace those of the file, see `check_overrides`.
    """
    config: Mapping[str, Any] = {**spec.generation, **overrides}
    defaults = SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=max(int(config.get("top_k") or 0), 0),
        repetition_penalty=1.0,
        max_tokens=int(config.get("max_new_tokens") or DEFAULT_MAX_TOKENS),
        stop_token_ids=spec.eos_token_ids,
    )
    for name in _NUMBERS:
        setattr(defaults, name, config.get(name) or getattr(defaults, name))
    if config.get("do_sample") is False or config.get("temperature") == 0:
        defaults.temperature = 0.0
    return defaults


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Checks entries that are to replace those of generation_config.json.

    Raises:
        ValueError: an entry has no effect on sampling here, or its value is one that requests may
            not have.
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(ChatRequest)}
    known = {"do_sample": bool, "max_new_tokens": fields["max_tokens"], "top_k": fields["top_k"]}
    known |= {name: fields[name] for name in _NUMBERS}
    for name, value in overrides.items():
        if name not in known:
            raise ValueError(f"{name} cannot be overridden; these can: {', '.join(sorted(known))}")
        try:
            msgspec.convert(value, known[name])
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}") from None


class SamplingReader:
    """Reads the sampling parameters of requests to one model.

    Args:
        tokenizer: tokenizer of the model, for bad words.
        defaults: values of fields that a request leaves out; see `model_defaults`.
    """

    def __init__(self, tokenizer: ModelTokenizer, defaults: SamplingParams) -> None:
        self._defaults = defaults
        # Reading a field of a message takes longer than reading an entry of a dict.
        self._numbers = {name: getattr(defaults, name) for name in (*_NUMBERS, "top_k")}
        self._bad_words = BadWords(tokenizer)

    def read(self, request: ChatRequest, vocab_size: int) -> SamplingParams:
        """Returns the sampling parameters of a request's first choice, without `max_tokens`, which
        `limit` sets. Choice i uses seed + i.

        Args:
            vocab_size: size of the vocabulary. Token ids are smaller.

        Raises:
            InvalidRequest: a token id is outside the vocabulary, or fields contradict each other.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            check_ids(name, getattr(request, name) or (), vocab_size)
        if request.logprob_token_ids and not request.logprobs:
            raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
        # Token ids that the request names take the place of the most likely tokens.
        num_likely = 0 if request.logprob_token_ids else request.top_logprobs or 0
        eos = () if request.ignore_eos else self._defaults.stop_token_ids
        sampling = SamplingParams(
            **{name: self._value(request, name) for name in _NUMBERS},
            top_k=max(self._value(request, "top_k"), 0),
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
            sampling.bad_words.extend(TokenIds(ids=ids) for ids in self._bad_words.token_ids(word))
        return sampling

    def limit(
        self,
        sampling: SamplingParams,
        request: ChatRequest,
        num_prompt_tokens: int,
        max_model_len: int,
    ) -> None:
        """Sets `max_tokens` to the smaller of two numbers: the tokens that the request wants, and
        the tokens that the prompt leaves in the context.

        Args:
            sampling: parameters of the request, which are changed.
            num_prompt_tokens: number of tokens of the prompt.
            max_model_len: number of tokens of the context.

        Raises:
            ContextLengthExceeded: the prompt leaves no token for the answer.
            InvalidRequest: `min_tokens` is above the result.
        """
        left = check_room(num_prompt_tokens, max_model_len)
        sampling.max_tokens = min(left, self.max_completion_tokens(request))
        if not sampling.min_tokens:
            return
        allowed = set(sampling.allowed_token_ids)
        if allowed and allowed <= set(sampling.stop_token_ids):
            raise InvalidRequest(
                "min_tokens excludes the stop tokens, and allowed_token_ids has no other tokens",
                param="allowed_token_ids",
            )
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens {sampling.min_tokens} is above the {sampling.max_tokens} tokens "
                "allowed",
                param="min_tokens",
            )

    def max_completion_tokens(self, request: ChatRequest) -> int:
        """Returns the number of tokens that the request wants at most: the smaller of its limits,
        or the model's default.
        """
        limits = [n for n in (request.max_completion_tokens, request.max_tokens) if n is not None]
        return min(limits, default=self._defaults.max_tokens)

    def _value(self, request: ChatRequest, name: str) -> Any:  # noqa: ANN401
        value = getattr(request, name)
        return self._numbers[name] if value is None else value


class BadWords:
    """Token ids of words that must not be generated. Keeps the ids of the latest words, which many
    requests share.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._encode_cached = lru_cache(_MAX_CACHED_WORDS)(self._encode)

    def token_ids(self, word: str) -> list[list[int]]:
        """Returns the token ids of a word at the start of a text and after a space."""
        bare = word.lstrip()
        if not bare:
            return [self._encode_cached(word)]
        return [self._encode_cached(bare), self._encode_cached(f" {bare}")]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_prompt(text, add_special_tokens=False)


def check_room(num_prompt_tokens: int, max_model_len: int, param: str = "messages") -> int:
    """Returns the number of tokens that a prompt leaves in the context for the answer.

    Args:
        param: field of the prompt, for the error.

    Raises:
        ContextLengthExceeded: the prompt leaves no token.
    """
    left = max_model_len - num_prompt_tokens
    if left < 1:
        raise ContextLengthExceeded.of(num_prompt_tokens, max_model_len, param=param)
    return left


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Checks the token ids of a field.

    Raises:
        InvalidRequest: an id is outside the vocabulary.
    """
    for index, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise InvalidRequest(f"ids must be below {vocab_size}", param=f"{name}[{index}]")


def choice_seed(seed: int, choice: int) -> int:
    """Returns the seed of one of a request's choices, as an unsigned 64-bit integer."""
    return (seed + choice) & _SEED_MASK


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    # int() would accept signs, spaces, underscores and digits of other scripts.
    wrong = [
        name[:20]
        for name in biases
        if not (name.isascii() and name.isdigit() and len(name) <= 9 and int(name) < vocab_size)
    ]
    if wrong:
        names = ", ".join(map(repr, wrong[:8]))
        verb = "is not a token id" if len(wrong) == 1 else "are not token ids"
        raise InvalidRequest(f"{names} {verb} below {vocab_size}", param=f"logit_bias.{wrong[0]}")
    return {int(name): value for name, value in biases.items()}
