"""What to use instead of fields of older APIs and of kinds of content that are not served.

The names are those that clients of earlier vLLM, of OpenAI's first chat API, of Ollama, SGLang,
llama.cpp, Jina, Cohere and Hugging Face's servers send.
"""

from collections.abc import Collection, Mapping

_STRUCTURED = "structured_outputs"
# Field -> field that replaces it, and how the successor is written.
_FIELDS: Mapping[str, tuple[str, str]] = {
    "guided_json": (_STRUCTURED, '{"json": SCHEMA}'),
    "guided_json_object": (_STRUCTURED, '{"json_object": true}'),
    "guided_regex": (_STRUCTURED, '{"regex": EXPRESSION}'),
    "guided_choice": (_STRUCTURED, '{"choice": [TEXT, ...]}'),
    "guided_grammar": (_STRUCTURED, '{"grammar": GRAMMAR}'),
    "guided_decoding_backend": (_STRUCTURED, "which needs no choice of a backend"),
    "guided_whitespace_pattern": (_STRUCTURED, "which has no pattern for white space"),
    "regex": (_STRUCTURED, '{"regex": EXPRESSION}'),
    "ebnf": (_STRUCTURED, '{"grammar": GRAMMAR}'),
    "grammar": (_STRUCTURED, '{"grammar": GRAMMAR}'),
    "json_schema": (_STRUCTURED, '{"json": SCHEMA}'),
    "functions": ("tools", '[{"type": "function", "function": FUNCTION}, ...]'),
    "function_call": ("tool_choice", '{"type": "function", "function": {"name": NAME}}'),
    "max_new_tokens": ("max_tokens", "NUMBER"),
    "max_output_tokens": ("max_tokens", "NUMBER"),
    "num_predict": ("max_tokens", "NUMBER"),
    "n_predict": ("max_tokens", "NUMBER"),
    "min_new_tokens": ("min_tokens", "NUMBER"),
    "repeat_penalty": ("repetition_penalty", "NUMBER"),
    "stop_sequences": ("stop", "[TEXT, ...]"),
    "task": ("instruction", "TEXT"),
    "input_type": ("instruction", "TEXT"),
    "prompt_name": ("instruction", "TEXT"),
    "truncate": ("truncate_prompt_tokens", "-1"),
    "embedding_type": ("encoding_format", "float or base64"),
    "encoding_type": ("encoding_format", "float or base64"),
    "images": ("messages", "in whose content an image is a part of type image_url"),
}
# Types of content parts -> why they are refused.
_PARTS: Mapping[str, str] = {
    "input_audio": "audio is not served",
    "audio_url": "audio is not served",
    "file": "files are not served: send the pages as images, or their text",
    "input_file": "files are not served: send the pages as images, or their text",
}


def successor(name: str, fields: Collection[str]) -> str:
    """Returns the end of an error message that names a field's successor. Empty if the field has
    none among `fields`, which are those of the request.
    """
    field, form = _FIELDS.get(name, ("", ""))
    if field not in fields:
        return ""
    return f"; use {field}, {form}" if form[0].islower() else f"; use {field}: {form}"


def refused_part(kind: str) -> str | None:
    """Returns why parts of this type are refused. None for types that nobody sends."""
    return _PARTS.get(kind)
