"""The three services. What must be so before anything else is imported."""

import os

# gRPC reads it at its first import. Its event engine wakes one thread more for each message than
# what it replaced, see docs/adr/0014-grpc-without-its-event-engine.md.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

# It would write a line for each handshake that fails. We write one for all, and count them.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# gRPC's handlers of fork() crash the process, or its child, now and then when a process is started
# while a channel dials. All our child processes execute a program at once and need no handlers.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
