"""Fixtures of the contract tests."""

from tests.gateway_fixtures import (
    _pair,
    _stack,
    _thinking,
    loop_thread,
    pair,
    stack,
    thinking,
)

__all__ = ["_pair", "_stack", "_thinking", "loop_thread", "pair", "stack", "thinking"]
