"""A reference of Qwen3.5's layer for multi-token prediction, which transformers ignores.

It is written from the public description, over transformers' decoder layer, norm and rotary
embedding: for each pair of a hidden state after the target's final norm and of the next token's
embedding, with the position of the hidden state.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.parity.oracle import Oracle, Prompt
from tests.parity.qwen3_5_oracle import Tiny, make_qwen3_5

# isort: split
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe


class Head(nn.Module):
    """The layer, with the names of its tensors in files behind `mtp.`."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        config: Any = copy.deepcopy(oracle.model.config.get_text_config())
        config.layer_types = ["full_attention"]
        config._attn_implementation = "eager"
        is_moe = "Moe" in type(config).__name__
        norm = moe.Qwen3_5MoeRMSNorm if is_moe else dense.Qwen3_5RMSNorm
        layer = moe.Qwen3_5MoeDecoderLayer if is_moe else dense.Qwen3_5DecoderLayer
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden, eps), norm(hidden, eps)
        self.layers = nn.ModuleList([layer(config, 0)])
        self.norm = norm(hidden, eps)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(-0.5, 0.5, generator=generator)
            else:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)

    def forward(
        self, oracle: Oracle, embedded: Tensor, hidden: Tensor, positions: Tensor
    ) -> Tensor:
        """The outputs `[n, hidden]` of all pairs, of which each attends to those before it."""
        language: Any = oracle.model.model.language_model
        x = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        x, places = self.fc(x)[None], positions[:, None]
        mask = torch.full((len(embedded), len(embedded)), -torch.inf).triu(1)[None, None]
        found = self.layers[0](
            x, position_embeddings=language.rotary_emb(x, places), attention_mask=mask,
            position_ids=places[0],
        )  # fmt: skip
        return self.norm(found[0] if isinstance(found, tuple) else found)[0]


def make_with_head(tiny: Tiny, directory: Path, seed: int = 0) -> tuple[Oracle, Head]:
    """A tiny Qwen3.5 whose files have a random head."""
    oracle = make_qwen3_5(tiny, directory, seed=seed, gain=1.5)
    head = Head(oracle).eval()
    head.fill(seed + 7)
    path = directory / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if not n.startswith("mtp.")}
    save_file(tensors | {f"mtp.{n}": t for n, t in head.state_dict().items()}, path)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    return oracle, head


@torch.no_grad()
def drafts_of(
    oracle: Oracle, head: Head, prompt: Prompt, answer: list[int], count: int
) -> dict[int, list[int]]:
    """Drafts behind each token of an answer, computed from the whole text before them: by the
    number of tokens before the drafts.
    """
    language: Any = oracle.model.model.language_model
    whole = replace(prompt, token_ids=prompt.token_ids + answer)
    taken: dict[str, Tensor] = {}

    def take(_module: nn.Module, _arguments: tuple, named: dict[str, Any], out: Any) -> None:
        taken["embedded"], taken["hidden"] = named["inputs_embeds"][0], out.last_hidden_state[0]

    hook = language.register_forward_hook(take, with_kwargs=True)
    positions = torch.from_numpy(oracle.answer(whole).positions.copy()).long()
    hook.remove()
    found: dict[int, list[int]] = {}
    for end in range(len(prompt.token_ids) + 1, len(whole.token_ids) + 1):
        embedded, hidden = taken["embedded"][1:end], taken["hidden"][: end - 1]
        places, drafts = positions[:, : end - 1], list[int]()
        for _ in range(count):
            out = head(oracle, embedded, hidden, places)[-1:]
            drafts.append(int(oracle.model.lm_head(out).argmax()))
            embedded = torch.cat((embedded, language.embed_tokens(torch.tensor(drafts[-1:]))))
            hidden, places = torch.cat((hidden, out)), torch.cat((places, places[:, -1:] + 1), 1)
        found[end] = drafts
    return found
