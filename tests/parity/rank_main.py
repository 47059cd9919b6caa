"""Several ranks, run by test_ranks.py: they compute a prompt's logits of each checkpoint.

    python -m tests.parity.rank_main ROOT COUNT=NAME,... ...

Each rank is a process: a fork of this one, which has imported everything. Where a directory has a
file `answers`, rank 0 writes there what an engine of all ranks answers. Writes
`logits-RANK.safetensors` to each directory, or `refused-RANK` with the message.
"""

import itertools
import json
import multiprocessing
import socket
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import PrefixStore

from kernels.device import DeviceFacts
from kernels.linear_attention.states import StateCache, StateLayout
from services.common.families import read_spec
from services.common.nn.checkpoint import Checkpoint
from services.common.nn.collectives import Ranks
from services.common.nn.layer_formats import set_methods
from services.common.nn.weights import load_weights
from services.common.quantization import quantized_at_load
from services.decoder.attention.base import AttentionMetadata
from services.decoder.attention.sdpa import SdpaBackend
from services.decoder.models.rank_spec import rank_spec
from services.decoder.models.transformer import Transformer
from services.decoder.operations import table
from services.decoder.operations.kernel_facts import KernelFacts, attention_facts
from services.decoder.operations.ops import Ops
from tests.parity.rank_answers import answers, follow

CPU, BLOCK_SIZE, TOKENS = torch.device("cpu"), 4, 23
BLOCKS = -(-TOKENS // BLOCK_SIZE)


def loaded(directory: Path, ranks: Ranks, quantization: str = "") -> Transformer:
    spec = quantized_at_load(read_spec(directory), quantization)
    part = rank_spec(spec.text, ranks)
    facts = KernelFacts(DeviceFacts("cpu"), part, torch.float32, num_ranks=ranks.count)
    with torch.device("meta"):
        model = Transformer(
            spec,
            SdpaBackend(attention_facts(facts, block_size=BLOCK_SIZE)),
            Ops(table.resolve(facts)),
            ranks=ranks,
        )
    checkpoint = Checkpoint.open(directory)
    set_methods(model, checkpoint, model.weight_map, spec.checkpoint.quantization)
    load_weights(
        model, checkpoint, model.weight_map, device=CPU, dtype=torch.float32, spec=spec.checkpoint
    )
    return model


@torch.no_grad()
def logits(directory: Path, ranks: Ranks, quantization: str = "") -> Tensor:
    """`[TOKENS, vocab_size]`, of a prompt in one chunk."""
    model = loaded(directory, ranks, quantization)
    text = rank_spec(read_spec(directory).text, ranks)
    lens, total = np.array([0, TOKENS], np.int32), np.array([TOKENS], np.int32)
    seq_lens = torch.tensor([TOKENS], dtype=torch.int32)
    metadata = AttentionMetadata(
        num_decodes=0, cu_query_lens=lens, seq_lens=total, slot_mapping=torch.arange(TOKENS),
        block_ids=torch.arange(BLOCKS, dtype=torch.int32), seq_lens_device=seq_lens,
        first_blocks=np.zeros(1, np.int32), first_blocks_device=torch.zeros(1, dtype=torch.int32),
    )  # fmt: skip
    if text.linear_attention is not None:
        layers = len(text.linear_layers)
        states = StateCache.allocate(text.linear_attention, layers, 2, torch.float32, CPU)
        metadata.states = StateLayout(
            states, 0, lens, total, torch.zeros(1, dtype=torch.int64), torch.from_numpy(lens),
            seq_lens,
        )  # fmt: skip
    attention = model.layers[text.attention_layers[0]].mixer
    metadata.plan = attention.backend.plan(metadata)
    shape = BLOCKS + 1, 2, BLOCK_SIZE, text.num_kv_heads, text.head_dim
    pool = torch.zeros(len(text.attention_layers), *shape)
    ids, positions = torch.arange(TOKENS) * 7 % 300, torch.arange(TOKENS).expand(3, TOKENS)
    return model.logits(model.forward(ids, positions, pool, metadata))


class Silent(Ranks):
    """A control: each rank goes on with its own term."""

    def all_reduce(self, term: Tensor) -> Tensor:
        return term


Links = list[tuple[socket.socket, socket.socket]]


def run_rank(store: Path, rank: int, count: int, directories: list[Path], links: Links) -> None:
    meeting = torch.distributed.FileStore(str(store), count)
    torch.distributed.init_process_group("gloo", store=meeting, rank=rank, world_size=count)
    for directory, link in zip(directories, links, strict=True):
        if (directory / "answers").exists():
            ranks = Ranks(rank, count, PrefixStore(directory.name, meeting))
            if rank:
                link[0].close()
                follow(directory, ranks, link[1])
            else:
                (directory / "answers").write_text(json.dumps(answers(directory, ranks, link[0])))
        kind = Silent if (directory / "silent").exists() else Ranks
        try:
            found = logits(directory, kind(rank, count, meeting))
        except ValueError as error:
            (directory / f"refused-{rank}").write_text(str(error))
        else:
            save_file({"logits": found.contiguous()}, directory / f"logits-{rank}.safetensors")
    torch.distributed.destroy_process_group()


def main(root: Path, groups: list[str]) -> int:
    """The exit status: 1 if a rank failed."""
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    for group in groups:
        count, names = group.split("=")
        directories = [root / name for name in names.split(",")]
        links = [socket.socketpair() for _ in directories]
        store = root / f"store-{count}"
        ranks = [
            fork.Process(target=run_rank, args=(store, rank, int(count), directories, links))
            for rank in range(int(count))
        ]
        for each in ranks:
            each.start()
        # A follower hears that its leader has ended only if nobody else has the leader's end.
        for end in itertools.chain.from_iterable(links):
            end.close()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
