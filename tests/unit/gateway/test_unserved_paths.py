"""The 404 of a path that is not served says what to call instead."""

import pytest

from services.gateway.endpoints.openapi import OPERATIONS
from services.gateway.http.unserved_paths import BELOW_V1, explain


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/api/v1/models", "did you mean /v1/models?"),
        ("/openai/v1/responses", "did you mean /v1/responses?"),
        ("/embeddings", "did you mean /v1/embeddings?"),
        ("/rerank", "did you mean /v1/rerank?"),
        ("/v1/embed", "vectors of a search are served at /v1/embeddings"),
        ("/v1/audio/transcriptions", "audio is not served"),
        ("/v1/images/generations", "images are not generated"),
        ("/v1/uploads", "send batches' files whole to /v1/files"),
        ("/files/file-1", "'/files/file-1' is not served; /docs lists"),
        ("/batches", "did you mean /v1/batches?"),
        ("/api/chat", "Ollama's API is not served: send conversations to /v1/chat/completions"),
        ("/api/tags", "Ollama's API is not served"),
        ("/load_lora_adapter", "adapters are loaded at /v1/load_lora_adapter"),
        ("/generate", "SGLang's own API is not served: send conversations to"),
        ("/get_model_info", "SGLang's own API is not served"),
        ("/completion", "texts to /v1/completions"),
        ("/slots/0", "llama.cpp's own API is not served"),
        ("/nothing", "'/nothing' is not served; /docs lists the paths"),
        ("/filesystem", "'/filesystem' is not served; /docs lists"),
        ("", "'' is not served"),
    ],
)
def test_a_path_that_is_not_served_is_explained(path: str, words: str) -> None:
    assert words in explain(path)


def test_a_long_path_is_not_repeated_whole() -> None:
    assert len(explain("/" + "x" * 10_000)) < 200


def test_the_suggested_paths_are_served() -> None:
    served = {path for _, path in OPERATIONS}
    assert {f"/v1{path}" for path in BELOW_V1} <= served
