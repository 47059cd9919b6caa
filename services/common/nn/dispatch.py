"""The dispatch table: for each operation, its implementations in order of preference.

An implementation has an obstacle, which is the reason why a device cannot run it, and a range of
numbers of tokens for which it is the fastest. The table is resolved once, when a model is built,
from facts about the device and the model. Resolving needs no GPU, so a table can be printed for any
device. A call takes the first implementation whose range has the call's number of tokens. While
kernels warm up, an implementation that fails to compile or to launch is dropped, and the call goes
to the next implementation.
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
    """Range of numbers of tokens for which an implementation is the fastest.

    Attributes:
        least: smallest number of tokens.
        most: largest number of tokens. None if there is no limit.
        least_eager: smallest number of tokens outside a CUDA graph. It is larger than `least` if
            the implementation's launch takes the host long, which only a long step hides.
        is_faster: further condition on the number of tokens. None if there is no such condition.
        condition: description of `is_faster` for people.
    """

    least: int = 1
    most: int | None = None
    least_eager: int = 1
    is_faster: Callable[[int], bool] | None = None
    condition: str = ""

    def has(self, num_tokens: int, *, captured: bool) -> bool:
        """Returns whether the range has `num_tokens`, inside a CUDA graph if `captured`."""
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
    """Makes an `Implementation.tokens` that is 1 to `most` tokens, regardless of the facts."""
    return lambda _: TokenRange(1, most)


@dataclass(frozen=True)  # with slots, `Implementation[Facts](...)` fails in Python 3.11
class Implementation(Generic[FactsT]):
    """A way to compute an operation. An operation's last implementation is plain torch.

    Attributes:
        operation: name of the operation. All its implementations take the same arguments.
        name: name of the implementation in logs, metrics and overrides.
        create: function that imports the kernel and binds it to the facts. It is called once,
            before the first use. None is returned if the caller has to compose the operation from
            several operations of the table.
        obstacle: function that returns why the implementation cannot run for these facts, or "".
        tokens: function that returns the numbers of tokens for which it is the fastest.
        rival: name of an implementation that is faster for other numbers of tokens. If the rival
            cannot run or is dropped, `tokens` does not apply, and any number is in the range. Empty
            if `tokens` always applies.
    """

    operation: str
    name: str
    create: Callable[[FactsT], Kernel | None]
    obstacle: Callable[[FactsT], str] = lambda _: ""
    tokens: Callable[[FactsT], TokenRange] = lambda _: TokenRange()
    rival: str = ""


class UnknownOverride(ValueError):
    """A setting names an operation or an implementation that does not exist or cannot run."""


def parse_overrides(text: str) -> dict[str, str]:
    """Parses `operation=implementation,...` into a dictionary.

    The entry `plain` selects the last implementation of every operation and has the key `*`.

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
    """An implementation that can run, and the number of its calls."""

    operation: str
    name: str
    tokens: TokenRange
    create: Callable[[], Kernel | None]
    key: str  # of the table: the operation, with the weight format if rows are per format
    rival: str = ""
    num_calls: int = 0

    @cached_property
    def kernel(self) -> Kernel | None:
        """The kernel that `Implementation.create` made, in a wrapper that counts the calls."""
        if (kernel := self.create()) is None:
            return None

        def counted(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - the kernel's
            self.num_calls += 1
            return kernel(*arguments, **keywords)

        return counted


@dataclass(slots=True)
class CapturedCalls:
    """Calls that were captured into one CUDA graph. The graph's owner counts the replays."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    num_replays: int = 0


class KernelTable(Generic[FactsT]):
    """The implementations that can run on this device, by operation.

    Attributes:
        rejected: reasons why implementations are not used, by (operation, implementation).
        is_captured: True while calls are captured into a CUDA graph, whose kernels the host does
            not launch one by one.
        is_warming_up: True while the failure of an implementation makes `call` try the next.
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
        """Makes a table of the implementations that can run for these facts.

        Args:
            implementations: rows of the table, each operation's in order of preference.
            facts: facts about the device and the model.
            overrides: result of `parse_overrides`. An implementation that it names is used for any
                number of tokens. If an operation has rows per weight format, the name has to exist
                for at least one format.
            by_format: facts and rows of the operations that depend on the weight format, by format.
                See `choose`.

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
        refused: dict[str, str] = {}  # reason why an override cannot be applied, by operation
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
        """Adds the implementations of an operation that can run, or only the wanted one."""
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
                resolved = Resolved(entry.operation, entry.name, tokens, create, key, entry.rival)
                found.append(resolved)
        self._operations[key] = found
        _widen(found)
        return found

    def include(self, other: "KernelTable[Any]") -> None:
        """Adds another table's operations to the logs and counts of this table.

        The tables have no operation in common. Both warm up and are captured together.
        """
        self._included.append(other)
        self._operations |= other._operations
        self.rejected |= other.rejected
        other.rejected = self.rejected

    @property
    def operations(self) -> Collection[str]:
        return self._operations.keys()

    def has(self, entry: Resolved) -> bool:
        """Returns whether an implementation can run here and was not dropped."""
        return entry in self._operations[entry.key]

    def usable(self, operation: str) -> list[Resolved]:
        """Implementations of an operation that can run here, in order of preference."""
        return list(self._operations[operation])

    def choose(self, operation: str, num_tokens: int, weight_format: str = "") -> Resolved:
        """Returns the first implementation of an operation whose range has `num_tokens`.

        If the operation has rows for `weight_format`, only these are considered.
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
        """Runs the operation. `num_tokens` defaults to the length of the first argument."""
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
        """Stops using an implementation that failed.

        Returns:
            True if the caller can try again. False if the implementation did not cause the error
            (out of memory, or a failed capture) or if it is the operation's last.
        """
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if isinstance(error, torch.OutOfMemoryError) or captures:
            return False
        found = self._operations[entry.key]
        if entry not in found:  # a nested call of the same implementation has dropped it already
            return True
        if entry is found[-1]:
            return False
        why = f"{type(error).__name__}: {error}".splitlines()[0][:_MAX_REASON]
        found.remove(entry)
        _widen(found)
        log.warning(
            "%s: %s failed and is not used, which leaves %s: %s",
            entry.operation,
            entry.name,
            " > ".join(each.name for each in found),
            why,
        )
        self.rejected[entry.key, entry.name] = f"failed: {why}"
        return True

    def in_use(self) -> dict[str, list[str]]:
        """Names of the implementations that can run, in order of preference, by table key."""
        return {key: [entry.name for entry in found] for key, found in self._operations.items()}

    def keep(self, names: Mapping[str, Collection[str]]) -> None:
        """Drops all implementations except those named, so that all ranks use the same.

        Args:
            names: names of the implementations to keep, by table key.

        Raises:
            ValueError: no implementation of an operation is named.
        """
        for key, found in self._operations.items():
            for entry in [entry for entry in found if entry.name not in names[key]]:
                found.remove(entry)
                self.rejected[key, entry.name] = "another rank does not use it"
            _widen(found)
            if not found:
                raise ValueError(f"{key}: ranks have no implementation in common")

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Context in which an implementation that fails is replaced by the next.

        Calls and replays in it are not counted.
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
        """Context in which the calls of one CUDA graph are recorded.

        The owner counts the replays in the result. Before the capture, the owner has to run the
        step once without a graph inside `for_graph`, which compiles the kernels.
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
        """Context in which implementations are chosen as in a CUDA graph."""
        was, self.is_captured = self.is_captured, True
        try:
            with ExitStack() as stack:
                for other in self._included:
                    stack.enter_context(other.for_graph())
                yield
        finally:
            self.is_captured = was

    def calls(self) -> Counter[tuple[str, str]]:
        """Number of calls so far, with those of replayed graphs, by (operation, implementation)."""
        total: Counter[tuple[str, str]] = Counter()
        for entry in self._entries():
            total[entry.operation, entry.name] += entry.num_calls
        for graph in self._graphs:
            for key, count in graph.calls.items():
                total[key] += count * graph.num_replays
        return +total

    def rows(self) -> list[tuple[str, str, str]]:
        """Rows for logs: (operation, implementations in use, implementations not in use).

        The former have their numbers of tokens, and the latter the reason.
        """
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
        """The table as text, with a line per operation.

        A line has the implementations in order of preference, with the numbers of tokens in
        brackets, and behind the bar the implementations that cannot be used.
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


def _widen(found: Sequence[Resolved]) -> None:
    """Lets implementations serve any number of tokens whose rival is not among those in use."""
    names = {entry.name for entry in found}
    for entry in found:
        if entry.rival and entry.rival not in names:
            entry.tokens = TokenRange()


def _key(operation: str, weight_format: str) -> str:
    return f"{operation}[{weight_format}]" if weight_format else operation
