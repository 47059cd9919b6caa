"""Corrects a model's spec where the weight files contradict config.json: the files decide.

- With `tie_word_embeddings: true`, a head in the files is used unless it equals the embedding.
- The tensors of the language model may have another prefix, as in checkpoints that were extracted
  from a larger model.

Both corrections are logged. Any other contradiction is an error of the loader, which names the
tensors.
"""

import logging
from dataclasses import replace

import torch

from services.common.model_spec import ModelSpec
from services.common.nn.checkpoint import Checkpoint

HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
# Number of rows that are compared at a time.
_ROWS = 4096

log = logging.getLogger(__name__)


def as_stored(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Returns the spec with `tie_word_embeddings` and the text prefix of the files."""
    names = spec.checkpoint
    if names.text_prefix + _EMBEDDING not in checkpoint.tensors:
        found = [
            name
            for name in checkpoint.tensors
            if f".{name}".endswith(f".{_EMBEDDING}") and not names.ignores(name)
        ]
        if len(found) == 1:
            prefix = found[0].removesuffix(_EMBEDDING)
            log.warning(
                "%s: the language model's tensors are called %s*, not %s*",
                checkpoint.directory,
                prefix,
                names.text_prefix,
            )
            names = replace(names, text_prefix=prefix)
    text = spec.text
    if text.tie_word_embeddings and not _is_tied(checkpoint, names.text_prefix + _EMBEDDING):
        log.warning(
            "%s: config.json says that the head is the embedding (tie_word_embeddings), but the "
            "files hold another %s, which is used",
            checkpoint.directory,
            HEAD,
        )
        text = replace(text, tie_word_embeddings=False)
    return replace(spec, text=text, checkpoint=names)


def _is_tied(checkpoint: Checkpoint, embedding: str) -> bool:
    """Returns whether the files hold no head, or a head that equals the embedding."""
    head, table = (checkpoint.tensors.get(name) for name in (HEAD, embedding))
    if head is None or table is None:
        return True
    if (head.shape, head.dtype) != (table.shape, table.dtype):
        return False
    with checkpoint.reader() as first, checkpoint.reader() as second:
        pairs = zip(first.read(HEAD).split(_ROWS), second.read(embedding).split(_ROWS), strict=True)
        return all(torch.equal(mine, other) for mine, other in pairs)
