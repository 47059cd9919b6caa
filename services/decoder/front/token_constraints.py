"""Reads and checks the constraints that a gateway's Submit puts on the tokens of the completion: a
grammar, allowed tokens and bad words.
"""

from msgspec import structs

from services.common.errors import InvalidRequest
from services.common.grammar.grammar_bounds import check_grammar
from services.common.pb import decoder_pb2 as pb
from services.decoder.engine.messages import EngineInfo, SamplingParams
from services.decoder.front.token_ids import MAX_STOP_TOKEN_IDS, check_ids
from services.decoder.masks.grammar import Grammar, GrammarSource, TokenConstraints

MAX_BEGINS_AFTER = 64
MAX_BAD_WORDS = 512
MAX_BAD_WORD_TOKENS = 1024
_GRAMMAR_KINDS = {
    pb.Grammar.KIND_JSON_SCHEMA: "json_schema",
    pb.Grammar.KIND_REGEX: "regex",
    pb.Grammar.KIND_CHOICE: "choice",
    pb.Grammar.KIND_GRAMMAR: "grammar",
}


def read_constraints(
    submit: pb.Submit, sampling: SamplingParams, engine: EngineInfo, end_ids: tuple[int, ...]
) -> tuple[SamplingParams, TokenConstraints | None]:
    """Reads the constraints of a sequence.

    Args:
        submit: the gateway's message.
        sampling: sampling parameters, read from the same message.
        engine: description of the engine.
        end_ids: end tokens of the model.

    Returns:
        The sampling parameters, with the end tokens of the grammar as stop tokens, and the
        constraints. None if the message has no constraints, so that no token is masked.

    Raises:
        InvalidRequest: a field has an invalid value. The error names the field.
    """
    params, grammar = submit.sampling, None
    if submit.HasField("grammar"):
        if not end_ids:
            raise InvalidRequest("the model has no end token, which a grammar needs")
        grammar = _grammar(submit, sampling, engine)
        # The grammar decides when the sequence may end.
        ends = *end_ids, *submit.grammar.end_token_ids
        stop_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *ends)))
        sampling = structs.replace(sampling, stop_token_ids=stop_ids, min_tokens=0)
    elif not (params.allowed_token_ids or params.bad_words):
        return sampling, None
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words has more than {MAX_BAD_WORDS} entries")
    bad_words = tuple(tuple(word.ids) for word in params.bad_words)
    for word in bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(f"an entry of bad_words has not 1 to {MAX_BAD_WORD_TOKENS} tokens")
        check_ids("bad_words", word, engine)
    check_ids("allowed_token_ids", params.allowed_token_ids, engine)
    return sampling, TokenConstraints(grammar, tuple(params.allowed_token_ids), bad_words)


def _grammar(submit: pb.Submit, sampling: SamplingParams, engine: EngineInfo) -> Grammar:
    message = submit.grammar
    kind = _GRAMMAR_KINDS.get(message.kind)
    if kind is None:
        raise InvalidRequest(f"grammar has the unknown kind {message.kind}")
    check_grammar(kind, message.text)
    check_ids("grammar.end_token_ids", message.end_token_ids, engine, MAX_STOP_TOKEN_IDS)
    check_ids("grammar.begins_after", message.begins_after, engine, MAX_BEGINS_AFTER)
    by_client = kind == "grammar" and not message.by_gateway
    source = GrammarSource(kind, message.text, message.plain_strings, by_client)
    begins_after = tuple(message.begins_after)
    return Grammar(source, begins_after, sampling.stop_token_ids, sampling.min_tokens)
