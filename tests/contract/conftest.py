"""Fixtures of the contract tests."""

from tests.gateway_fixtures import _pair, _stack, loop_thread, pair, stack

__all__ = ["_pair", "_stack", "loop_thread", "pair", "stack"]
