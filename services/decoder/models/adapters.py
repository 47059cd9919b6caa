"""The adapters of a language model: which are loaded, and what they change beside linear layers.

Each adapter has a slot. Linear layers hold the factors of all slots (`adapter_stack`), which are
made when the first adapter changes the layer. The embedding table and the output head may be
replaced as a whole (`modules_to_save`).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.adapters.factors import SlotFactors
from services.common.adapter_config import TOWER, AdapterConfig, AdapterError
from services.common.model_spec import ModelSpecError
from services.common.nn.adapter import Adapter, LowRank
from services.common.nn.adapter_stack import AdapterRows, AdapterStack, all_finite, refused
from services.common.nn.collectives import Ranks, Share
from services.common.nn.expert_stack import MODULE, ExpertStack
from services.common.nn.experts import Experts, Router, StackedLinear
from services.common.nn.linear import Linear
from services.decoder.models.base import DRAFT_HEAD

logger = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
# Errors of Python in what an adapter's files hold. An error of the device is a `RuntimeError`: its
# memory cannot be trusted after that.
_OF_FILES = ArithmeticError, AttributeError, LookupError, TypeError, ValueError


def _malformed(directory: object, error: Exception) -> str:
    """Returns the reason for which an adapter with an error that nobody foresaw is refused."""
    return f"{directory} is malformed: {type(error).__name__}: {error}"


@dataclass(slots=True)
class _Slot:
    """The parts of a slot's adapter that change other tensors than those of linear layers.

    Attributes:
        table: `[vocab_size, hidden]`, the adapter's embedding table. None if it is the base's.
        head: `[rows, hidden]`, this rank's rows of the adapter's output head. None if it is the
            base's.
        embedding: pair of `[vocab_size, rank]` and `[hidden, rank]`, whose product is added to the
            embeddings. None if there is none.
    """

    table: Tensor | None = None
    head: Tensor | None = None
    embedding: tuple[Tensor, Tensor] | None = None

    @property
    def is_used(self) -> bool:
        """Returns whether the adapter changes any of these tensors."""
        return not (self.table is None and self.head is None and self.embedding is None)


@dataclass(slots=True)
class Adapters:
    """The adapters of a loaded language model.

    Args:
        model: the language model, a `Transformer`.
        embed_tokens: its embedding table.
        lm_head: its output head. None if the table is the head.
        ranks: ranks that share the model.
        slots: number of slots.
        max_rank: largest rank of an adapter.
        takes_images: True if the model takes images, whose encoder has the adapters' towers.

    Attributes:
        fit_graphs: True if the captured CUDA graphs compute all that the loaded adapters change.
    """

    model: nn.Module
    embed_tokens: nn.Embedding
    lm_head: Linear | None
    ranks: Ranks
    slots: int
    max_rank: int
    takes_images: bool = False
    fit_graphs: bool = field(default=False, init=False)
    _captured: dict[Linear, SlotFactors] = field(default_factory=dict[Linear, SlotFactors])
    _tied_head: AdapterStack | None = None
    _found: list[_Slot] = field(default_factory=list[_Slot])

    def __post_init__(self) -> None:
        self._found = [_Slot() for _ in range(self.slots)]

    def load_files(self, slot: int, directory: str) -> None:
        """Reads an adapter, and loads it into a free slot. All ranks call this together.

        A file may be gone, or a device's memory full, for one rank alone. So the ranks exchange
        their errors, and afterwards either all of them have the adapter, or none.

        Raises:
            AdapterError: the adapter cannot be served. The slot is empty.
            RuntimeError: other ranks wait within a sum, because this one's memory is full.
        """
        adapter, problem = None, ""
        try:
            adapter = Adapter.read(AdapterConfig.read(directory))
        except ModelSpecError as error:
            problem = str(error)
        except Exception as error:  # Only the files can be at fault: no device takes part.
            logger.exception("%s: the adapter cannot be read", directory)
            problem = _malformed(directory, error)
        self._refuse_together(problem)
        assert adapter is not None
        self.load_together(slot, adapter)

    def load_together(self, slot: int, adapter: Adapter) -> None:
        """Loads an adapter into a free slot on all ranks or on none, see `load_files`.

        Raises:
            AdapterError, RuntimeError: as `load_files`.
        """
        problem = ""
        try:
            self.load(slot, adapter)
        except AdapterError as error:
            problem = str(error)
        except _OF_FILES as error:
            logger.exception("%s: the adapter cannot be loaded", adapter.config.directory)
            problem = _malformed(adapter.config.directory, error)
        except torch.OutOfMemoryError as error:
            problem = str(error).partition("\n")[0] or "the device's memory is full"
            if self.ranks.count > 1 and adapter.config.uses_dora:
                raise RuntimeError(f"{adapter.config.directory}: {problem}") from None
        try:
            self._refuse_together(problem)
        except AdapterError:
            self.unload(slot)
            raise

    def _refuse_together(self, problem: str) -> None:
        """Raises an AdapterError on all ranks if there is a problem on any of them."""
        if found := [each for each in self.ranks.exchange(problem) if each]:
            raise AdapterError(found[0])

    @torch.inference_mode()
    def load(self, slot: int, adapter: Adapter) -> None:
        """Loads an adapter into a free slot. All ranks call this together.

        The values are converted and checked on the device, and the host waits for the device once.

        Raises:
            AdapterError: the adapter does not fit the model, has values that are not finite, or
                changes something that is not computed beside the base model. No slot is changed
                then.
        """
        layers, former = dict(self._layers()), self._stacks()
        problems: dict[str, str] = {}
        todo: list[tuple[str, AdapterStack, str, LowRank]] = []
        experts = self._experts(adapter, problems)
        for name, factors in adapter.linears.items():
            if MODULE.fullmatch(name) or self._is_of_tower(name):
                continue
            stack, why = self._stack(name, layers)
            if stack is not None:
                part = name.rpartition(".")[2]
                part = part if part in stack.rows else ""
                why = stack.check(part, factors)
                todo.append((name, stack, part, factors))
            if why:
                problems[name] = why
        problems |= self._other_problems(adapter)
        if problems:
            self._keep(former)
            raise refused(str(adapter.config.directory), problems)
        finite: list[tuple[str, Tensor]] = []  # name of a module, and whether its values are finite
        for name, stack, part, factors in todo:
            finite.append((name, stack.set(slot, part, factors)))
        for name, layer, expert, part, factors in experts:
            if layer.adapters is None:
                layer.adapters = ExpertStack(layer, self.embed_tokens.weight)
            if expert is None:
                finite.append((name, layer.adapters.set_all(slot, factors)))
            else:
                finite.append((name, layer.adapters.set_one(slot, expert, part, factors)))
        self._found[slot] = self._whole_modules(adapter, finite)
        self._note_fit()
        if names := self._not_finite(finite):
            self.unload(slot)
            self._keep(former)
            why = f"has values that are not finite in {self.embed_tokens.weight.dtype}"
            raise refused(str(adapter.config.directory), dict.fromkeys(names, why))

    def _not_finite(self, finite: list[tuple[str, Tensor]]) -> list[str]:
        """Returns the names of modules with values that are not finite. Waits for the device."""
        if not finite:
            return []
        flags: list[bool] = torch.stack([flag for _, flag in finite]).tolist()
        return [name for (name, _), is_finite in zip(finite, flags, strict=True) if not is_finite]

    @torch.inference_mode()
    def reserve(self) -> None:
        """Makes the stacks of all layers in which an adapter may change something, so that their
        memory is taken before that of the KV cache. Experts' factors take memory when they come.
        """
        layers = dict(self._layers())
        for name in layers:
            self._stack(name, layers)

    @torch.inference_mode()
    def unload(self, slot: int) -> None:
        """Empties a slot, whose adapter no running sequence has."""
        for stack in self._stacks().values():
            stack.clear(slot)
        if self._tied_head is not None:
            self._tied_head.clear(slot)
        self._found[slot] = _Slot()
        self._note_fit()

    def rows(self, slots: Tensor, present: Sequence[int] | None) -> AdapterRows:
        """Returns the adapters of a step's tokens.

        Args:
            slots: `[T]` int64, slot of each token's adapter, -1 for none.
            present: the slots that occur. None for a CUDA graph, which runs for any.
        """
        if present is None:
            return AdapterRows(slots, self.slots, 0, self.slots, in_graph=True)
        return AdapterRows(slots, self.slots, min(present), max(present) + 1)

    def note_capture(self) -> None:
        """Notes that CUDA graphs have been captured, with the factors that layers have now."""
        self._captured = {
            layer: stack.factors
            for layer, stack in self._stacks().items()
            if not isinstance(layer, StackedLinear)  # no graph has the factors of experts
        }
        self._note_fit()

    def _note_fit(self) -> None:
        """Notes whether the captured graphs compute all that the loaded adapters change.

        Graphs add the changes of linear layers that had factors at the capture, and scale outputs
        for DoRA where an adapter had had it until then. They leave out the embedding table, the
        output head, experts and their routers, which few adapters change.
        """
        layers = [layer for layer, stack in self._stacks().items() if stack.used]
        left_out = self._tied_head is not None and bool(self._tied_head.used)
        for layer in layers:
            if layer is self.lm_head or isinstance(layer, Router | StackedLinear):
                left_out = True
            else:
                captured, stack = self._captured.get(layer), layer.adapters
                left_out |= captured is None or (bool(stack.scaled) and captured.factor is None)
        left_out |= any(slot.is_used for slot in self._found)
        self.fit_graphs = bool(self._captured) and not left_out

    def embed(self, input_ids: Tensor, out: Tensor, rows: AdapterRows) -> Tensor:
        """Returns embeddings, changed where a token's adapter changes the embedding table.

        Args:
            input_ids: `[T]`, token ids.
            out: `[T, hidden]`, embeddings of the base model.
            rows: adapters of the tokens.
        """
        if rows.in_graph:  # see `fit_graphs`
            return out
        for slot in range(rows.first, rows.last):
            found, mask = self._found[slot], rows.mask[:, slot, None]
            if found.table is not None:
                out = torch.where(mask, F.embedding(input_ids, found.table), out)
            if found.embedding is not None:
                a, b = found.embedding
                out = torch.where(mask, out + F.linear(F.embedding(input_ids, a), b), out)
        return out

    def logits(self, hidden: Tensor, out: Tensor, rows: AdapterRows) -> Tensor:
        """Returns this rank's part of the logits, changed where an adapter changes the head.

        Args:
            hidden: `[R, hidden]`, hidden states of the sampled tokens.
            out: `[R, rows]`, logits of the base model.
            rows: adapters of the sampled tokens.
        """
        for slot in range(rows.first, rows.last):
            if (head := self._found[slot].head) is not None:
                out = torch.where(rows.mask[:, slot, None], F.linear(hidden, head), out)
        stack = self._tied_head if self.lm_head is None else self.lm_head.adapters
        if stack is None or not stack.applies(rows):
            return out
        return stack.add(out, hidden, rows)

    def _stacks(self) -> dict[Linear, AdapterStack]:
        """Returns the stacks of the layers that have one."""
        layers = (each for each in self.model.modules() if isinstance(each, Linear))
        return {layer: layer.adapters for layer in layers if layer.adapters is not None}

    def _keep(self, former: dict[Linear, AdapterStack]) -> None:
        """Drops stacks that an adapter that is refused has made."""
        for layer in self._stacks():
            layer.adapters = former.get(layer)

    def _layers(self) -> Iterator[tuple[str, Linear]]:
        """Yields the linear layers by the names that adapters give their modules.

        The layer that drafts is left out: it drafts for all adapters alike.
        """
        for path, layer in self.model.named_modules():
            if isinstance(layer, Linear) and not path.startswith(f"{DRAFT_HEAD}."):
                parent = path.rpartition(".")[0]
                for part in layer.parts:
                    yield (f"{parent}.{part}" if part else path), layer

    def _is_of_tower(self, name: str) -> bool:
        """Returns whether a module or tensor is the encoder's."""
        return self.takes_images and name.startswith(TOWER)

    def _stack(self, name: str, layers: dict[str, Linear]) -> tuple[AdapterStack | None, str]:
        """Returns the stack of a module, or why the module cannot have one."""
        like = self.embed_tokens.weight
        if name == "lm_head" and self.lm_head is None:
            if self._tied_head is None:
                rows, columns = map(Share.of, like.shape)
                self._tied_head = AdapterStack(
                    {"": rows},
                    columns,
                    self.slots,
                    self.max_rank,
                    like,
                    weight=lambda: like,
                    ranks=self.ranks,
                )
            return self._tied_head, ""
        layer = layers.get(name)
        if layer is None:
            return None, "is not a linear layer of the model"
        if isinstance(layer, StackedLinear):
            return None, "is not a module of one expert"
        if layer.adapters is None:
            layer.adapters = AdapterStack.of(layer, self.slots, self.max_rank, like, self.ranks)
        return layer.adapters, ""

    def _experts(
        self, adapter: Adapter, problems: dict[str, str]
    ) -> list[tuple[str, StackedLinear, int | None, str, LowRank]]:
        """Returns the adapter's factors of experts: name in the adapter, layer, expert (None for
        all experts), module and factors. Adds the modules that do not fit to `problems`, with the
        reasons.
        """
        found: list[tuple[str, StackedLinear, int | None, str, LowRank]] = []
        layers = {
            path: each for path, each in self.model.named_modules() if isinstance(each, Experts)
        }
        for name, factors in adapter.linears.items():
            if not (match := MODULE.fullmatch(name)):
                continue
            layer, expert, part = layers.get(match[1]), int(match[2]), match[3]
            if layer is None:
                problems[name] = "is not a module of the model"
                continue
            stack = layer.down_proj if part == "down_proj" else layer.gate_up_proj
            found.append((name, stack, expert, part, factors))
            if why := ExpertStack(stack, self.embed_tokens.weight).check_one(expert, part, factors):
                problems[name] = why
        for name, several in adapter.experts.items():
            layer = layers.get(name)
            if layer is None:
                problems[name] = "is not a module of the model"
                continue
            known = len(found)
            for parameter, stack in layer.stacks.items():
                shape = sum(share.size for share in stack.rows.values()), stack.columns.size
                if (factors := adapter.of_experts(name, parameter, shape, layer.count)) is not None:
                    found.append((name, stack, None, "", factors))
            if len(found) - known < len(several):
                problems[name] = "has factors of another shape than the model's experts"
        return found

    def _other_problems(self, adapter: Adapter) -> dict[str, str]:
        """Returns what an adapter changes beside linear layers and cannot be served, by name."""
        problems: dict[str, str] = {}
        shape = tuple(self.embed_tokens.weight.shape)
        for name, tensor in adapter.saved.items():
            if self._is_of_tower(name):
                continue
            if name not in (_EMBEDDING, _HEAD):
                problems[name] = "is replaced; fold the adapter into the weights (--merge-adapter)"
            elif tuple(tensor.shape) != shape:
                problems[name] = f"is {list(tensor.shape)}, the model has {list(shape)}"
        if (factors := adapter.embedding) is not None:
            found = factors.a.shape[1], len(factors.b)
            if found != shape:
                problems["embed_tokens"] = f"is {list(found)}, the model has {list(shape)}"
        return problems

    def _whole_modules(self, adapter: Adapter, finite: list[tuple[str, Tensor]]) -> _Slot:
        """Returns what an adapter changes beside linear layers. Adds to `finite`, see `load`."""
        like, saved = self.embed_tokens.weight, adapter.saved
        found, device = _Slot(), like.device
        if _EMBEDDING in saved:
            found.table = saved[_EMBEDDING].to(device).to(like)
            finite.append((_EMBEDDING, all_finite(found.table)))
        if _HEAD in saved:
            rows = Share.of(len(like)) if self.lm_head is None else self.lm_head.rows[""]
            ranges = [saved[_HEAD][start:stop].to(device) for start, stop in rows.ranges]
            found.head = torch.cat(ranges).to(like)
            finite.append((_HEAD, all_finite(found.head)))
        if (factors := adapter.embedding) is not None:
            factors = factors.on(device)
            scaled = factors.b.float() * factors.scaling
            found.embedding = factors.a.T.contiguous().to(like), scaled.to(like)
            finite.append(("embed_tokens", all_finite(*found.embedding)))
        return found
