"""The encoders as the last tier of the decoder's embedding store."""

import time
from dataclasses import dataclass

from services.common.embeddings.store import Lookup, Tier
from services.decoder.images.embedding_fetch import EncoderFailed, EncoderFetcher, FetchProgress
from services.decoder.metrics import DecoderMetrics


@dataclass(frozen=True, slots=True)
class Fetch:
    """The encoder that a lookup calls.

    Attributes:
        encoder_address: address of the encoder.
        progress: times of the lookup's start and of the encoder's messages.
    """

    encoder_address: str
    progress: FetchProgress


class EncodersTier(Tier[Fetch]):
    """Fetches embeddings from encoders, which have them or compute them now.

    Args:
        fetcher: client of the encoders. The tier closes it.
        metrics: metrics of the decoder.
    """

    name = "encoder"

    def __init__(self, fetcher: EncoderFetcher, metrics: DecoderMetrics) -> None:
        self._fetcher = fetcher
        self._metrics = metrics

    async def find(self, lookup: Lookup[Fetch]) -> bool:
        """Fetches the embedding from the encoder that the lookup names.

        Raises:
            EncoderFailed: the encoder did not deliver the embedding.
            InvalidRequest: the encoder has found that the image cannot be encoded.
        """
        if (write := await lookup.place()) is None:
            return True
        fetch, started_at = lookup.inputs, time.monotonic()
        try:
            fetched = await self._fetcher.fetch(
                fetch.encoder_address, lookup.key, lookup.spec, write.view, fetch.progress
            )
        except EncoderFailed as error:
            self._metrics.fetch_errors.labels(error.kind).inc()
            raise
        self._metrics.fetch.observe(time.monotonic() - started_at)
        self._metrics.fetch_bytes.labels(fetched.path).inc(lookup.spec.size_bytes)
        if fetched.fell_back:
            self._metrics.fetch_fallbacks.labels("memory").inc()
        write.commit(fetched.digest)
        return True

    async def close(self) -> None:
        """Closes the connections to the encoders."""
        await self._fetcher.close()
