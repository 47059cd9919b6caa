"""One dispatch table: operation → implementations in order of preference.

An implementation says what it needs (an obstacle in words, or none) and for how many tokens it is
the fastest. The table is resolved once, when a model is built, from facts of the device and the
model; that needs no GPU, so that a table can be printed for any device. A call takes the first
implementation that fits its number of tokens. While kernels warm up, an implementation whose
compilation or launch fails is dropped, and the call goes to the next one.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)

FactsT = TypeVar("FactsT")
Kernel = Callable[..., Any]
PLAIN = "plain"
_MAX_REASON = 200  # characters of an error that are logged


@dataclass(frozen=True, slots=True)
class TokenRange:
    """For how many tokens an implementation is the fastest.

    Attributes:
        least: fewest tokens.
        most: most tokens; None: no limit.
        least_eager: fewest tokens of a step that is launched kernel by kernel; for implementations
            whose launch takes the host longer, which a long step hides.
        is_faster: a further condition on the number of tokens.
        condition: what `is_faster` tests, in words.
    """

    least: int = 1
    most: int | None = None
    least_eager: int = 1
    is_faster: Callable[[int], bool] | None = None
    condition: str = ""

    def has(self, num_tokens: int, *, captured: bool) -> bool:
        """`captured`: the call is part of a CUDA graph."""
        if num_tokens < self.least or (self.most is not None and num_tokens > self.most):
            return False
        if not captured and num_tokens < self.least_eager:
            return False
        return self.is_faster is None or self.is_faster(num_tokens)

    def __str__(self) -> str:
        if self.most is None:
            text = f">= {self.least}" if self.least > 1 else "any"
        else:
            text = f"{self.least}-{self.most}"
        if self.least_eager > self.least:
            text += f" (eager: >= {self.least_eager})"
        return f"{text} {self.condition}".rstrip()


def up_to(most: int | None) -> Callable[[Any], TokenRange]:
    """For any facts."""
    return lambda _: TokenRange(1, most)


@dataclass(frozen=True)  # with slots, `Implementation[Facts](...)` fails in Python 3.11
class Implementation(Generic[FactsT]):
    """One way to compute an operation.

    Attributes:
        operation: what it computes; all implementations take the same arguments.
        name: for people, metrics and overrides. The last implementation of an operation is its
            specification in torch.
        create: imports it and binds it to the facts; called once, before the first use. None as
            its result: the caller composes the operation from others of the table.
        obstacle: why it cannot run for these facts, or "".
        tokens: for how many tokens it is the fastest, given the facts.
    """

    operation: str
    name: str
    create: Callable[[FactsT], Kernel | None]
    obstacle: Callable[[FactsT], str] = lambda _: ""
    tokens: Callable[[FactsT], TokenRange] = lambda _: TokenRange()


class UnknownOverride(ValueError):
    """A setting names an operation or an implementation that does not exist or cannot run."""


def parse_overrides(text: str) -> dict[str, str]:
    """`op=implementation,...`, or `plain` for the last implementation of every operation.

    Raises:
        UnknownOverride: an entry has another form.
    """
    overrides: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        operation, sign, name = entry.partition("=")
        if entry == PLAIN:
            overrides["*"] = PLAIN
        elif sign and operation.strip() and name.strip():
            overrides[operation.strip()] = name.strip()
        else:
            raise UnknownOverride(
                f"*_KERNELS: {entry!r} in {text!r}: expected operation=implementation, or {PLAIN}"
            )
    return overrides


@dataclass(eq=False)
class Resolved:
    """An implementation that can run, and how often it did."""

    operation: str
    name: str
    tokens: TokenRange
    create: Callable[[], Kernel | None]
    key: str  # in the table
    num_calls: int = 0

    @cached_property
    def kernel(self) -> Kernel | None:
        """What `Implementation.create` returned, which counts its calls."""
        if (kernel := self.create()) is None:
            return None

        def counted(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - the kernel's
            self.num_calls += 1
            return kernel(*arguments, **keywords)

        return counted


@dataclass(slots=True)
class CapturedCalls:
    """Calls that one CUDA graph holds; its owner counts the replays."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    num_replays: int = 0


