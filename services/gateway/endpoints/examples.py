"""Examples of requests, for the OpenAPI document, its page and docs/endpoints.md: a curl of each
endpoint, which a test sends.
"""

import json
import shlex
from typing import Any

# The page /docs replaces both by the model and the address of its server.
MODEL, ADDRESS = "MODEL", "http://127.0.0.1:8000"
_QUESTION = "Who are you?"
# A red square of 64 by 64 pixels.
_IMAGE_URL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAAA1BMVEXcFBQXnfKmAAAAD0lE"
    "QVR42mNgGAWjgHwAAAJAAAHgTR1EAAAAAElFTkSuQmCC"
)
_CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": _QUESTION}],
    "max_tokens": 100,
}
_IMAGE_PARTS = [
    {"type": "image_url", "image_url": {"url": _IMAGE_URL}},
    {"type": "text", "text": "What is in the image?"},
]
_VIDEO_PARTS = [
    {"type": "video", "video": [_IMAGE_URL, _IMAGE_URL], "fps": 1},
    {"type": "text", "text": "What happens in the video?"},
]
_RANK: dict[str, Any] = {
    "model": MODEL,
    "query": "Which shape has four sides?",
    "documents": ["A red square.", "A blue circle."],
}

# Path -> name of the example -> body. `image` and `video` need a model that takes such.
BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "text": _CHAT,
        "stream": _CHAT | {"stream": True},
        "image": _CHAT | {"messages": [{"role": "user", "content": _IMAGE_PARTS}]},
        "video": _CHAT | {"messages": [{"role": "user", "content": _VIDEO_PARTS}]},
    },
    "/v1/completions": {
        "text": {"model": MODEL, "prompt": "A triptych is", "max_tokens": 32},
    },
    "/v1/responses": {
        "text": {"model": MODEL, "input": _QUESTION, "max_output_tokens": 100},
    },
    "/v1/messages": {"text": _CHAT},
    "/v1/messages/count_tokens": {
        "text": {"model": MODEL, "messages": [{"role": "user", "content": _QUESTION}]},
    },
    "/v1/embeddings": {
        "text": {"model": MODEL, "input": ["A red square.", "A blue circle."]},
        "image": {"model": MODEL, "input": [{"text": "A square.", "image": _IMAGE_URL}]},
    },
    "/pooling": {"text": {"model": MODEL, "input": ["A red square."], "task": "token_embed"}},
    "/v1/rerank": {"text": _RANK},
    "/v2/rerank": {"text": _RANK},
    "/v1/score": {
        "text": {"model": MODEL, "queries": "A square", "documents": ["A red square."]},
    },
    "/v1/media": {"image": {"url": _IMAGE_URL}},
    "/v1/load_lora_adapter": {"text": {"lora_name": "sql", "lora_path": "/adapters/sql"}},
    "/v1/unload_lora_adapter": {"text": {"lora_name": "sql"}},
    "/v1/batches": {
        "text": {
            "input_file_id": "file-1234",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
    },
    "/tokenize": {"text": {"prompt": _QUESTION}},
    "/detokenize": {"text": {"tokens": [40, 41, 42]}},
}

# What stands for `{name}` in paths that begin so; elsewhere it is a model's.
_NAMES = {
    "/static/": "chat.js",
    "/v1/responses/": "resp-1234",
    "/v1/media/": f"media:{'0' * 64}",
    "/v1/files/": "file-1234",
    "/v1/batches/": "batch_1234",
}
# Forms, by method and path.
_FORMS = {("POST", "/v1/files"): "-F purpose=batch -F file=@lines.jsonl"}


def curls(method: str, path: str) -> dict[str, str]:
    """A command for each example of an endpoint, by the example's name; without a body: one."""
    name = next((own for start, own in _NAMES.items() if path.startswith(start)), MODEL)
    url = ADDRESS + path.replace("{name}", name)
    if (method, path) in _FORMS:
        return {"": f"curl {url} {_FORMS[method, path]}"}
    if path not in BODIES or (method, path) == ("GET", "/v1/batches"):
        return {"": f"curl {'' if method == 'GET' else f'-X {method} '}{url}"}
    return {
        name: f"curl {'-N ' if body.get('stream') else ''}{url} \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(_lines(body))}"
        for name, body in BODIES[path].items()
    }


def _lines(body: dict[str, Any]) -> str:
    """A field per line."""
    fields = (f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in body.items())
    return "{\n" + ",\n".join(fields) + "\n  }"
