"""The `triptych` command with the subcommands serve, chat, ask, demo, bench, key and compile.

Only the subcommand that runs is imported, so that `ask` does not need the services' packages and
`--version` is fast. Invalid arguments end in one line and exit status 2.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from triptych.adapter_options import add_adapter_options
from triptych.options import (
    CARD_SHARE,
    DEFAULT_PORT,
    DEMONSTRATION_MODEL,
    DEVICE,
    LOOPBACK,
    ServeOptions,
)
from triptych.speculation_options import add_speculation_options

_LOG_LEVELS = ("debug", "info", "warning", "error")
# Options of vLLM that do not exist here, each with the hint that the error message gives.
_ELSEWHERE = {
    "--pipeline-parallel-size": "use --tensor-parallel N to divide a model among N cards",
    "--data-parallel-size": "use --decoders N, which runs one decoder per card",
    "--enable-lora": "use --adapter NAME=ORG/NAME|DIR, and --max-adapters to load more later",
    "--allowed-local-media-path": "export GATEWAY_ALLOWED_MEDIA",
    "--allowed-origins": "export GATEWAY_ALLOWED_SITES",
    "--uvicorn-log-level": "use --log-level",
    "--disable-log-requests": "requests are logged only with --access-log",
    "--media-io-kwargs": "set media_io_kwargs, or fps and num_frames of a video, in the request",
    "--trust-remote-code": "code in a checkpoint is never run",
    "--max-num-batched-tokens": "export DECODER_STEP_MS, which limits a step by its time",
    "--enable-prefix-caching": "the prefix cache is always enabled",
    "--enable-chunked-prefill": "chunked prefill is always enabled",
    "--enable-auto-tool-choice": "tool calls need no option",
    "--tool-call-parser": "the parser is chosen by the model",
    "--reasoning-parser": "the parser is chosen by the model",
    "--enable-per-request-metrics": "set include_stage_times in the request",
    "--return-tokens-as-token-ids": "set return_tokens_as_token_ids in the request",
    "--enable-force-include-usage": "set stream_options.include_usage in the request",
    "--runner": "the task is read from the checkpoint's files; --task names another",
    "--convert": "the task is read from the checkpoint's files; --task names another",
    "--hf-overrides": "models for search need none: --task rank or embed",
    "--hf_overrides": "models for search need none: --task rank or embed",
    "--speculative-config": "use --speculation lookup or mtp, and --speculation-tokens N",
    "--tokenizer": "the tokenizer of the model is used",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    After Ctrl-C or a closed pipe (as with `| head`), the status is 128 plus the signal's number, as
    usual in a shell.
    """
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output at exit and would report the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("\ntriptych: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _run(argv: list[str]) -> int:
    if argv[:1] == ["bench"]:  # the load generator parses its own options
        with _needs("bench"):
            from benchmarks.serve import main as bench_main
        return bench_main(argv[1:])
    options = build_parser().parse_args(argv)
    return options.run(options)


@contextlib.contextmanager
def _needs(extra: str) -> Iterator[None]:
    """Ends the command with a line that names `extra` if an import finds no package."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'triptych[{extra}]'"
        print(f"triptych: {missing}", file=sys.stderr)
        sys.exit(2)


class _Parser(argparse.ArgumentParser):
    # argparse lets the main parser refuse unknown arguments of a subcommand, and would thus print
    # the main parser's help. Here each parser refuses its own.
    def parse_known_args(self, *given: Any) -> Any:  # pyright: ignore  # noqa: ANN401
        found, unknown = super().parse_known_args(*given)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        words = set(re.findall(r"(?<!\S)-{1,2}[a-z][\w-]*", message))
        hints = [f"{name}: {_ELSEWHERE[name]}" for name in sorted(words & _ELSEWHERE.keys())]
        text = "; ".join([message, *hints])
        self.exit(2, f"{self.prog}: {text} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of all commands and their options."""
    parser = _Parser(
        prog="triptych",
        description="Serves vision-language and text models behind OpenAI's and Anthropic's APIs.",
        epilog="triptych COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="Print the version and exit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    _add_serve(commands)
    _add_chat(commands)
    _add_ask(commands)
    demo = "Start the demonstration model, ask about sample images and clips, and stop."
    _command(commands, "demo", demo).set_defaults(run=_demo)
    commands.add_parser("bench", help="Measure a running server under load.")
    _add_key(commands)
    _add_compile(commands)
    return parser


def _command(
    commands: "argparse._SubParsersAction[_Parser]", name: str, what: str, more: str = ""
) -> argparse.ArgumentParser:
    """Adds a command, whose help is a sentence, and more sentences on its own page."""
    text = f"{what} {more}".strip()
    return commands.add_parser(name, help=what, description=text, allow_abbrev=False)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"triptych {version('triptych')}")
        except PackageNotFoundError:
            print("triptych (run from a source tree, not installed)")
        parser.exit()


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    what = "Serve a model on this machine until Ctrl-C."
    more = (
        "Every service also reads its environment variables (GATEWAY_*, ENCODER_*, DECODER_*). "
        "Options override them."
    )
    serve = _command(commands, "serve", what, more)
    _add_model_options(serve)
    _add_api_options(serve)
    _add_card_options(serve)
    _add_process_options(serve)
    logs = serve.add_argument_group("logs").add_argument
    logs(
        "--log-level",
        choices=_LOG_LEVELS,
        default="warning",
        help="Lowest level of the services' log records that is shown. Defaults to warning.",
    )
    logs(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="With json, each line is an object. With text, each line begins with its time, except "
        "on a terminal. Defaults to text.",
    )
    logs("--access-log", action="store_true", help="Show a line for each request.")
    serve.set_defaults(run=_serve)


def _add_model_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("model")
    model = group.add_argument
    once = group.add_mutually_exclusive_group().add_argument
    kind = "ORG/NAME|DIR"
    once(
        "model",
        nargs="?",
        type=Path,
        metavar=kind,
        help="Name of a model on the Hugging Face hub, such as Qwen/Qwen3-VL-8B-Instruct, or "
        "directory of a checkpoint. Defaults to the demonstration model.",
    )
    once(
        "--model",
        dest="model_option",
        type=Path,
        metavar=kind,
        help="The model, as an option instead of an argument.",
    )
    model(
        "--revision",
        help="Branch, tag or commit of a model on the hub. A commit never changes. Defaults to the "
        "hub's default branch.",
    )
    model(
        "--served-model-name",
        dest="served_names",
        nargs="+",
        metavar="NAME",
        help="Names of the model in requests. Answers have the first name. Defaults to the name on "
        "the hub, or to the directory's name.",
    )
    model(
        "--task",
        choices=("auto", "generate", "embed", "rank"),
        help="Task of the model: generate text, embed inputs of a search as vectors, or rank "
        "documents. Defaults to auto, which is the task that the checkpoint's files name, or else "
        "generate.",
    )
    model(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="Data type of weights and caches. Defaults to auto: bfloat16 on a GPU, else float32.",
    )
    model(
        "--quantization",
        choices=("fp8",),
        help="Quantize the weights to FP8 while they are read. Defaults to the weights as stored.",
    )
    model(
        "--kv-cache-dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        help="Data type of the KV cache. fp8 takes half the memory, which doubles the context. "
        "auto follows the checkpoint's quantization, or else --dtype. Defaults to auto.",
    )
    model(
        "--load-format",
        choices=("auto", "dummy"),
        help="dummy uses random weights, so that no weights are downloaded or read. Defaults to "
        "auto, which reads the checkpoint's.",
    )
    add_adapter_options(model)
    _add_default_options(group)


def _add_default_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options that replace what a checkpoint says about prompts and sampling."""
    model = group.add_argument
    model(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="File with a chat template (Jinja) to use instead of the checkpoint's.",
    )
    model(
        "--default-chat-template-kwargs",
        dest="template_defaults",
        metavar="JSON",
        help="Template variables for requests that do not set them, for instance "
        "'{\"enable_thinking\": false}'.",
    )
    model(
        "--override-generation-config",
        dest="generation",
        metavar="JSON",
        help="Entries that replace those of the checkpoint's generation_config.json, for instance "
        "'{\"temperature\": 0.2}'.",
    )


def _add_api_options(serve: argparse.ArgumentParser) -> None:
    api = serve.add_argument_group("API").add_argument
    api(
        "--host",
        help="Address on which the API listens. 0.0.0.0 serves other machines, too, and needs an "
        f"API key. Defaults to {LOOPBACK}.",
    )
    api(
        "--port",
        type=_port,
        help=f"Port of the API. 0 takes any free port. Defaults to {DEFAULT_PORT}.",
    )
    api(
        "--limit-mm-per-prompt",
        dest="max_media",
        type=_media_limits,
        metavar="JSON",
        help='The most images and videos of a request, for instance \'{"image": 4, "video": 1}\'. '
        "Defaults to 32 images and 8 videos.",
    )
    api(
        "--api-key",
        metavar="KEY",
        help="API key that requests must have. All users of this machine can see it; the variable "
        "GATEWAY_API_KEYS hides it.",
    )
    api(
        "--metrics-host",
        default=LOOPBACK,
        metavar="ADDRESS",
        help=f"Address on which the metrics are served. Defaults to {LOOPBACK}.",
    )
    api(
        "--metrics-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="Port on which the metrics of all processes are served. Defaults to any free port, "
        "which is printed.",
    )


def _add_card_options(serve: argparse.ArgumentParser) -> None:
    cards = serve.add_argument_group("GPUs and memory").add_argument
    cards(
        "--device",
        type=_device,
        default="auto",
        help="Device of the model: cuda (all visible GPUs), cuda:N (one GPU), cpu, or auto (all "
        "GPUs if there are any, or else the CPU). Defaults to auto.",
    )
    cards(
        "--tensor-parallel",
        "--tensor-parallel-size",
        "-tp",
        type=_count,
        metavar="N",
        help="Number of GPUs that share the model of each decoder. Defaults to 1.",
    )
    cards(
        "--gpu-memory-utilization",
        dest="memory_share",
        type=_share,
        default=CARD_SHARE,
        metavar="SHARE",
        help=f"Share of each GPU's memory to use, from 0.05 to 1. Defaults to {CARD_SHARE:g}.",
    )
    cards(
        "--max-model-len",
        type=_length,
        metavar="N",
        help="Largest number of tokens of a prompt and its answer together. Defaults to the "
        "model's limit, or to less if the memory allows less.",
    )
    cards(
        "--max-num-seqs",
        type=_running,
        metavar="N",
        help="Largest number of sequences that a decoder runs at a time. Defaults to 256 on a GPU "
        "and 64 on a CPU.",
    )
    add_speculation_options(cards)
    cards(
        "--layout",
        default="auto",
        metavar="both|split:E+D|auto",
        help="What the GPUs do. both puts an encoder and a decoder on each GPU. split gives E GPUs "
        "to encoders and D GPUs to decoders. auto chooses by the share of encoding in the work, "
        "and prints the choice. Defaults to auto.",
    )
    cards(
        "--encoder-device",
        type=_device,
        metavar="DEVICE",
        help="Device of the encoders. Defaults to --device.",
    )
    cards(
        "--decoder-device",
        type=_device,
        metavar="DEVICE",
        help="Device of the decoders. Defaults to --device.",
    )


def _add_process_options(serve: argparse.ArgumentParser) -> None:
    processes = serve.add_argument_group("processes").add_argument
    processes(
        "--encoders",
        type=_count,
        metavar="N",
        help="Number of encoders. Defaults to the number that --layout gives. A text model has no "
        "encoder.",
    )
    processes(
        "--decoders",
        type=_count,
        metavar="N",
        help="Number of decoders. Defaults to the number that --layout gives.",
    )
    processes(
        "--gateways",
        type=_count,
        metavar="N",
        help="Number of gateways. Defaults to one per four cores, at most 4.",
    )
    processes(
        "--redis-url",
        metavar="URL",
        help="URL, without a password, of a Redis to use. Defaults to a private Redis, which is "
        "started if redis-server is installed.",
    )
    processes(
        "--grpc",
        choices=("unix", "tcp"),
        default="unix",
        help="Connections between the services: Unix sockets in a private directory, or TCP on "
        "loopback. Defaults to unix.",
    )


def _add_server(command: argparse.ArgumentParser) -> None:
    default = f"http://{LOOPBACK}:{DEFAULT_PORT}"
    option = command.add_argument
    option(
        "--url",
        default=default,
        help=f"URL of the server, with or without /v1. Defaults to {default}.",
    )
    option(
        "--api-key",
        metavar="KEY",
        help="API key of the server. Defaults to the variable OPENAI_API_KEY.",
    )
    option(
        "--model",
        metavar="NAME",
        help="Name of the model to ask. Defaults to the first that the server lists.",
    )
    option(
        "--max-tokens",
        type=_positive,
        metavar="N",
        help="Largest number of tokens of an answer. Defaults to the server's limit.",
    )


def _add_ask(commands: "argparse._SubParsersAction[_Parser]") -> None:
    what = "Ask a running server one question, with or without images and clips."
    ask = _command(commands, "ask", what)
    ask.add_argument(
        "words",
        nargs="+",
        metavar="IMAGE|QUESTION",
        help="Images and clips (files or URLs) and one question, in any order.",
    )
    _add_server(ask)
    ask.set_defaults(run=_ask)


def _add_chat(commands: "argparse._SubParsersAction[_Parser]") -> None:
    what = "Chat with a running server in the terminal."
    chat = _command(commands, "chat", what, "Images and clips are sent by writing their paths.")
    system = "System message, which is sent at the start of the conversation."
    chat.add_argument("--system", metavar="TEXT", help=system)
    _add_server(chat)
    chat.set_defaults(run=_chat)


def _add_key(commands: "argparse._SubParsersAction[_Parser]") -> None:
    key = _command(commands, "key", "Make an API key and its entry in the key file.")
    key.add_argument("tenant", help="Tenant to which the key belongs.")
    key_id = "Name of the key in logs. Defaults to the tenant's name and the date."
    key.add_argument("--id", default=None, help=key_id)
    file = "Key file to which the entry is added. Defaults to none: the entry is printed."
    key.add_argument("--file", type=Path, metavar="KEYS.JSON", help=file)
    key.set_defaults(run=_key)


def _add_compile(commands: "argparse._SubParsersAction[_Parser]") -> None:
    what = "Compile the decoder's attention kernels for GPUs before the first start."
    more = (
        "It takes minutes, which otherwise the first start takes, and needs a C++ compiler and the "
        "extra `cuda`."
    )
    kernels = _command(commands, "compile", what, more)
    kernels.add_argument(
        "--arch",
        default="native",
        metavar="LIST",
        help="Architectures to compile for, such as 8.9,9.0a, or native for the GPUs of this "
        "machine. Defaults to native.",
    )
    kernels.set_defaults(run=_compile)


def _within(convert: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """Makes an argument type for numbers from `low` to `high`, both included."""

    def parse(text: str) -> float:
        try:
            number = convert(text)
        except ValueError:
            number = float("nan")
        if not low <= number <= high:
            whole = "whole number" if convert is int else "number"
            raise argparse.ArgumentTypeError(f"{text} is not a {whole} from {low:,} to {high:,}")
        return number

    return parse


_MEDIA_LIMITS = '{"image": 4, "video": 1}'
# The largest values of GATEWAY_MAX_IMAGES and GATEWAY_MAX_VIDEOS.
_MOST_MEDIA = {"image": 1024, "video": 256}
_port = _within(int, 0, 65535)
_count = _within(int, 1, 64)
_positive = _within(int, 1, 1 << 30)
_length = _within(int, 2, 1 << 30)
_running = _within(int, 1, 4096)
_share = _within(float, 0.05, 1.0)


def _device(text: str) -> str:
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text} is not auto, cpu, cuda or cuda:N")
    return text


def _media_limits(text: str) -> dict[str, int]:
    """Reads the most images and videos of a request, as vLLM writes them: a number by kind, or an
    object with the number as `count`.
    """
    limits: dict[str, int] = {}
    try:
        for kind, found in json.loads(text).items():
            limits[kind] = found["count"] if isinstance(found, dict) else found
    except (ValueError, AttributeError, KeyError):
        raise argparse.ArgumentTypeError(f"{text} is not like {_MEDIA_LIMITS}") from None
    for kind, number in limits.items():
        most = _MOST_MEDIA.get(kind)
        if most is None:
            raise argparse.ArgumentTypeError(f"{kind} is neither image nor video")
        if type(number) is not int or not 0 <= number <= most:
            raise argparse.ArgumentTypeError(f"{kind}: {number} is not a number from 0 to {most}")
    return limits


def serve_options(arguments: argparse.Namespace) -> ServeOptions:
    """Converts the parsed arguments of `triptych serve`."""
    chosen = vars(arguments) | {
        "model": arguments.model or arguments.model_option or DEMONSTRATION_MODEL,
        "log_level": arguments.log_level.upper(),
    }
    names = chosen.keys() & ServeOptions.__dataclass_fields__.keys()
    return ServeOptions(**{name: chosen[name] for name in names})


def _serve(arguments: argparse.Namespace) -> int:
    from triptych.serve import serve

    return serve(serve_options(arguments), arguments.revision)


def _ask(options: argparse.Namespace) -> int:
    from triptych.client import ask_once

    return ask_once(options)


def _chat(options: argparse.Namespace) -> int:
    from triptych.chat import chat

    return chat(options)


def _key(options: argparse.Namespace) -> int:
    import json

    from triptych.key import KeyFileError, add_entry, make_key

    try:
        key, entry = make_key(options.tenant, options.id)
        if options.file is None:
            print(f'key, shown once: {key}\nentry for "keys" in the key file: {json.dumps(entry)}')
            return 0
        add_entry(options.file, entry)
    except KeyFileError as error:
        print(f"triptych: {error}", file=sys.stderr)
        return 2
    print(key)  # nothing else is printed, so that KEY=$(triptych key ...) works
    return 0


def _demo(_: argparse.Namespace) -> int:
    with _needs("all"):
        from triptych.demo import demo
    return demo()


def _compile(options: argparse.Namespace) -> int:
    from triptych.compile_kernels import compile_for

    with _needs("cuda"):
        for name in ("torch", "flashinfer"):  # imported later, with settings in the environment
            if importlib.util.find_spec(name) is None:
                raise ModuleNotFoundError(name=name)
    return compile_for(options.arch)
