"""A rank's process without a model, which does what its settings, a word, say."""

import argparse
import os
import select
import signal
import socket
import sys
import time

from services.common.process.parent_death import end_with_parent

parser = argparse.ArgumentParser()
for name in (
    "rank",
    "count",
    "parent",
    "arena-bytes",
    "arena-fd",
    "store-fd",
    "link-fd",
):
    parser.add_argument(f"--{name}", type=int, required=True)
given = parser.parse_args()
end_with_parent(given.parent)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
word, link = sys.stdin.read(), socket.socket(fileno=given.link_fd)
if word.startswith("status ") and given.rank == 1:
    sys.exit(int(word.partition(" ")[2]))
while True:
    if word != "silent" or given.rank != 2:
        link.send(b"\0")
    while word == "spins" and given.rank == 1:
        pass
    if select.select([link], [], [], 0.05)[0]:
        if record := link.recv(1 << 16):
            os.write(given.store_fd, record)
            continue
        if word == "stays":
            time.sleep(60)
        sys.exit(0)
