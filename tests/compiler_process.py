"""A compiler in a process of its own: it forks, which a process with other threads may not."""

import multiprocessing
import os
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from services.decoder.masks.compile_worker import Compiler
from services.decoder.masks.compiler import Vocabulary
from services.decoder.masks.grammar import GrammarSource
from services.decoder.masks.messages import Verdict
from tests.noise import PATIENCE_S


class CompilerProcess:
    """The compiler's methods, called there."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def compile(self, task: GrammarSource) -> Verdict:
        return self._call("compile", task)

    def memory_bytes(self, most: int) -> None:
        """Limits further grammars to so much memory."""
        self._call("memory_bytes", most)

    @property
    def pid(self) -> int:
        """Of the fork."""
        return self._call("pid", None)

    def _call(self, name: str, argument: object) -> Any:
        self._connection.send((name, argument))
        assert self._connection.poll(PATIENCE_S), f"{name}: no answer"
        return self._connection.recv()


@contextmanager
def compiler_process(
    model: Path, vocab_size: int, end_ids: tuple[int, ...], **options: Any
) -> Generator[CompilerProcess]:
    """A compiler for a model's vocabulary."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(
        target=_serve, args=(theirs, model, vocab_size, end_ids, options), daemon=True
    )
    process.start()
    theirs.close()
    with mine:
        yield CompilerProcess(mine)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    process.close()


def _serve(
    connection: Connection, model: Path, vocab_size: int, end_ids: tuple[int, ...],
    options: dict[str, Any],
) -> None:  # fmt: skip
    vocabulary = Vocabulary.read(model, vocab_size, end_ids)
    compiler = Compiler(vocabulary, **options)
    while True:
        try:
            name, argument = connection.recv()
        except EOFError:
            break
        answer: object = None
        if name == "compile":
            answer = compiler.compile(argument)
        elif name == "memory_bytes":
            compiler.memory_bytes = argument
            compiler.close()  # the fork has the limit before
        else:
            answer = getattr(compiler, name)
        connection.send(answer)
    compiler.close()
    os._exit(0)  # leaves out what only slows an exit
