"""A rank's process without a model, which does what its settings, a word, say."""

import argparse
import mmap
import os
import select
import signal
import socket
import sys
import time

from services.common.process.parent_death import end_with_parent
from services.common.process.record_ring import RingReader, ring_bytes

parser = argparse.ArgumentParser()
for name in (
    "rank",
    "count",
    "parent",
    "arena-bytes",
    "arena-fd",
    "ring-fd",
    "store-fd",
    "link-fd",
):
    parser.add_argument(f"--{name}", type=int, required=True)
given = parser.parse_args()
end_with_parent(given.parent)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
word, link = sys.stdin.read(), socket.socket(fileno=given.link_fd)
ring = RingReader(mmap.mmap(given.ring_fd, ring_bytes()), given.rank - 1)
if word.startswith("status ") and given.rank == 1:
    sys.exit(int(word.partition(" ")[2]))
while True:
    if word != "silent" or given.rank != 2:
        ring.beat()
    while word == "spins" and given.rank == 1:
        pass
    if (record := ring.read(1.0)) is not None:
        os.write(given.store_fd, record)
    readable = select.select([link], [], [], 0.05)[0]
    if readable and not link.recv(1 << 16):
        if word == "stays":
            time.sleep(60)
        sys.exit(0)