class KernelTable(Generic[FactsT]):
    """The implementations that can run here, by operation.

    Attributes:
        rejected: (operation, implementation) → why it is not used.
        is_captured: calls are part of a CUDA graph, whose launches cost the host nothing.
        is_warming_up: failures of implementations are caught, see `call`.
    """

    def __init__(self, facts: FactsT) -> None:
        self.facts = facts
        self.rejected: dict[tuple[str, str], str] = {}
        self.is_captured = False
        self.is_warming_up = False
        self._operations: dict[str, list[Resolved]] = {}
        self._graphs: list[CapturedCalls] = []
        self._included: list[KernelTable[Any]] = []

    @classmethod
    def resolve(
        cls,
        implementations: Sequence[Implementation[FactsT]],
        facts: FactsT,
        overrides: Mapping[str, str] | None = None,
        by_format: Mapping[str, tuple[FactsT, Sequence[Implementation[FactsT]]]] | None = None,
    ) -> "KernelTable[FactsT]":
        """Keeps the implementations that can run.

        Args:
            implementations: in order of preference; each operation's last one is its specification.
            overrides: as from `parse_overrides`; an implementation that is named there is used for
                any number of tokens. Where weight formats have operations of their own, it is one
                of any of them.
            by_format: weight format → facts and implementations of the operations that depend on
                it, see `choose`.

        Raises:
            UnknownOverride: an operation or an implementation does not exist, or cannot run.
        """
        table = cls(facts)
        overrides = dict(overrides or {})
        everything = overrides.pop("*", None)
        groups = {"": (facts, implementations), **(by_format or {})}
        there_are = {entry.operation for _, entries in groups.values() for entry in entries}
        if unknown := set(overrides) - there_are:
            known = ", ".join(sorted(there_are))
            raise UnknownOverride(f"*_KERNELS: no operation {min(unknown)}; there are: {known}")
        refused: dict[str, str] = {}  # operation → why its override does not hold
        held: set[str] = set()
        for weight_format, (of_format, entries) in groups.items():
            for operation in dict.fromkeys(entry.operation for entry in entries):
                rows = [entry for entry in entries if entry.operation == operation]
                wanted = overrides.get(operation, everything)
                wanted = rows[-1].name if wanted == PLAIN else wanted
                key = _key(operation, weight_format)
                if table._add(key, rows, of_format, wanted):
                    held.add(operation)
                    continue
                why = table.rejected.get((key, str(wanted)), "there is no such implementation")
                refused[operation] = f"{operation}={wanted}: {why}"
                table._add(key, rows, of_format, None)
        if failed := refused.keys() - held:
            raise UnknownOverride(f"*_KERNELS: {refused[min(failed)]}")
        return table

    def _add(
        self, key: str, entries: Sequence[Implementation[FactsT]], facts: FactsT, wanted: str | None
    ) -> list[Resolved]:
        """Keeps those of one operation's implementations that can run, or the wanted one alone."""
        found: list[Resolved] = []
        for entry in entries:
            self.rejected.pop((key, entry.name), None)
            if wanted is not None and entry.name != wanted:
                self.rejected[key, entry.name] = f"overridden by {wanted}"
            elif why := entry.obstacle(facts):
                self.rejected[key, entry.name] = why
            else:
                tokens = entry.tokens(facts) if wanted is None else TokenRange()
                create = partial(entry.create, facts)
                found.append(Resolved(entry.operation, entry.name, tokens, create, key))
        self._operations[key] = found
        return found

    def include(self, other: "KernelTable[Any]") -> None:
        """Shows and counts another table's operations with this one's, which are others; both warm
        up and are captured together.
        """
        self._included.append(other)
        self._operations |= other._operations
        self.rejected |= other.rejected
        other.rejected = self.rejected

    @property
    def operations(self) -> Collection[str]:
        return self._operations.keys()

    def usable(self, operation: str) -> list[Resolved]:
        """Implementations of an operation that can run here, in order of preference."""
        return list(self._operations[operation])

    def choose(self, operation: str, num_tokens: int, weight_format: str = "") -> Resolved:
        """The first implementation that fits this number of tokens, of layers of that weight
        format if the operation has implementations by format.
        """
        own = self._operations.get(_key(operation, weight_format))
        for entry in self._operations[operation] if own is None else own:
            if entry.tokens.has(num_tokens, captured=self.is_captured):
                return entry
        raise LookupError(f"no implementation of {operation} fits {num_tokens} tokens")

    def call(
        self,
        operation: str,
        *arguments: Any,  # noqa: ANN401 - the kernel's
        num_tokens: int | None = None,
        **keywords: Any,  # noqa: ANN401 - the kernel's
    ) -> Any:  # noqa: ANN401 - the kernel's
        """Runs the chosen implementation for the length of the first argument, or `num_tokens`."""
        count = len(arguments[0]) if num_tokens is None else num_tokens
        entry = self.choose(operation, count)
        try:
            assert entry.kernel is not None
            return entry.kernel(*arguments, **keywords)
        except Exception as error:
            if not (self.is_warming_up and self.drop(entry, error)):
                raise
            return self.call(operation, *arguments, num_tokens=num_tokens, **keywords)

    def drop(self, entry: Resolved, error: Exception) -> bool:
        """Stops using an implementation that failed; False: the error is not its own, or there is
        no other.
        """
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if isinstance(error, torch.OutOfMemoryError) or captures:
            return False
        found = self._operations[entry.key]
        if entry not in found:  # dropped meanwhile, by a call that it made itself
            return True
        if entry is found[-1]:
            return False
        why = f"{type(error).__name__}: {error}".splitlines()[0][:_MAX_REASON]
        log.warning(
            "%s: %s failed and is not used; next is %s: %s",
            entry.operation, entry.name, found[found.index(entry) + 1].name, why,
        )  # fmt: skip
        found.remove(entry)
        self.rejected[entry.key, entry.name] = f"failed: {why}"
        return True

    def in_use(self) -> dict[str, list[str]]:
        """The names of the implementations that can run, in their order, by key."""
        return {key: [entry.name for entry in found] for key, found in self._operations.items()}

    def keep(self, names: Mapping[str, Collection[str]]) -> None:
        """Stops using all others.

        Raises:
            ValueError: an operation has none of those.
        """
        for key, found in self._operations.items():
            for entry in [entry for entry in found if entry.name not in names[key]]:
                found.remove(entry)
                self.rejected[key, entry.name] = "another rank does not use it"
            if not found:
                raise ValueError(f"{key}: ranks have no implementation in common")

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Failures inside lead to the next implementation; calls and replays inside are not
        counted.
        """
        before = {entry: entry.num_calls for entry in self._entries()}
        replays = [graph.num_replays for graph in self._graphs]
        was, self.is_warming_up = self.is_warming_up, True
        try:
            with ExitStack() as stack:
                for other in self._included:
                    stack.enter_context(other.warming_up())
                yield
        finally:
            self.is_warming_up = was
            for entry in self._entries():
                entry.num_calls = before[entry]
            for graph, count in zip_longest(self._graphs, replays, fillvalue=0):
                assert isinstance(graph, CapturedCalls)
                graph.num_replays = count

    @contextmanager
    def capturing(self) -> Iterator[CapturedCalls]:
        """Calls inside are those of one CUDA graph, for which the owner counts replays. Run the
        step once eagerly inside `for_graph` before.
        """
        before = {entry: entry.num_calls for entry in self._entries()}
        held = CapturedCalls()
        with self.for_graph():
            yield held
        for entry in self._entries():
            if count := entry.num_calls - before[entry]:
                held.calls[entry.operation, entry.name] += count
                entry.num_calls = before[entry]
        self._graphs.append(held)

    @contextmanager
    def for_graph(self) -> Iterator[None]:
        """Implementations are chosen as they are for a CUDA graph."""
        was, self.is_captured = self.is_captured, True
        try:
            with ExitStack() as stack:
                for other in self._included:
                    stack.enter_context(other.for_graph())
                yield
        finally:
            self.is_captured = was

    def calls(self) -> Counter[tuple[str, str]]:
        """(operation, implementation) → calls so far, those of replayed graphs included."""
        total: Counter[tuple[str, str]] = Counter()
        for entry in self._entries():
            total[entry.operation, entry.name] += entry.num_calls
        for graph in self._graphs:
            for key, count in graph.calls.items():
                total[key] += count * graph.num_replays
        return +total

    def rows(self) -> list[tuple[str, str, str]]:
        """(operation, implementations in use with their tokens, those not used and why)."""
        rows: list[tuple[str, str, str]] = []
        for operation, found in self._operations.items():
            used = [f"{entry.name} [{entry.tokens}]" for entry in found]
            unused = [
                f"{name}: {why}" for (of, name), why in self.rejected.items() if of == operation
            ]
            rows.append((operation, " > ".join(used), "; ".join(unused)))
        return rows

    def log_rows(self) -> None:
        for operation, used, unused in self.rows():
            log.info("kernels of %s: %s%s", operation, used, f"; not {unused}" if unused else "")

    def __str__(self) -> str:
        """A line per operation: implementations in order of preference, the first that fits the
        number of tokens in brackets is used; behind the bar those that cannot be used.
        """
        rows = self.rows()
        wide = max(len(operation) for operation, _, _ in rows)
        return "\n".join(
            f"{operation:<{wide}}  {used}" + (f"  | not: {unused}" if unused else "")
            for operation, used, unused in rows
        )

    def _entries(self) -> Iterator[Resolved]:
        for found in self._operations.values():
            yield from found


def _key(operation: str, weight_format: str) -> str:
    return f"{operation}[{weight_format}]" if weight_format else operation
