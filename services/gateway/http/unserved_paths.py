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
)
_PREFIXES = re.compile(r"(?:/api|/openai)?(?:/v1)*(?=/)")
_CHAT = "send conversations to /v1/chat/completions"
_ONE_MODEL = "a gateway serves one model that generates text"
# Beginning of a path without its prefix -> why it is not served.
_REASONS = {
    "/embeddings": f"embeddings are not served: {_ONE_MODEL}",
    "/embed": f"embeddings are not served: {_ONE_MODEL}",
    "/pooling": f"pooling models are not served: {_ONE_MODEL}",
    "/classify": f"classification is not served: {_ONE_MODEL}",
    "/rerank": f"reranking is not served: {_ONE_MODEL}",
    "/score": f"scoring is not served: {_ONE_MODEL}",
    "/moderations": f"moderation is not served: {_ONE_MODEL}",
    "/audio": "audio is not served; images and videos are parts of a chat message",
    "/images": "images are not generated; as input they are parts of a chat message",
    "/realtime": f"the realtime API is not served: {_CHAT}",
    "/assistants": "the Assistants API is not served: use /v1/responses",
    "/threads": "the Assistants API is not served: use /v1/responses",
    "/batches": f"batches are not served: {_CHAT}, several at a time",
    "/files": "files are not served: images and videos are uploaded to /v1/media",
    "/load_lora_adapter": "LoRA is not served",
    "/unload_lora_adapter": "LoRA is not served",
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
