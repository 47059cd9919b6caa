"""Messages of the 404 for paths that the gateway does not serve, with what to call instead."""

import re

# Paths below /v1 that clients call without the prefix, or with the prefix twice.
BELOW_V1 = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/messages",
    "/messages/count_tokens",
    "/models",
    "/media",
    "/files",
    "/batches",
    "/embeddings",
    "/rerank",
    "/score",
)
_PREFIXES = re.compile(r"(?:/api|/openai)?(?:/v1)*(?=/)")
_CHAT = "send conversations to /v1/chat/completions"
_SEARCH = "vectors of a search are served at /v1/embeddings, and scores at /v1/rerank"
# Beginning of a path without its prefix -> why it is not served.
_REASONS = {
    "/embed": _SEARCH,
    "/classify": "classification is not served",
    "/moderations": "moderation is not served",
    "/audio": "audio is not served; images and videos are parts of a chat message",
    "/images": "images are not generated; as input they are parts of a chat message",
    "/realtime": f"the realtime API is not served: {_CHAT}",
    "/assistants": "the Assistants API is not served: use /v1/responses",
    "/threads": "the Assistants API is not served: use /v1/responses",
    "/uploads": "files are not uploaded in parts: send batches' files whole to /v1/files",
    **dict.fromkeys(
        ("/completion", "/infill", "/slots", "/props", "/apply-template"),
        f"llama.cpp's own API is not served: {_CHAT} or texts to /v1/completions",
    ),
    **dict.fromkeys(
        ("/generate", "/generate_stream", "/get_model_info", "/get_server_info"),
        f"SGLang's own API is not served: {_CHAT} or texts to /v1/completions",
    ),
    "/load_lora_adapter": "adapters are loaded at /v1/load_lora_adapter",
    "/unload_lora_adapter": "adapters are unloaded at /v1/unload_lora_adapter",
}
_OLLAMA = ("/chat", "/generate", "/tags", "/show", "/ps", "/pull", "/embed", "/embeddings")
_MAX_SHOWN = 100


def explain(path: str) -> str:
    """Returns the message for a path that is not served."""
    bare = _PREFIXES.sub("", path, count=1).rstrip("/")
    if bare in BELOW_V1:
        return f"{path[:_MAX_SHOWN]!r} is not served; did you mean /v1{bare}?"
    if path.startswith("/api/") and path.rstrip("/").removeprefix("/api") in _OLLAMA:
        return f"Ollama's API is not served: {_CHAT}, in OpenAI's form"
    for beginning, reason in _REASONS.items():
        if bare == beginning or bare.startswith(f"{beginning}/"):
            return reason
    return f"{path[:_MAX_SHOWN]!r} is not served; /docs lists the paths that are"
