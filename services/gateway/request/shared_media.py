"""The images and videos of a request with several prompts, each loaded once.

All pairs of a rerank request have the query's image, for example. `SharedMedia` loads the distinct
sources of all prompts before the first prompt runs, so that each source is fetched once, and is in
memory and in `RequestMemory` once.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from services.gateway.media.images import Image, ImageSource
from services.gateway.media.videos import Video, VideoSource
from services.gateway.prompts.prompt import Draft
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.slot import Slot

Source = ImageSource | VideoSource


@dataclass(slots=True)
class SharedMedia:
    """The loaded images and videos of a request's prompts.

    Attributes:
        service: service that loads images and videos.
        slot: admission slot of the request, whose memory counts the loaded bytes.
    """

    service: ChatService
    slot: Slot
    _images: dict[Hashable, Sequence[Image]] = field(
        default_factory=dict[Hashable, Sequence[Image]]
    )
    _videos: dict[Hashable, Sequence[Video]] = field(
        default_factory=dict[Hashable, Sequence[Video]]
    )

    async def load(self, source: Source) -> None:
        """Loads the images or the video of a source. Call it once for all sources of one key.

        Raises:
            TriptychError: see `ChatService.read_media`. Its `param` is the source's.
        """
        if isinstance(source, ImageSource):
            images, _ = await self.service.read_media(Draft([], images=[source]), self.slot)
            self._images[source.key] = images
        else:
            _, videos = await self.service.read_media(Draft([], videos=[source]), self.slot)
            self._videos[source.key] = videos

    def of(self, draft: Draft) -> tuple[list[Image], list[Video]]:
        """Returns the images and the videos of a prompt, whose sources have been loaded.

        An image or a video has the place of this prompt, and shares its bytes with all prompts.

        Raises:
            InvalidRequest: the videos of the prompt have too many frames together.
        """
        images = [
            replace(image, param=source.param)
            for source in draft.images
            for image in self._images[source.key]
        ]
        videos = [
            replace(video, param=source.param)
            for source in draft.videos
            for video in self._videos[source.key]
        ]
        if self.service.videos is not None:
            self.service.videos.check_together(videos)
        return images, videos

    def called_bytes(self, drafts: Iterable[Draft]) -> int:
        """Returns the largest number of bytes that the encode calls of any prompt carry although an
        earlier prompt's calls carry the same bytes.
        """
        most, seen = 0, set[Hashable]()
        for draft in drafts:
            keys = {source.key for source in (*draft.images, *draft.videos)}
            shared = [self._images.get(key) or self._videos.get(key) or () for key in keys & seen]
            media = [each for found in shared for each in found]
            most = max(most, sum(each.num_bytes(unit) for each in media for unit in each.units))
            seen |= keys
        return most

    def close(self) -> None:
        """Closes the files of all videos. Call it when no prompt runs any more."""
        for videos in self._videos.values():
            for video in videos:
                if video.file is not None:
                    video.file.close()
