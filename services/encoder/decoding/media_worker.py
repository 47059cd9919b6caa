"""The processes that decode images and videos, which `media_pool` starts.

The module runs as the fork server, and each fork of it is a worker. A worker decodes images, or it
opens one video, which stays open between two tasks, so that its frames are decoded in one pass.
Each task has limits of CPU time and memory, and each video has a limit of CPU time for all its
frames. The kernel ends the worker by SIGPROF when the CPU time is used up, and allocations beyond
the memory limit fail. When the pod is short of memory, the kernel ends workers before other
processes. A worker uses neither torch nor a device.
"""

import ctypes
import gc
import mmap
import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection

# Before numpy, whose BLAS would start a thread per core.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # noqa: TID251

import av.logging
import msgspec
import numpy as np

from services.common.embeddings.shared_memory import ForeignMemory, MemoryAddress, NotReadable
from services.common.errors import InvalidImage, InvalidVideo, TriptychError, VideoNotHeld
from services.common.geometry import Size
from services.common.process.work_limits import limited, mapped_bytes, prefer_oom_kill
from services.encoder.decoding import fork_server
from services.encoder.decoding.clips.container import check_size, to_rgb, upright_size
from services.encoder.decoding.clips.frames import Frames
from services.encoder.decoding.decode import decode
from services.encoder.decoding.tasks import (
    CORRUPT,
    TOO_SLOW,
    FramesTask,
    ProbeTask,
    Result,
    StillTask,
    Task,
)

VIDEO_CPU_S = 60.0  # CPU time for all frames of a video, since the first was asked for
_MALLOC_ARENA_MAX = -8  # the constant M_ARENA_MAX of mallopt
_IMAGE_TOO_LARGE = "decoding the image takes more memory than an image of its size may"
_VIDEO_TOO_LARGE = "decoding the video takes more memory than a video of its size may"


class MediaWorker:
    """The state of a worker: the shared memory, and the video that it has opened."""

    def __init__(self) -> None:
        self._shared = np.empty(0, np.uint8)
        self._video: Frames | None = None
        self._base_bytes = 0  # mapped before the video was opened
        self._first_frame_s: float | None = None  # CPU time at which the first frame was asked for

    def serve(self, *descriptors: int) -> None:
        """Works on tasks until the engine closes the socket.

        Args:
            descriptors: those of the socket, and of the memory into which pixels are written.
        """
        channel, memory = Connection(descriptors[0]), descriptors[1]
        self._shared = np.frombuffer(mmap.mmap(memory, 0), np.uint8)
        prefer_oom_kill()
        with suppress(EOFError, ConnectionError):
            while True:
                task = msgspec.msgpack.decode(channel.recv_bytes(), type=Task)
                channel.send_bytes(msgspec.msgpack.encode(self._run(task, channel.recv_bytes())))

    def _run(self, task: Task, image: bytes) -> Result:
        if isinstance(task, StillTask):
            return self._decode_image(task, image)
        try:
            return self._decode_video(task)
        except (InvalidVideo, VideoNotHeld) as error:
            return _refusal(error)
        except MemoryError:
            return _refusal(InvalidVideo(_VIDEO_TOO_LARGE))
        except Exception:
            # PyAV raises exceptions of many types for hostile files. Clients do not see their text.
            return _refusal(InvalidVideo(CORRUPT))
        finally:
            # PyAV's frames are in a reference cycle after their side data was read. The frames of a
            # minute of video would exceed the memory limit before the collector runs by itself.
            gc.collect()

    def _decode_image(self, task: StillTask, image: bytes) -> Result:
        height, width = task.header.upright_size
        pixels = self._shared[: height * width * 3].reshape(height, width, 3)
        try:
            with limited(task.cpu_s, task.memory_bytes):
                decode(image, task.header, pixels)
        except MemoryError:
            return _refusal(InvalidImage(_IMAGE_TOO_LARGE))
        except InvalidImage as error:
            return _refusal(error)
        return Result()

    def _decode_video(self, task: ProbeTask | FramesTask) -> Result:
        cpu_s = task.cpu_s if isinstance(task, ProbeTask) else min(task.cpu_s, self._cpu_left_s())
        file = None
        if self._video is None:
            file = _mapped(task.file)
            self._base_bytes = mapped_bytes()
        with limited(cpu_s, task.memory_bytes, self._base_bytes):
            if file is not None:
                self._video = Frames(file)
            assert self._video is not None
            if isinstance(task, ProbeTask):
                return Result(self._video.facts())
            return Result(sizes=self._write_frames(self._video, task.indices))

    def _cpu_left_s(self) -> float:
        """Returns the CPU time that is left for the frames of the video.

        Raises:
            InvalidVideo: no time is left.
        """
        now_s = time.process_time()
        if self._first_frame_s is None:
            self._first_frame_s = now_s
        left_s = self._first_frame_s + VIDEO_CPU_S - now_s
        if left_s <= 0:
            raise InvalidVideo(TOO_SLOW)
        return left_s

    def _write_frames(self, video: Frames, indices: tuple[int, int]) -> list[Size]:
        """Decodes two frames into the shared memory, or one if both are the same. Returns the
        height and width of each frame written.
        """
        sizes: list[Size] = []
        first_pixel = 0
        for index in dict.fromkeys(indices):
            frame = video.frame(index)
            height, width = upright_size(frame)
            check_size(height, width)
            size = height * width * 3
            pixels = self._shared[first_pixel : first_pixel + size]
            to_rgb(frame, pixels.reshape(height, width, 3))
            sizes.append((height, width))
            first_pixel += size
        return sizes


def _mapped(address: MemoryAddress) -> memoryview:
    try:
        return ForeignMemory(address).view(0, address.size_bytes)
    except NotReadable:
        raise VideoNotHeld("the video is no longer held") from None


def _refusal(error: TriptychError) -> Result:
    return Result(error_code=error.code, message=error.message)


if __name__ == "__main__":
    # The malloc arenas of the decoder's threads would count towards the limit of memory, although
    # most of their memory is only reserved.
    ctypes.CDLL(None).mallopt(_MALLOC_ARENA_MAX, 2)
    av.logging.set_level(None)
    gc.collect()
    gc.freeze()  # excludes the imported modules from each collection, and their memory from copies
    fork_server.run(MediaWorker())
