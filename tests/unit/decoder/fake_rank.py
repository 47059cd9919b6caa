"""A rank's process without a model, which does what its settings, a word, say."""

import os
import select
import socket
import sys
import time

from services.common.process import children
from services.common.process.parent_death import end_with_parent

word, (rank, count, parent, _, store_fd, link_fd) = children.begin()
end_with_parent(parent)
word, link = word.decode(), socket.socket(fileno=link_fd)
if word.startswith("status ") and rank == 1:
    sys.exit(int(word.partition(" ")[2]))
while True:
    if word != "silent" or rank != 2:
        link.send(b"\0")
    while word == "spins" and rank == 1:
        pass
    if select.select([link], [], [], 0.05)[0]:
        if record := link.recv(1 << 16):
            os.write(store_fd, record)
            continue
        if word == "stays":
            time.sleep(60)
        sys.exit(0)
