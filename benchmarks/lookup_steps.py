"""Lookup and predictions of one request on a simulated device: milliseconds a token by text.

    python -m benchmarks.lookup_steps
    python -m benchmarks.lookup_steps --model DIR --pairs prompt.txt:answer.txt,before.py:after.py

The engine and the lookup are the real ones, and no model runs: the answer is known, and steps take
what those of an 8B model in bf16 take on one H200 (benchmarks/LOG.md, "Speculation"). The texts are
those of `benchmarks.speculation --shapes 8b`, of which the simulation makes the same steps. With
`--pairs`, the tokenizer of the model encodes files, each pair of a prompt and its answer.
"""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.known_answers import Text, repeating_text
from benchmarks.speculation import Run, histogram, run
from services.decoder.engine.calibration import measured_cost
from services.decoder.engine.engine import Engine
from services.decoder.engine.messages import EngineInfo
from services.decoder.engine.step import Int32Array, Step, StepOutput

# Milliseconds: of a step of one token, of a step with drafts from the tokens before it to its own,
# of each of its tokens, and of a prompt and each of its tokens.
_ONE_MS, _DRAFTS_MS, _ROW_MS, _PROMPT_MS, _PROMPT_TOKEN_MS = 4.08, 4.75, 0.047, 4.0, 0.02
# Milliseconds of the host before a launch and behind a result, reckoned.
_LAUNCH_MS, _RESULT_MS = 0.22, 0.16
_VOCAB_SIZE, _PROMPT, _TOKENS = 151936, 1024, 400
_STEP_MS, _MAX_MODEL_LEN, _BLOCK = 40.0, 16384, 16


@dataclass(slots=True)
class _Pending:
    """A launched step."""

    device: "SimulatedDevice"
    done_ms: float
    token_ids: list[int]

    def is_computed(self) -> bool:
        return True

    def is_done(self) -> bool:
        return self.device.now_ms >= self.done_ms

    def put_mask(self, index: int, mask: Int32Array) -> None:
        raise NotImplementedError

    def sample(self) -> None:
        raise NotImplementedError

    def result(self) -> StepOutput:
        self.device.now_ms = max(self.device.now_ms, self.done_ms) + _RESULT_MS
        ids = np.array(self.token_ids, np.int32)
        return StepOutput(ids[:, None], np.ones(len(ids), np.int32), {})

    def drafts(self) -> None:
        """Returns None, because no layer drafts."""


@dataclass(slots=True)
class SimulatedDevice:
    """A `Runner` of one sequence with a known answer, and its clock.

    Attributes:
        info: limits of the engine.
        known: prompt and answer. Empty while steps are calibrated.
        now_ms: the clock.
    """

    info: EngineInfo
    known: Sequence[int] = ()
    now_ms: float = 0.0
    _free_ms: float = field(default=0.0, init=False)

    def clock(self) -> float:
        """Returns the simulated time in seconds."""
        return 1e-3 * self.now_ms

    def prepare(self, step: Step) -> None:
        raise NotImplementedError

    def execute(self, step: Step) -> _Pending:
        """Launches a step; see `Runner`."""
        compute = step.compute
        tokens = compute.num_tokens
        if int(compute.lengths.max()) > 1:
            ms = _PROMPT_MS + _PROMPT_TOKEN_MS * tokens
        elif compute.has_drafts:
            ms = _DRAFTS_MS + _ROW_MS * tokens - _LAUNCH_MS - _RESULT_MS
        else:
            ms = _ONE_MS + _ROW_MS * (tokens - 1)
        self.now_ms += _LAUNCH_MS
        self._free_ms = max(self._free_ms, self.now_ms) + ms
        ends = (compute.starts + compute.lengths)[compute.samples].tolist()
        known = self.known
        found = [known[min(end, len(known) - 1)] if known else 1 for end in ends]
        return _Pending(self, self._free_ms, found)


def simulate(text: Text, max_drafts: int) -> Run:
    """Runs a request.

    Args:
        text: prompt, answer and prediction.
        max_drafts: the most drafts of a step. 0 if there is no speculation.
    """
    info = EngineInfo(
        model_name="simulated", dtype="bfloat16", num_features=0, hidden=8, vocab_size=_VOCAB_SIZE,
        max_model_len=_MAX_MODEL_LEN, block_size=_BLOCK, num_blocks=2 * _MAX_MODEL_LEN // _BLOCK,
        max_num_sequences=1 + max_drafts, max_batched_tokens=128, num_weight_tokens=100_000,
    )  # fmt: skip
    device = SimulatedDevice(info)
    cost = measured_cost(device, 0.4, _STEP_MS, device.clock)
    device = SimulatedDevice(info, [*text.prompt, *text.answer])
    engine = Engine(
        device,
        overlap=True,
        step_ms=_STEP_MS,
        step_cost=copy.deepcopy(cost),
        max_drafts=max_drafts,
        clock=device.clock,
    )
    found = run(engine, [text.prompt], len(text.answer), device.clock, text.prediction)
    assert found.answers[0] == text.answer, "drafts have changed the answer"
    return found


def texts_of(options: argparse.Namespace) -> dict[str, Text]:
    """Returns the texts that the command line asks for, by name."""
    if not options.pairs:
        kinds = "quote", "json", "prediction"
        return {kind: repeating_text(kind, _PROMPT, _TOKENS, _VOCAB_SIZE) for kind in kinds}
    from services.gateway.tokenizer.tokenizer import ModelTokenizer

    tokenizer = ModelTokenizer.from_directory(options.model)
    texts: dict[str, Text] = {}
    for pair in options.pairs.split(","):
        prompt, answer = (
            tokenizer.encode_text(Path(name).read_text("utf-8")) for name in pair.split(":")
        )
        texts[pair] = Text(list(prompt), list(answer)[: options.tokens])
    return texts


def main() -> None:
    """Prints two lines for each text."""
    parser = argparse.ArgumentParser(description="Lookup on a simulated device, by text.")
    parser.add_argument("--model", type=Path, help="directory of the tokenizer")
    parser.add_argument("--pairs", default="", help="PROMPT:ANSWER,..., files of text")
    parser.add_argument("--tokens", type=int, default=_TOKENS, help="most tokens of an answer")
    parser.add_argument("--drafts", type=int, default=15, help="most drafts of a step")
    options = parser.parse_args()
    for name, text in texts_of(options).items():
        plain, found = simulate(text, 0), simulate(text, options.drafts)
        print(
            f"{name:>10}: {found.ms:6.3f} ms a token, {plain.ms / found.ms:5.2f} x, "
            f"{found.num_steps} steps, {found.num_chunks} verifications, {found.num_drafts} drafts,"
            f" {found.num_accepted} accepted",
            flush=True,
        )
        print(f"{name:>10}: {histogram(found.steps)}", flush=True)


if __name__ == "__main__":
    main()
