"""The process that decodes videos. `clip_pool` starts it.

A video stays open between two questions, and its frames are decoded in one pass.
Each question has limits of CPU time and memory, and each video has a limit of CPU time for all its
frames. The kernel ends the process by SIGPROF when the CPU time is used up, and allocations beyond
the memory limit fail. The process uses neither torch nor a device.
"""

import ctypes
import gc
import os
import time

# Before numpy, whose BLAS would start a thread per core.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # noqa: TID251

import av.logging
import msgspec
import numpy as np

from services.common.embeddings.shared_memory import ForeignMemory, NotReadable
from services.common.errors import InvalidVideo, VideoNotHeld
from services.common.process.work_limits import limited, mapped_bytes
from services.encoder.decoding.child import serve
from services.encoder.decoding.clips.container import Index, check_size, to_rgb, upright_size
from services.encoder.decoding.clips.frames import Frames, probe
from services.encoder.decoding.clips.questions import CORRUPT, TOO_SLOW, Answer, Question

VIDEO_CPU_S = 60.0  # CPU time for all frames of a video, since it was opened
_MALLOC_ARENA_MAX = -8  # the constant M_ARENA_MAX of mallopt
_TOO_LARGE = "decoding the video takes more memory than a video of its size may"


class Worker:
    """The state of the process between two questions: the open video, if there is one."""

    def __init__(self) -> None:
        self._name = ""  # name of the open video
        self._frames: Frames | None = None
        self._cpu_start_s = 0.0
        self._base_bytes = mapped_bytes()

    def answer(self, question: list[bytes], shared: np.ndarray) -> bytes:
        """Answers a question.

        Args:
            question: a single message, the encoded `Question`.
            shared: memory for the frames.

        Returns:
            The encoded `Answer`.
        """
        asked = msgspec.msgpack.decode(question[0], type=Question)
        try:
            answer = self._answer(asked, shared)
        except (InvalidVideo, VideoNotHeld) as error:
            answer = Answer(error_code=error.code, message=error.message)
        except MemoryError:
            answer = Answer(error_code=InvalidVideo.code, message=_TOO_LARGE)
        except Exception:
            # PyAV raises exceptions of many types for hostile files. Clients do not see their text.
            answer = Answer(error_code=InvalidVideo.code, message=CORRUPT)
        if answer.error_code:
            self._close()
        # PyAV's frames are in a reference cycle after their side data was read. The frames of a
        # minute of video would exceed the memory limit before the collector runs by itself.
        gc.collect()
        return msgspec.msgpack.encode(answer)

    def _answer(self, asked: Question, shared: np.ndarray) -> Answer:
        is_open = self._frames is not None and self._name == asked.file.name
        if not is_open:
            self._close()
        spent_s = time.process_time() - self._cpu_start_s if is_open else 0.0
        if spent_s >= VIDEO_CPU_S:
            raise InvalidVideo(TOO_SLOW)
        try:
            file = None if is_open else ForeignMemory(asked.file)
            known = None if is_open or asked.index is None else ForeignMemory(asked.index)
        except NotReadable:
            raise VideoNotHeld("the video is no longer held") from None
        cpu_s = min(asked.cpu_s, VIDEO_CPU_S - spent_s)
        mapped = asked.file.size_bytes + (asked.index.size_bytes if asked.index else 0)
        with limited(cpu_s, asked.memory_bytes, self._base_bytes + mapped):
            if asked.frames is None:
                assert file is not None
                return Answer(facts=probe(file.view(0, asked.file.size_bytes)))
            if file is not None:
                index = Index.decode(known.view(0, known.address.size_bytes)) if known else None
                self._frames = Frames(file.view(0, asked.file.size_bytes), index)
                self._name, self._cpu_start_s = asked.file.name, time.process_time()
            return Answer(sizes=self._write(asked.frames, shared))

    def _write(self, indices: tuple[int, int], shared: np.ndarray) -> list[tuple[int, int]]:
        """Decodes two frames into the shared memory, or one if both are the same. Returns the
        height and width of each frame written.
        """
        assert self._frames is not None
        sizes: list[tuple[int, int]] = []
        first_pixel = 0
        for index in dict.fromkeys(indices):
            frame = self._frames.frame(index, indices[1])
            height, width = upright_size(frame)
            check_size(height, width)
            size = height * width * 3
            to_rgb(frame, shared[first_pixel : first_pixel + size].reshape(height, width, 3))
            sizes.append((height, width))
            first_pixel += size
        return sizes

    def _close(self) -> None:
        if self._frames is not None:
            self._frames.close()
            self._frames = None


if __name__ == "__main__":
    # The malloc arenas of the decoder's threads would count towards the limit of memory, although
    # most of their memory is only reserved.
    ctypes.CDLL(None).mallopt(_MALLOC_ARENA_MAX, 2)
    av.logging.set_level(None)
    gc.freeze()  # excludes the imported modules from each collection
    serve(1, Worker().answer)
