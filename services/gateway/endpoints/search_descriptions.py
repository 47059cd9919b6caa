"""The descriptions of the fields of search, for the OpenAPI document; see `field_descriptions`."""

from collections.abc import Mapping

_INSTRUCTION = "Task of the search, in a sentence. Defaults to the model's own."
_CUT = "Most tokens of a prompt; a longer one is cut on the right. -1 is the context. Defaults to refusing prompts beyond the context."
_SCORE = "Probability that the document answers the query. With vectors of tokens: the sum over the query's tokens of the largest product with a token of the document."
_WAS_CUT = "True if the prompt was cut to `truncate_prompt_tokens`. Absent otherwise."
_ANSWERING = "Name of the model that answered."
_QUERIES = "A query for all documents, or one for each: texts, or objects with images and clips."
_DOCUMENTS = "Documents, up to 2,048: texts, or objects with images and clips."
_CUT_DOCUMENT = (
    "Most tokens of a document's text; a longer one is cut on the right. 0 and the default are all."
)
_REQUEST = {"instruction": _INSTRUCTION, "truncate_prompt_tokens": _CUT}

SEARCH: Mapping[str, Mapping[str, str]] = {
    "EmbeddingRequest": {
        **_REQUEST,
        "input": "A text, token ids, an object with images and clips, or a list of up to 2,048 of these.",
        "messages": "One input: a user message, after a system message with the instruction if any. In place of `input`.",
        "dimensions": "Length of the vectors, which are cut and then normalized. Defaults to the model's.",
        "encoding_format": "`float`, or `base64` of float32 in little-endian order. Defaults to `float`.",
    },
    "PoolingRequest": {
        **_REQUEST,
        "task": "`token_embed`, the only task.",
        "input": "A text, token ids, an object with a text and an image, or a list of up to 2,048 of these.",
        "messages": "One input: a user message. In place of `input`.",
        "dimensions": "Refused: the vectors of tokens have one length.",
        "encoding_format": "`float`, or `base64` of the float32 of all vectors in little-endian order. Defaults to `float`.",
    },
    "TokenVectors": {
        "index": "Index of the input.",
        "data": "The vectors of the input's tokens, each of length 1: lists of numbers, or base64.",
        "truncated": _WAS_CUT,
    },
    "TokenVectorsList": {
        "id": "Id of the answer.",
        "created": "Unix time of the answer, in seconds.",
        "model": _ANSWERING,
        "data": "The vectors, in the order of the inputs.",
        "usage": "Numbers of tokens.",
    },
    "SearchItem": {
        "text": "Text of the input, behind its images and clips.",
        "image": "URL of an image.",
        "video": "URL of a clip, or the URLs of its frames.",
        "content": "A text, or the parts of a chat message, in place of the other fields.",
        "instruction": "Task of the search for this input alone. Not in a pair of a reranker.",
    },
    "RerankRequest": {
        **_REQUEST,
        "query": "The query: a text, or an object with images and clips.",
        "documents": _DOCUMENTS,
        "max_tokens_per_doc": _CUT_DOCUMENT,
        "top_n": "Number of documents in the answer. 0 and the default are all.",
        "return_documents": "True shows the text of each document. Defaults to true at `/v1/rerank` and to false at `/v2/rerank`.",
    },
    "ScoreRequest": {
        **_REQUEST,
        "queries": _QUERIES,
        "documents": _DOCUMENTS,
        "max_tokens_per_doc": _CUT_DOCUMENT,
        "text_1": "Another name of `queries`.",
        "text_2": "Another name of `documents`.",
        "data_1": "Another name of `queries`.",
        "data_2": "Another name of `documents`.",
    },
    "SearchUsage": {
        "prompt_tokens": "Number of tokens of all prompts.",
        "total_tokens": "Number of tokens of all prompts.",
        "prompt_tokens_details": "Numbers of these tokens that were found in the prefix cache, and that belong to images and clips.",
    },
    "Embedding": {
        "index": "Index of the input.",
        "embedding": "The vector, of length 1: numbers, or base64.",
        "truncated": _WAS_CUT,
    },
    "EmbeddingList": {
        "id": "Id of the answer.",
        "created": "Unix time of the answer, in seconds.",
        "model": _ANSWERING,
        "data": "The vectors, in the order of the inputs.",
        "usage": "Numbers of tokens.",
    },
    "RankedDocument": {
        "index": "Index of the document in the request.",
        "relevance_score": _SCORE,
        "document": "The document's text, if the request asks for it.",
        "truncated": _WAS_CUT,
    },
    "Ranking": {
        "id": "Id of the answer.",
        "model": _ANSWERING,
        "results": "The documents, the best first.",
        "usage": "Numbers of tokens.",
        "meta": "Version of the API and numbers of tokens, in Cohere's form.",
    },
    "Score": {
        "index": "Index of the pair.",
        "score": _SCORE,
        "truncated": _WAS_CUT,
    },
    "ScoreList": {
        "id": "Id of the answer.",
        "created": "Unix time of the answer, in seconds.",
        "model": _ANSWERING,
        "data": "The scores, in the order of the pairs.",
        "usage": "Numbers of tokens.",
    },
}
