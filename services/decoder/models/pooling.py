"""The models for search: a language model without sampling, and the pooler behind it.

The result of a prompt is made of the hidden state of its last token, after the final norm. The
model's `logits` are therefore the hidden states themselves, and steps, CUDA graphs and ranks work
as for a chat model. The pooler turns a step's hidden states into vectors
(`embed`, `token_embed`) or scores (`rank`).

With `token_embed`, every token of a prompt has a vector. The tokens before the last are computed as
for the log-probabilities of a prompt: without cached prefixes, and their vectors travel in place of
the log-probabilities of the most likely tokens (`step.Scores.top`).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from services.common.model_spec import ModelSpec, SearchSpec
from services.common.nn.adapter_stack import AdapterRows
from services.common.nn.collectives import ALONE, Ranks
from services.common.nn.weight_map import WeightMap
from services.decoder.attention.base import AttentionBackend
from services.decoder.models.transformer import Transformer
from services.decoder.operations.ops import Ops

# Number of rows of the identity matrix with which the head's weights are read at a time.
_ROWS = 128


class Projection(nn.Module):
    """The layer that makes a vector of a token's hidden state.

    Args:
        hidden_size: elements of a hidden state.
        dimensions: elements of a vector.
    """

    def __init__(self, hidden_size: int, dimensions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dimensions, hidden_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dimensions), requires_grad=False)


class PoolingTransformer(Transformer):
    """A language model whose `logits` are the hidden states, of each rank.

    The head of a reranker is read like that of a chat model, because `Pooler.of` needs two of its
    rows. A model for vectors has no head, whatever the files contain.

    Args: see `Transformer`.
    """

    def __init__(
        self, spec: ModelSpec, backend: AttentionBackend, ops: Ops, *, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(spec, backend, ops, ranks=ranks)
        self.projection: Projection | None = None
        if spec.task != "rank":
            self.lm_head = None
            names, prefixes = spec.checkpoint, {"": spec.checkpoint.text_prefix}
            if spec.search is not None and spec.search.dimensions:
                sizes = spec.text.hidden_size, spec.search.dimensions
                self.projection = Projection(*sizes)
                prefixes["projection."] = spec.search.projection
            self.weight_map = WeightMap(prefixes=prefixes, others=names.vision_prefixes)

    def logits(
        self, hidden: Tensor, *, out: Tensor | None = None, adapters: AdapterRows | None = None
    ) -> Tensor:
        """Returns the hidden states `[R, hidden]`.

        Args:
            hidden: `[R, hidden]`, hidden states after the final norm.
            out: `[R, hidden]`, tensor for the copy. None if the states themselves are returned.
            adapters: adapters of the tokens. They change the head, which is not used.
        """
        return hidden if out is None else out.copy_(hidden)

    def head_rows(self, token_ids: tuple[int, ...]) -> Tensor:
        """Returns the rows `[n, hidden]` float32 of the head for n tokens. Only rank 0's result is
        used.

        The rows are the logits of the identity matrix, so this works in every weight format and
        over ranks. All ranks have to call the method together.
        """
        weight = self.embed_tokens.weight
        identity = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        logits, ids = super().logits, list(token_ids)
        columns = [logits(part)[:, ids].float() for part in identity.split(_ROWS)]
        return torch.cat(columns).T.contiguous()


class Pooler:
    """Turns the hidden states of prompts' last tokens, or of all tokens, into results, in float32.

    Args:
        direction: `[hidden]` float32; the score of a prompt is its product with the hidden state.
            None if the result is a vector.
        projection: layer that makes the vectors. None if a vector is the hidden state itself.
    """

    def __init__(
        self, direction: Tensor | None = None, projection: Projection | None = None
    ) -> None:
        self._direction = direction
        self._layer = None
        if projection is not None:
            self._layer = projection.weight.float(), projection.bias.float()

    @classmethod
    def of(cls, search: SearchSpec, model: PoolingTransformer) -> "Pooler":
        """Makes the pooler of a loaded model. All ranks have to call the method together."""
        if search.task != "rank":
            return cls(projection=model.projection)
        yes, no = model.head_rows((search.true_token_id, search.false_token_id))
        return cls(yes - no)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the results `[R, n]` float32 of hidden states `[R, hidden]`.

        With `embed`, n is the hidden size, and the vectors are not normalized. With `token_embed`,
        they are, and n is their length. With `rank`, n is 1, and the score is the logit of "yes"
        minus that of "no".
        """
        if self._layer is not None:
            vectors = nn.functional.linear(hidden.float(), *self._layer)
            # The least length is that of the card's code.
            return nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(torch.float32).eps)
        if self._direction is None:
            return hidden.float()
        # A sum of products per row, because the result of a GEMM may depend on the other rows.
        return (hidden.float() * self._direction).sum(-1, keepdim=True)


def pooling_text(spec: ModelSpec) -> ModelSpec:
    """Returns the spec with which a model for vectors is built. The model has no head, because the
    files may lack the head's weights although config.json does not tie it to the embedding.
    """
    if spec.task == "rank":
        return spec
    return replace(spec, text=replace(spec.text, tie_word_embeddings=True))
