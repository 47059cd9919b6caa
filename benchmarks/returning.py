"""How soon a conversation goes on whose keys and values have left the KV cache.

    python -m benchmarks.returning --url URL --conversations 20 --words 6000

Conversations begin one after the other, and then each of them goes on with another question. With
more conversations than the KV cache holds, the first ones have left it by then. Printed are the
times to the first token of both rounds; compare a server with `DECODER_KV_HOST_BYTES` with the same
server without it. `--rounds` repeats the second round.
"""

import argparse
import asyncio
import random
from statistics import median, quantiles

from benchmarks.client import Connection, Target
from benchmarks.worker import model_name
from benchmarks.workloads import WORDS, chat_body

_TIMEOUT_S = 600.0


async def measure(target: Target, conversations: int, num_words: int, rounds: int) -> None:
    """Prints a line for each round: milliseconds to the first token, and tokens of a prompt.

    Raises:
        SystemExit: a request failed.
    """
    model, connection = model_name(target), Connection(target)
    texts = [" ".join(random.Random(i).choices(WORDS, k=num_words)) for i in range(conversations)]
    for number in range(rounds + 1):
        times: list[float] = []
        num_tokens = 0
        for text in texts:
            question = " ".join(random.Random(number).choices(WORDS, k=10))
            body = chat_body(model, f"{text} {question}" if number else text, 4, [])
            sample = await connection.post(body, _TIMEOUT_S)
            if sample.error:
                raise SystemExit(f"a request failed: {sample.error}")
            times.append(1e3 * (sample.first - sample.start))
            num_tokens = sample.prompt_tokens
        last = quantiles(times, n=20, method="inclusive")[-1]
        print(
            f"{'first' if not number else 'returned'}: {median(times):.0f} ms to the first token "
            f"(p95 {last:.0f}), {len(times)} conversations, {num_tokens} tokens",
            flush=True,
        )
    connection.close()


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--url", required=True, help="address of a server")
    add("--api-key", default="", help="key of the server")
    add("--conversations", type=int, default=20, help="number of conversations")
    add("--words", type=int, default=6000, help="length of a conversation's first message")
    add("--rounds", type=int, default=2, help="how often each conversation goes on")
    options = parser.parse_args()
    target = Target.from_url(options.url, options.api_key)
    asyncio.run(measure(target, options.conversations, options.words, options.rounds))


if __name__ == "__main__":
    main()
