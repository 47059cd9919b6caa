"""What the weight files say of a model where config.json says otherwise: the files decide.

- A head of its own under `tie_word_embeddings: true` is used, unless it equals the embedding.
- The language model may lie under another prefix, as in what people extract from a larger model.

Both are logged. The rest of a contradiction is an error of the loader, which names the tensors.
"""

import logging
from dataclasses import replace

import torch

from services.common.model_spec import ModelSpec
from services.common.nn.checkpoint import Checkpoint

HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_ROWS = 4096  # compared at a time

log = logging.getLogger(__name__)


def as_stored(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """The spec with `tie_word_embeddings` and the text prefix as the files have them."""
    names = spec.checkpoint
    if names.text_prefix + _EMBEDDING not in checkpoint.tensors:
        found = [name for name in checkpoint.tensors
                 if f".{name}".endswith(f".{_EMBEDDING}") and not names.ignores(name)]  # fmt: skip
        if len(found) == 1:
            prefix = found[0].removesuffix(_EMBEDDING)
            log.warning(
                "%s: the language model's tensors are called %s*, not %s*",
                checkpoint.directory, prefix, names.text_prefix,
            )  # fmt: skip
            names = replace(names, text_prefix=prefix)
    text = spec.text
    if text.tie_word_embeddings and not _is_tied(checkpoint, names.text_prefix + _EMBEDDING):
        log.warning(
            "%s: config.json says that the head is the embedding (tie_word_embeddings), but the "
            "files hold another %s, which is used",
            checkpoint.directory, HEAD,
        )  # fmt: skip
        text = replace(text, tie_word_embeddings=False)
    return replace(spec, text=text, checkpoint=names)


def _is_tied(checkpoint: Checkpoint, embedding: str) -> bool:
    """Whether the files hold no head, or one that equals the embedding."""
    head, table = (checkpoint.tensors.get(name) for name in (HEAD, embedding))
    if head is None or table is None:
        return True
    if (head.shape, head.dtype) != (table.shape, table.dtype):
        return False
    with checkpoint.reader() as first, checkpoint.reader() as second:
        pairs = zip(first.read(HEAD).split(_ROWS), second.read(embedding).split(_ROWS), strict=True)
        return all(torch.equal(mine, other) for mine, other in pairs)
