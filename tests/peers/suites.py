"""The other systems whose server tests `make peers` runs: where their tests are, and which of them.

A suite's files are those whose cases ask a server of one of the APIs that the gateway serves.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Files that one pytest runs.

    Attributes:
        files: paths below the suite's `tests`.
        confcutdir: folder below `tests` above which no conftest is read.
        options: more options of pytest.
    """

    files: tuple[str, ...]
    confcutdir: str = "."
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """Another system's server tests.

    Attributes:
        name: the suite's name, which is also that of its plugin.
        version: what the counts in docs/clients.md are of, for people.
        repository: its git repository.
        revision: tag or commit, which is fetched alone.
        sparse: folders that are checked out.
        variable: environment variable that names a checkout or an unpacked source distribution.
        tests: folder that paths of files are below.
        path: folders from which the tests import.
        groups: files of the suite.
    """

    name: str
    version: str
    repository: str
    revision: str
    sparse: tuple[str, ...]
    variable: str
    tests: str
    path: tuple[str, ...]
    groups: tuple[Group, ...]


_OPENAI = "entrypoints/openai"
# Without video, audio, LoRA adapters, prompt embeddings, pooling, and a fuzzer.
VLLM = Suite(
    name="vllm",
    version="0.33.0",
    repository="https://github.com/vllm-project/vllm",
    revision="v0.33.0",
    sparse=("tests", "vllm/entrypoints"),
    variable="VLLM_SOURCE",
    tests="tests",
    path=(".",),
    groups=(
        Group(
            (
                *(f"{_OPENAI}/chat_completion/test_{name}.py" for name in (
                    "chat", "chat_completion", "chat_echo", "chat_logit_bias_validation",
                    "completion_with_function_calling", "enable_force_include_usage",
                    "extra_content_fields", "include_reasoning", "logprob_token_ids", "root_path",
                    "thinking_token_budget",
                )),
                *(f"{_OPENAI}/completion/test_{name}.py" for name in (
                    "completion", "prompt_validation", "token_in_token_out",
                )),
                f"{_OPENAI}/models/test_models.py",
                *(f"{_OPENAI}/responses/test_{name}.py" for name in (
                    "basic", "errors", "function_call", "parsable_context", "simple", "stateful",
                    "structured_output",
                )),
                *(f"{_OPENAI}/test_{name}.py" for name in (
                    "chunked_prompt", "return_token_ids", "return_tokens_as_ids",
                )),
                "entrypoints/anthropic/test_messages.py",
                "entrypoints/multimodal/openai/chat_completion/test_vision.py",
                "entrypoints/multimodal/openai/responses/test_image.py",
                *(f"entrypoints/serve/tokenize/test_{name}.py" for name in (
                    "tokenization", "tokenization_vlm", "tokenize_then_chat_vlm",
                )),
                "entrypoints/serve/instrumentator/test_basic.py",
                "entrypoints/tool_parsers/test_hermes_tool_parser.py",
            ),
            confcutdir="entrypoints",
        ),
        Group(
            (
                "tool_use/test_chat_completions.py",
                "tool_use/test_parallel_tool_calls.py",
                "tool_use/test_tool_calls.py",
            ),
            confcutdir="tool_use",
            options=("--models", "hermes", "-k", "hermes"),
        ),
    ),
)  # fmt: skip

_SGLANG = "registered/openai_server"
# Without audio, hidden states, embeddings, LoRA adapters, HTTP/2, and files of SGLang's own API.
SGLANG = Suite(
    name="sglang",
    version="main of 2026-07-27",
    repository="https://github.com/sgl-project/sglang",
    revision="a358374ae93785ba8a6df4c5cf427d89003ac28d",
    sparse=("test/registered", "test/manual", "python/sglang/test"),
    variable="SGLANG_SOURCE",
    tests="test",
    path=(),
    groups=(
        Group(
            (
                f"{_SGLANG}/basic/test_anthropic_server.py",
                f"{_SGLANG}/basic/test_openai_server.py",
                f"{_SGLANG}/features/test_json_mode.py",
                f"{_SGLANG}/features/test_openai_server_ebnf.py",
                f"{_SGLANG}/function_call/test_anthropic_tool_use.py",
                f"{_SGLANG}/function_call/test_openai_function_calling.py",
                f"{_SGLANG}/validation/test_large_max_new_tokens.py",
                f"{_SGLANG}/validation/test_matched_stop.py",
                f"{_SGLANG}/validation/test_openai_server_ignore_eos.py",
                f"{_SGLANG}/validation/test_request_length_validation.py",
                "registered/reasoning/test_reasoning.py",
                "manual/openai_server/features/test_cache_report.py",
                "manual/openai_server/features/test_continuous_usage_stats.py",
                "manual/openai_server/features/test_structural_tag.py",
                "manual/openai_server/function_call/test_tool_choice.py",
                "manual/vlm/test_anthropic_vision.py",
            ),
        ),
    ),
)

# Without embeddings, reranking, infilling, LoRA adapters, several models in one server, MCP and
# built-in tools, speculative decoding, and slots that a client saves.
LLAMA_CPP = Suite(
    name="llama_cpp",
    version="of llama-cpp-python 0.3.36",
    repository="https://github.com/ggml-org/llama.cpp",
    revision="0c1e57098bba43ac29e6e3b677cdceebdd22334f",
    sparse=("tools/server/tests", "models/templates"),
    variable="LLAMA_CPP_SOURCE",
    tests="tools/server/tests",
    path=("tools/server/tests",),
    groups=(
        Group(
            tuple(f"unit/test_{name}.py" for name in (
                "basic", "chat_completion", "compat_anthropic", "compat_oai_responses",
                "completion", "ignore_eos", "security", "tokenize", "tool_call", "vision_api",
            )),
            options=("-m", "not slow"),  # as its own script; the slow ones ask real models
        ),
    ),
)  # fmt: skip

SUITES = (VLLM, SGLANG, LLAMA_CPP)
