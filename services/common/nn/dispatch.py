"""One dispatch table: operation → implementations in order of preference.

An implementation says what it needs (an obstacle in words, or none) and for how many tokens it is
the fastest. The table is resolved once, when a model is built, from facts of the device and the
model. A call takes the first implementation that fits its number of tokens. While kernels warm up,
an implementation whose compilation or launch fails is dropped, and the call goes to the next.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

FactsT = TypeVar("FactsT")
Kernel = Callable[..., Any]
PLAIN = "plain"


def _always(num_tokens: int, *_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Implementation(Generic[FactsT]):
    """One way to compute an operation.

    Attributes:
        operation: what it computes; all implementations take the same arguments.
        name: for people, metrics and overrides; `plain` is the specification in torch.
        create: imports it and binds it to the facts; called once, if there is no obstacle.
        obstacle: why it cannot run for these facts, or "".
        fits: whether to use it for a call of so many tokens (the first argument's length), given
            the call's other arguments; thresholds found by measurement live in these.
    """

    operation: str
    name: str
    create: Callable[[FactsT], Kernel]
    obstacle: Callable[[FactsT], str] = lambda _: ""
    fits: Callable[..., bool] = _always


class UnknownOverride(ValueError):
    """A setting names an operation or an implementation that does not exist or cannot run."""


@dataclass(slots=True)
class _Resolved:
    name: str
    kernel: Kernel
    fits: Callable[..., bool]


@dataclass(slots=True)
class KernelTable(Generic[FactsT]):
    """The implementations that can run here.

    Attributes:
        facts: what the table was resolved for.
        rejected: (operation, implementation) → why it is not used.
        calls: (operation, implementation) → calls so far; a captured call counts once.
    """

    facts: FactsT
    rejected: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _operations: dict[str, list[_Resolved]] = field(default_factory=dict[str, list[_Resolved]])
    _warming_up: bool = False

    @classmethod
    def resolve(
        cls,
        implementations: Sequence[Implementation[FactsT]],
        facts: FactsT,
        overrides: Mapping[str, str] | None = None,
    ) -> "KernelTable[FactsT]":
        """Asks each implementation whether it can run.

        Args:
            implementations: in order of preference; each operation's last one is its plain twin.
            facts: of the device and the model.
            overrides: operation → the implementation to use, whatever the number of tokens;
                `{"*": "plain"}`: plain for everything.

        Raises:
            UnknownOverride: see there.
        """
        table = cls(facts)
        overrides = dict(overrides or {})
        everything = overrides.pop("*", None)
        for entry in implementations:
            wanted = overrides.get(entry.operation, everything)
            resolved = table._operations.setdefault(entry.operation, [])
            if wanted is not None and entry.name != wanted:
                table.rejected[entry.operation, entry.name] = f"{wanted} was asked for"
            elif why := entry.obstacle(facts):
                table.rejected[entry.operation, entry.name] = why
            else:
                fits = entry.fits if wanted is None else _always
                resolved.append(_Resolved(entry.name, entry.create(facts), fits))
        if unknown := set(overrides) - set(table._operations):
            raise UnknownOverride(
                f"no operation {', '.join(sorted(unknown))}; there are: "
                f"{', '.join(sorted(table._operations))}"
            )
        for operation, found in table._operations.items():
            if not found:
                wanted = overrides.get(operation, everything)
                why = table.rejected.get(
                    (operation, str(wanted)), "there is no such implementation"
                )
                raise UnknownOverride(f"{operation}={wanted}: {why}")
        return table

    def call(self, operation: str, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
        """Runs the first implementation that fits the call."""
        num_tokens = len(arguments[0])
        for entry in self._operations[operation]:
            if not entry.fits(num_tokens, *arguments[1:]):
                continue
            if not self._warming_up:
                self.calls[operation, entry.name] += 1
                return entry.kernel(*arguments, **keywords)
            try:
                result = entry.kernel(*arguments, **keywords)
            except Exception as error:
                if entry.name == PLAIN:
                    raise
                self.drop(operation, entry.name, f"{type(error).__name__}: {error}")
                return self.call(operation, *arguments, **keywords)
            return result
        raise LookupError(f"no implementation of {operation} fits {num_tokens} tokens")

    def drop(self, operation: str, name: str, why: str) -> None:
        """Stops using an implementation that failed."""
        why = why.splitlines()[0][:200]
        log.warning("%s: %s failed and is not used: %s", operation, name, why)
        self.rejected[operation, name] = why
        found = self._operations[operation]
        found[:] = [entry for entry in found if entry.name != name]

    def rows(self) -> list[tuple[str, str, str]]:
        """(operation, implementations in use, those not used and why), for people."""
        rows: list[tuple[str, str, str]] = []
        for operation, found in self._operations.items():
            unused = [
                f"{name}: {why}" for (of, name), why in self.rejected.items() if of == operation
            ]
            rows.append((operation, " > ".join(e.name for e in found), "; ".join(unused)))
        return rows
