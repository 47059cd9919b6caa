"""Fuzzer of video files' headers and structures: mutations of small valid files of each container.

    python -m tests.video_fuzz --cases 100000

Each case is probed in a worker process, and two frames of what it takes for a video are decoded,
within a video's own limits of time and memory. The seed of a case is its number: a failure prints
it. A decoder that a case ends is counted, and its place taken by another.
"""

import argparse
import os
import time

from services.common.embeddings.shared_memory import MemoryAddress, create_memory
from services.common.errors import InvalidVideo
from services.common.process.work_limits import SLACK_BYTES
from services.encoder.decoding.clips.clip_pool import PROBE_BYTES, ClipPool
from tests.image_fuzz import Peak, mutated
from tests.videos import KINDS, av1, make
from tests.worker_pids import worker_pids

MAX_CASE_S = 5.0
_TOKENS = (
    b"ftyp", b"moov", b"mdat", b"stts", b"stsz", b"stco", b"co64", b"stsc", b"ctts", b"stss",
    b"elst", b"tkhd", b"mdhd", b"dref", b"url ", b"cmov", b"moof", b"trun", b"sidx", b"free",
    b"\x1aE\xdf\xa3", b"\x18S\x80g", b"\x15I\xa9f", b"\x16T\xaek", b"\x1fC\xb6u", b"\xa3", b"\xec",
    b"RIFF", b"AVI ", b"LIST", b"movi", b"idx1", b"00dc", b"strh", b"strf", b"OggS", b"FLV\x01",
    b"\x47\x40", b"\0\0\x01\xba", b"\0\0\x01\xe0", b"\0\0\x01\xb3", b"\0\0\x01", b"acTL", b"fcTL",
    b"!\xf9", b",", b"file:///etc/passwd", b"http://127.0.0.1/", b"#EXTM3U",
    b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x01",
)  # fmt: skip


def seeds() -> list[bytes]:
    """Small files of each container and codec."""
    files = [av1(), *(make(kind, frames=5) for kind in KINDS)]
    files.append(make(frames=5, rotation=90, times=[0, 1, 4, 5, 9]))
    files.append(make(frames=5, container_options={"movflags": "frag_every_frame+empty_moov"}))
    return files


def run(num_cases: int, first: int = 0) -> dict[str, float]:
    """Runs cases; raises for one that neither decodes nor is refused.

    Returns:
        Counts, of decoders ended, too; the longest wall time of a case in seconds and the most
        memory of a decoder in bytes.
    """
    files = seeds()
    found: dict[str, float] = {"refused": 0, "decoded": 0, "damaged": 0, "ended": 0, "longest": 0.0}
    found["most"] = 0
    pool = ClipPool(1, memory_bytes=0)
    _try(pool, files[0], found)
    found["decoded"] = 0
    (pid,) = worker_pids(pool)
    peak = Peak(pid)
    try:
        for number in range(first, first + num_cases):
            try:
                peak.reset()
                started = time.monotonic()
                data = mutated(files, number, _TOKENS, head=1024) or b"\0"
                _try(pool, data, found)
                taken = time.monotonic() - started
                if worker_pids(pool) != [pid]:
                    found["ended"] += 1
                    print(f"case {number} ended its decoder", flush=True)
                    (pid,) = worker_pids(pool)
                    _try(pool, files[0], {"decoded": 0})
                    peak = Peak(pid)
                    continue
                risen = peak.risen_bytes()
                for _ in range(4):
                    if taken <= MAX_CASE_S:
                        break
                    started = time.monotonic()  # the machine may have been busy
                    _try(pool, data, dict.fromkeys(found, 0.0))
                    taken = min(taken, time.monotonic() - started)
                assert taken <= MAX_CASE_S, f"{taken:.1f} s"
                assert risen <= PROBE_BYTES + SLACK_BYTES, f"{risen} bytes"
                found["longest"] = max(found["longest"], taken)
                found["most"] = max(found["most"], risen)
            except Exception as error:
                raise AssertionError(f"case {number}: {error}") from error
    finally:
        pool.close()
    return found


def _try(pool: ClipPool, data: bytes, found: dict[str, float]) -> None:
    fd, name = create_memory(len(data))
    os.pwrite(fd, data, 0)
    file = MemoryAddress(os.getpid(), fd, name, len(data))
    try:
        try:
            facts = pool.probe(file)
        except InvalidVideo:
            found["refused"] += 1
            return
        assert facts.num_frames >= 1 and facts.height > 0 and facts.width > 0
        assert 0 <= facts.rate < float("inf") and 0 <= facts.duration_s < float("inf")
        assert len(facts.frame_digests) == 16 * facts.num_frames
        try:
            size = facts.height, facts.width
            with pool.frames(file, size, (0, facts.num_frames - 1)) as frames:
                assert all(pixels.ndim == 3 for pixels in frames)
            found["decoded"] += 1
        except InvalidVideo:
            found["damaged"] += 1
    finally:
        os.close(fd)


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description="Fuzzer of video files.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    print(run(arguments.cases, arguments.first))


if __name__ == "__main__":
    main()
