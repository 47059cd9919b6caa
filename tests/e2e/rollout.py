"""Decoders scale down and roll out behind a headless Service while answers run.

`python -m tests.e2e.rollout --streams 32 --tokens 1500` is the long run; a test makes a short one.
A pod's address leaves DNS in the moment in which its process is told to end, as Kubernetes does.
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e import handover
from tests.e2e.cluster import DEMO_MODEL, Service, wait_until
from tests.e2e.headless import DnsServer, with_resolver
from tests.noise import PATIENCE_S

_START_S = 120.0


class HeadlessDecoders:
    """Decoders with an address each and one port, and a gateway that knows their name."""

    def __init__(self, directory: Path, *, grace_s: float) -> None:
        self._directory = directory
        self._grace_s = grace_s
        self.dns = DnsServer()
        self.decoders: list[Service] = []
        first = self.add()
        self.encoder = Service(
            "encoder", directory / "encoder.log", model=DEMO_MODEL, device="cpu", dtype="float32"
        )
        self.gateway = Service(
            "gateway",
            directory / "gateway.log",
            model=DEMO_MODEL,
            served_model_name="demo",
            encoder_addresses=self.encoder.address,
            decoder_addresses=f"dns:///decoder.triptych.svc.cluster.local:{first.port}",
        )
        self.gateway.wrapper = with_resolver(directory)

    def start(self) -> None:
        self.encoder.start()
        self.gateway.start()

    def add(self) -> Service:
        """Starts a decoder; its address is in DNS at once, as `publishNotReadyAddresses` has it."""
        number = len(self.decoders) + 1
        decoder = Service(
            "decoder", self._directory / f"decoder-{number}.log",
            model=DEMO_MODEL, device="cpu", dtype="float32", shutdown_grace_s=self._grace_s,
        )  # fmt: skip
        decoder.host = f"127.0.1.{number}"
        if self.decoders:
            decoder.port = self.decoders[0].port
        self.decoders.append(decoder)
        decoder.start()
        self.dns.addresses.append(decoder.host)
        return decoder

    def remove(self, decoder: Service) -> int:
        """Deletes a pod; returns its exit status."""
        self.dns.addresses.remove(decoder.host)
        return decoder.terminate(400.0)

    def wait_for(self, num_decoders: int) -> None:
        wait_until(lambda: self._is_whole(num_decoders), _START_S, f"{num_decoders} decoders")

    def close(self) -> None:
        for service in (self.gateway, self.encoder, *self.decoders):
            service.stop()
        self.dns.close()

    def _is_whole(self, num_decoders: int) -> bool:
        gateway = self.gateway
        return gateway.answers() and (
            gateway.metric("gateway_healthy_pods", service="decoder"),
            gateway.metric("gateway_healthy_pods", service="encoder"),
        ) == (num_decoders, 1)


def run(
    directory: Path, *, num_streams: int, num_tokens: int, grace_s: float
) -> tuple[list[str], float, float]:
    """Scales 2 → 1, then replaces the one left, with streams running all the time.

    Returns:
        What was wrong or broken, the longest stream in seconds, and the number of hand-overs.
    """
    pods = HeadlessDecoders(directory, grace_s=grace_s)
    try:
        pods.start()
        pods.add()
        pods.wait_for(2)
        asker = handover.Asker(f"http://{pods.gateway.address}", num_tokens)
        undisturbed = {seed: asker.ask(seed) for seed in range(5)}
        mistakes: list[str] = []
        longest_s = 0.0

        def disturbed(remove: Service) -> None:
            nonlocal longest_s
            asker.num_chunks.clear()

            def timed(index: int) -> tuple[handover.Answer, float]:
                started = time.monotonic()
                return asker.ask(index % 5), time.monotonic() - started

            with ThreadPoolExecutor(num_streams) as pool:
                asked = [pool.submit(timed, index) for index in range(num_streams)]
                enough = 3 * min(5, num_streams)
                wait_until(lambda: sum(asker.num_chunks.values()) > enough, PATIENCE_S, "streams")
                if status := pods.remove(remove):
                    mistakes.append(f"a decoder ended with status {status}")
                for index, future in enumerate(asked):
                    answer, seconds = future.result()
                    longest_s = max(longest_s, seconds)
                    if difference := answer.differs_from(undisturbed[index % 5]):
                        mistakes.append(f"stream {index}: {difference}")

        disturbed(pods.decoders[0])  # scale-down
        pods.add()
        pods.wait_for(2)
        disturbed(pods.decoders[1])  # roll-out
        handovers = pods.gateway.metric("gateway_handovers_total")
        return mistakes, longest_s, handovers
    finally:
        pods.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--grace", type=float, default=300.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mistakes, longest_s, handovers = run(
            Path(directory),
            num_streams=arguments.streams,
            num_tokens=arguments.tokens,
            grace_s=arguments.grace,
        )
    for mistake in mistakes[:20]:
        print(mistake[:2000])
    print(
        f"2 x {arguments.streams} streams of up to {longest_s:.0f} s, grace {arguments.grace:g} s: "
        f"{len(mistakes)} wrong or broken, {handovers:.0f} handed over"
    )
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
