"""Reads the facts of videos for the front, in threads of its own, for which no image waits."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from services.common.errors import InternalError, TriptychError
from services.common.process.channel import ChannelClosed
from services.encoder.decoding.media_pool import MediaPool
from services.encoder.decoding.tasks import MAX_PROBES, DecoderLost
from services.encoder.engine.front_link import FrontLink
from services.encoder.engine.messages import ProbeVideo, VideoProbed


class Prober:
    """Answers the probes of the front, which sends at most `MAX_PROBES` at a time.

    Args:
        media: processes that read the videos.
        link: connection to the front.
    """

    def __init__(self, media: MediaPool, link: FrontLink) -> None:
        self._media = media
        self._link = link
        self._threads = ThreadPoolExecutor(MAX_PROBES, "probe")

    def put(self, message: ProbeVideo) -> None:
        """Starts to read a video."""
        self._threads.submit(self._answer, message)

    def close(self) -> None:
        """Waits for the videos that are being read."""
        self._threads.shutdown()

    def _answer(self, message: ProbeVideo) -> None:
        with suppress(ChannelClosed):  # the engine's loop ends
            self._link.send(answer(self._media, message))


def answer(media: MediaPool, message: ProbeVideo) -> VideoProbed:
    """Reads the facts of a video, and returns the answer for the front. Never raises."""
    try:
        return VideoProbed(message.probe_id, media.probe(message.file))
    except TriptychError as error:
        found = error
    except Exception:
        logging.exception("reading a video failed")
        found = InternalError("the video could not be read")
    return VideoProbed(
        message.probe_id,
        error_code=found.code,
        message=found.message,
        is_certain=not isinstance(found, DecoderLost),
    )
