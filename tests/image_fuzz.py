"""Fuzzer of image files' headers and structures: mutations of small valid files of each format.

    python -m tests.image_fuzz --cases 1000000 --decode 20000

Each case is read by the header reader, which must read or refuse it within 50 ms of CPU time and 64
MiB; with `--decode`, as many are also decoded in worker processes, where the budgets of time and
memory are an image's own. The seed of a case is its number: a failure prints it.
"""

import argparse
import io
import random
import time
from pathlib import Path

from PIL import Image

from services.common.errors import InvalidImage
from services.common.images.image_header import ImageHeader, read_header
from services.common.process.work_limits import SLACK_BYTES
from services.encoder.decoding.decode import worst_case_bytes
from services.encoder.decoding.decode_pool import DecodePool
from tests.worker_pids import worker_pids

MAX_CASE_S, MAX_CASE_BYTES = 0.05, 64 << 20
_MAX_PIXELS = 4_000_000
_TOKENS = (
    b"\xff\xd8", b"\xff\xc0", b"\xff\xc2", b"\xff\xda", b"\xff\xe1", b"\xff\xd9", b"\xff\xff",
    b"Exif\0\0", b"MM\0*", b"II*\0", b"\x01\x12\0\x03", b"IHDR", b"IDAT", b"IEND", b"eXIf",
    b"zTXt", b"iCCP", b"acTL", b"fcTL", b"fdAT", b"tRNS", b"PLTE", b"RIFF", b"VP8X", b"VP8L",
    b"VP8 ", b"ANMF", b"EXIF", b"XMP ", b"!\xf9", b"!\xff", b"!\xfe", b",", b";",
    b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x0d",
)  # fmt: skip


def seeds() -> list[bytes]:
    """Small files of each format and structure."""
    exif = Image.Exif()
    exif[0x0112] = 6
    block = exif.tobytes()
    rows = [
        ("RGB", "PNG", {}), ("P", "PNG", {"transparency": 0}), ("RGBA", "PNG", {"exif": block}),
        ("RGB", "PNG", {"save_all": True, "append_images": [Image.new("RGB", (40, 30), "red")]}),
        ("RGB", "JPEG", {"exif": block}), ("L", "JPEG", {}), ("CMYK", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True, "icc_profile": b"x" * 300}),
        ("P", "GIF", {"comment": b"x" * 300}), ("RGB", "WEBP", {"exif": block}),
        ("RGBA", "WEBP", {"lossless": True}), ("RGB", "WEBP", {"quality": 20}),
    ]  # fmt: skip
    files = []
    for mode, kind, options in rows:
        file = io.BytesIO()
        Image.linear_gradient("L").resize((40, 30)).convert(mode).save(file, kind, **options)
        files.append(file.getvalue())
    return files


def mutated(
    files: list[bytes], number: int, tokens: tuple[bytes, ...] = _TOKENS, *, head: int = 64
) -> bytes:
    """The case of that number; half of all changes are in the first `head` bytes."""
    rng = random.Random(number)
    data = bytearray(rng.choice(files))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(min(len(data), head if rng.random() < 0.5 else 1 << 20) or 1)
        match rng.randrange(6):
            case 0:
                data[place : place + 1] = bytes((rng.randrange(256),))
            case 1:
                token = rng.choice(tokens)
                data[place : place + len(token)] = token
            case 2:
                data[place:place] = rng.choice(tokens)
            case 3:
                del data[place : place + rng.randint(1, 40)]
            case 4:
                piece = data[place : place + rng.randint(1, 80)]
                data[place:place] = piece * rng.choice((1, 2, 50))
            case _:
                data[place : place + 4] = rng.choice((0, 1, 1 << 16, 1 << 31)).to_bytes(4, "big")
    return bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data)


def read(data: bytes) -> tuple[ImageHeader | None, float]:
    """The header, if there is one, and the CPU time that reading it took."""
    start = time.process_time()
    try:
        header = read_header(data, max_source_pixels=_MAX_PIXELS)
    except InvalidImage:
        header = None
    return header, time.process_time() - start


class Peak:
    """The most memory that a process has had resident since `reset`, beyond what it had then."""

    def __init__(self, pid: int | str = "self") -> None:
        self._refs = Path(f"/proc/{pid}/clear_refs")
        self._status = Path(f"/proc/{pid}/status")
        self._before = 0

    def reset(self) -> None:
        self._refs.write_text("5")  # the peak starts again at what is resident now
        self._before = self._read("VmRSS")

    def risen_bytes(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        text = self._status.read_text()
        return int(text[text.index(name) :].split(maxsplit=2)[1]) << 10


def run(num_cases: int, num_decoded: int, first: int = 0) -> dict[str, float]:
    """Runs cases; raises for one that neither reads nor refuses its file.

    Returns:
        Counts, the longest CPU time of a header in seconds, and the most memory of a header and of
        a decoder in bytes.
    """
    files = seeds()
    found: dict[str, float] = {"read": 0, "refused": 0, "decoded": 0, "damaged": 0, "longest": 0.0}
    found |= {"most": 0, "most_decoding": 0}
    pool = DecodePool(1, memory_bytes=1 << 30)
    pids = worker_pids(pool)
    mine, decoders = Peak(), Peak(pids[0])
    try:
        for number in range(first, first + num_cases):
            data = mutated(files, number)
            try:
                mine.reset()
                header, taken = read(data)
                risen = mine.risen_bytes()
                assert risen <= MAX_CASE_BYTES, f"{risen} bytes"
                found["most"] = max(found["most"], risen)
                if taken > MAX_CASE_S:  # the machine may have been busy
                    taken = min(taken, *(read(data)[1] for _ in range(5)))
                assert taken <= MAX_CASE_S, f"{taken:.3f} s"
                found["longest"] = max(found["longest"], taken)
                found["read" if header else "refused"] += 1
                if header is None or found["decoded"] + found["damaged"] >= num_decoded:
                    continue
                decoders.reset()
                try:
                    with pool.decoded(data, header) as pixels:
                        assert pixels.shape == (*header.upright_size, 3)
                    found["decoded"] += 1
                except InvalidImage:
                    found["damaged"] += 1
                assert worker_pids(pool) == pids, "it ended its decoder"
                risen = decoders.risen_bytes()
                budget = worst_case_bytes(header, len(data)) + SLACK_BYTES
                assert risen <= budget, f"{risen} of {budget} bytes in its decoder"
                found["most_decoding"] = max(found["most_decoding"], risen)
            except Exception as error:
                raise AssertionError(f"case {number}: {error}") from error
    finally:
        pool.close()
    return found


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description="Fuzzer of image files.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--decode", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    print(run(arguments.cases, arguments.decode, arguments.first))


if __name__ == "__main__":
    main()
