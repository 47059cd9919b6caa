"""The `triptych` command with the subcommands serve, ask, chat, key, bench and demo.

Only the subcommand that runs is imported, so that `ask` does not need the services' packages and
`--version` is fast. Invalid arguments end in one line and exit status 2.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from triptych.options import (
    CARD_SHARE,
    DEFAULT_PORT,
    DEMONSTRATION_MODEL,
    DEVICE,
    LOOPBACK,
    ServeOptions,
)

_LOG_LEVELS = ("debug", "info", "warning", "error")
# Options of vLLM that do not exist here, each with the hint that the error message gives.
_ELSEWHERE = {
    "--pipeline-parallel-size": "use --tensor-parallel N to divide a model among N cards",
    "--data-parallel-size": "use --decoders N, which runs one decoder per card",
    "--enable-lora": "LoRA is not supported",
    "--limit-mm-per-prompt": "export GATEWAY_MAX_IMAGES and GATEWAY_MAX_VIDEOS",
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
    parser = _Parser(prog="triptych", description="Serves vision-language and text models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_ask(commands)
    _add_chat(commands)
    _add_key(commands)
    commands.add_parser("bench", help="measure a server under load (see: triptych bench --help)")
    demo = commands.add_parser("demo", help="start the stack and ask about sample images and clips")
    demo.set_defaults(run=_demo)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"triptych {version('triptych')}")
        except PackageNotFoundError:
            print("triptych (run from a source tree, not installed)")
        parser.exit()


def _add_serve(commands: "argparse._SubParsersAction[_Parser]") -> None:
    serve = commands.add_parser("serve", help="serve a model on this machine", allow_abbrev=False)
    _add_model_options(serve)
    _add_api_options(serve)
    _add_card_options(serve)
    _add_process_options(serve)
    logs = serve.add_argument_group("logs").add_argument
    least = "lowest level of the services' records that is shown; default: warning"
    logs("--log-level", choices=_LOG_LEVELS, default="warning", help=least)
    form = (
        "json: each line is an object; text: each line begins with its time, except on a terminal"
    )
    logs("--log-format", choices=("text", "json"), default="text", help=form)
    logs("--access-log", action="store_true", help="show a line for each request")
    serve.set_defaults(run=_serve)


def _add_model_options(serve: argparse.ArgumentParser) -> None:
    group = serve.add_argument_group("model")
    model = group.add_argument
    once = group.add_mutually_exclusive_group().add_argument
    kind = "ORG/NAME|DIR"
    what = (
        "name of a model on the Hugging Face hub, or a checkpoint directory; default: the "
        "demonstration model"
    )
    once("model", nargs="?", type=Path, metavar=kind, help=what)
    once("--model", dest="model_option", type=Path, metavar=kind, help="the same")
    model("--revision", help="branch, tag or commit of a model on the hub; pin a commit")
    name = (
        "names of the model in requests, of which answers have the first; default: its name on the "
        "hub, or the directory's"
    )
    model("--served-model-name", dest="served_names", nargs="+", metavar="NAME", help=name)
    template = "file with a chat template (Jinja) to use instead of the checkpoint's"
    model("--chat-template", type=Path, metavar="FILE", help=template)
    kwargs = (
        "template variables for requests that do not set them, for instance "
        "'{\"enable_thinking\": false}'"
    )
    option = "--default-chat-template-kwargs"
    model(option, dest="template_defaults", metavar="JSON", help=kwargs)
    generation = (
        "entries that replace those of the checkpoint's generation_config.json, for instance "
        "'{\"temperature\": 0.2}'"
    )
    model("--override-generation-config", dest="generation", metavar="JSON", help=generation)
    dtypes = ("auto", "float32", "bfloat16", "float16")
    dtype = "data type of weights and caches; auto: bfloat16 on a GPU, float32 on a CPU"
    model("--dtype", choices=dtypes, help=dtype)
    model("--load-format", choices=("auto", "dummy"), help="dummy: use random weights")
    model("--quantization", choices=("fp8",), help="quantize weights while they are read")
    bits = (
        "data type of the KV cache; fp8: 8 bits, which doubles the context; auto: that of the "
        "checkpoint's quantization, or else --dtype"
    )
    model("--kv-cache-dtype", choices=("auto", "fp8", "fp8_e4m3"), help=bits)


def _add_api_options(serve: argparse.ArgumentParser) -> None:
    api = serve.add_argument_group("API").add_argument
    api("--host", help=f"address of the API; default: {LOOPBACK}")
    api("--port", type=_port, help=f"port of the API; default: {DEFAULT_PORT}; 0: any free port")
    key = "API key that requests must have; all users of this machine can see it"
    api("--api-key", metavar="KEY", help=key)
    prometheus = f"address of the metrics endpoint; default: {LOOPBACK}"
    api("--metrics-host", default=LOOPBACK, metavar="ADDRESS", help=prometheus)
    port = (
        "port of the metrics endpoint, which has the metrics of all processes; default: any free "
        "port, which is printed"
    )
    api("--metrics-port", type=_port, default=0, metavar="PORT", help=port)


def _add_card_options(serve: argparse.ArgumentParser) -> None:
    cards = serve.add_argument_group("cards and memory").add_argument
    device = "cuda: all visible cards; cuda:N: one card; cpu; auto: all cards, or else the CPU"
    cards("--device", type=_device, default="auto", help=device)
    encoders = "device of the encoders, instead of --device"
    cards("--encoder-device", type=_device, metavar="DEVICE", help=encoders)
    decoders = "device of the decoders, instead of --device"
    cards("--decoder-device", type=_device, metavar="DEVICE", help=decoders)
    ranks = "number of cards of each decoder, which share the model; default: 1"
    names = ("--tensor-parallel", "--tensor-parallel-size", "-tp")
    cards(*names, type=_count, metavar="N", help=ranks)
    layout = (
        "both: an encoder and a decoder on each card; split: E cards of encoders and D cards of "
        "decoders; auto: chosen by the share of encoding in the work, which is printed"
    )
    cards("--layout", default="auto", metavar="both|split:E+D|auto", help=layout)
    share = f"share of each card's memory to use; default: {CARD_SHARE:g}"
    cards(
        "--gpu-memory-utilization",
        dest="memory_share",
        type=_share,
        default=CARD_SHARE,
        metavar="SHARE",
        help=share,
    )
    length = (
        "largest number of tokens of a prompt and its answer; default: the model's limit, or less "
        "if the memory allows less"
    )
    cards("--max-model-len", type=_length, metavar="N", help=length)
    running = "largest number of running sequences; default: 256 on a GPU, 64 on a CPU"
    cards("--max-num-seqs", type=_running, metavar="N", help=running)


def _add_process_options(serve: argparse.ArgumentParser) -> None:
    processes = serve.add_argument_group("processes").add_argument
    decoders = "number of decoders; default: by --layout"
    processes("--decoders", type=_count, metavar="N", help=decoders)
    encoders = "number of encoders; default: by --layout, or 0 for a text model"
    processes("--encoders", type=_count, metavar="N", help=encoders)
    gateways = "number of gateways; default: one per four cores, at most 4"
    processes("--gateways", type=_count, metavar="N", help=gateways)
    redis = "Redis to use instead of starting one; a URL without a password"
    processes("--redis-url", metavar="URL", help=redis)
    links = (
        "connections between the services; unix: sockets in a private directory; tcp: ports on "
        "loopback; default: unix"
    )
    processes("--grpc", choices=("unix", "tcp"), default="unix", help=links)


def _add_server(command: argparse.ArgumentParser) -> None:
    default = f"http://{LOOPBACK}:{DEFAULT_PORT}"
    url = f"URL of the server, with or without /v1; default: {default}"
    command.add_argument("--url", default=default, help=url)
    key = "API key; default: OPENAI_API_KEY of the environment"
    command.add_argument("--api-key", metavar="KEY", help=key)
    model = "name of the model; default: the first that the server lists"
    command.add_argument("--model", metavar="NAME", help=model)
    tokens = "largest number of tokens of an answer"
    command.add_argument("--max-tokens", type=_positive, metavar="N", help=tokens)


def _add_ask(commands: "argparse._SubParsersAction[_Parser]") -> None:
    what = "ask a running server a question, with or without images and clips"
    ask = commands.add_parser("ask", help=what)
    words = "images and clips (files or http(s) URLs) and one question, in any order"
    ask.add_argument("words", nargs="+", metavar="IMAGE|QUESTION", help=words)
    _add_server(ask)
    ask.set_defaults(run=_ask)


def _add_chat(commands: "argparse._SubParsersAction[_Parser]") -> None:
    what = "chat with a running server; images and clips are given by path"
    chat = commands.add_parser("chat", help=what)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_server(chat)
    chat.set_defaults(run=_chat)


def _add_key(commands: "argparse._SubParsersAction[_Parser]") -> None:
    key = commands.add_parser("key", help="make an API key and its entry in the key file")
    key.add_argument("tenant", help="tenant that the key belongs to")
    key_id = "name of the key; default: the tenant's name and the date"
    key.add_argument("--id", default=None, help=key_id)
    file = "key file to add the entry to; default: print the entry"
    key.add_argument("--file", type=Path, metavar="KEYS.JSON", help=file)
    key.set_defaults(run=_key)


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
