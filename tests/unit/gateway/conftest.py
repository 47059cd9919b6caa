"""Fixtures of the gateway's tests: a tiny model directory and stacks over fake services."""

from pathlib import Path

import pytest

from services.common.families import read_spec
from services.common.model_spec import ModelSpec
from services.gateway.prompts.chat_template import ChatTemplate
from services.gateway.prompts.prompt import PromptBuilder
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from tests.gateway_fixtures import _pair, _stack, loop_thread, pair, stack
from tests.redis_server import redis_server
from tests.tiny_tokenizer import write_model_directory

__all__ = ["_pair", "_stack", "loop_thread", "pair", "redis_server", "stack"]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def spec(model_directory) -> ModelSpec:
    return read_spec(model_directory)


@pytest.fixture(scope="session")
def tokenizer(model_directory) -> ModelTokenizer:
    return ModelTokenizer.from_directory(model_directory)


@pytest.fixture(scope="session")
def prompts(spec, tokenizer, model_directory) -> PromptBuilder:
    template = ChatTemplate.from_directory(model_directory, tokenizer.added)
    return PromptBuilder(spec, tokenizer, template)
