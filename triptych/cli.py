"""The `triptych` command: serve, ask, key, bench, demo.

Parses arguments and imports the command that runs, so that `ask` needs no services. Bad arguments
are exit status 2.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triptych.plan import DEMONSTRATION_MODEL, ServeOptions

_DEVICE_HELP = "auto, cpu or cuda:N"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv[:1] == ["bench"]:  # the load generator parses its own options
        from benchmarks.serve import main as bench_main

        return bench_main(argv[1:])
    options = _parser().parse_args(argv)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="triptych", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_ask(commands)
    _add_key(commands)
    commands.add_parser("bench", help="measure a server under load (see: triptych bench --help)")
    demo = commands.add_parser("demo", help="start the stack and ask about the sample images")
    demo.set_defaults(run=_demo)
    return parser


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    defaults = ServeOptions()
    serve = commands.add_parser(
        "serve",
        help="run gateways, encoders and decoders on this machine",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = serve.add_argument
    add(
        "--model", type=Path, default=DEMONSTRATION_MODEL, metavar="DIR|ORG/NAME", help="checkpoint"
    )
    add("--revision", default=None, help="branch, tag or commit of a model of the hub")
    add("--host", default=defaults.host, help="address of the HTTP API")
    add("--port", type=int, default=defaults.port, help="port of the HTTP API; 0: any free one")
    add("--device", default=defaults.device, help=_DEVICE_HELP)
    add("--encoder-device", default=None, metavar="DEVICE", help="instead of --device")
    add("--decoder-device", default=None, metavar="DEVICE", help="instead of --device")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default=defaults.dtype, help="of weights and embeddings")
    formats = ("auto", "dummy")
    add("--load-format", choices=formats, default=defaults.load_format, help="dummy: random")
    add("--gateways", type=_count, default=None, metavar="N", help="processes; default: by cores")
    add("--encoders", type=_count, default=None, metavar="N", help="default: 1; text model: none")
    add("--decoders", type=_count, default=defaults.decoders, metavar="N", help="processes")
    add("--redis-url", default=None, metavar="URL", help="instead of starting a Redis; no password")
    links = "between the services: sockets in a private directory, or loopback with a token"
    add("--grpc", choices=("unix", "tcp"), default=defaults.grpc, help=links)
    serve.set_defaults(run=_serve)


def _add_ask(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    ask = commands.add_parser("ask", help="ask a running server, about images or without")
    ask.add_argument("images", nargs="*", metavar="IMAGE", help="file or http(s) URL")
    ask.add_argument("question")
    ask.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    ask.add_argument("--api-key", default="", help="sent as a bearer token")
    ask.add_argument("--max-tokens", type=int, default=None, metavar="N")
    ask.set_defaults(run=_ask)


def _add_key(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    key = commands.add_parser("key", help="make an API key and its entry in the key file")
    key.add_argument("tenant", help="whose key it is")
    key.add_argument("--id", default=None, help="default: the tenant's name and the date")
    key.add_argument("--file", type=Path, metavar="KEYS.JSON", help="add the entry to this file")
    key.set_defaults(run=_key)


def _key(options: argparse.Namespace) -> int:
    from triptych.key import KeyFileError, add_entry, make_key

    key, entry = make_key(options.tenant, options.id)
    if options.file is None:
        print(f'key, shown once: {key}\nentry for "keys" in the key file: {json.dumps(entry)}')
        return 0
    try:
        add_entry(options.file, entry)
    except KeyFileError as error:
        print(f"triptych: {error}", file=sys.stderr)
        return 2
    print(key)  # alone, so that KEY=$(...) takes it
    return 0


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError("must be from 1 to 64")
    return number


def _serve(options: argparse.Namespace) -> int:
    from triptych.hub import resolve_model
    from triptych.serve import serve
    from triptych.stack import StackError

    try:
        options.model, options.served_name = resolve_model(options.model, options.revision)
    except StackError as error:
        print(f"triptych serve: {error}", file=sys.stderr)
        return error.status
    names = ServeOptions.__dataclass_fields__
    return serve(ServeOptions(**{name: getattr(options, name) for name in names}))


def _ask(options: argparse.Namespace) -> int:
    from triptych.chat import AskError, ask, first_model, question_message

    try:
        body: dict[str, Any] = {"messages": [question_message(options.images, options.question)]}
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        body["model"] = first_model(options.url, options.api_key)
        show = lambda text: print(text, end="", flush=True)
        ask(options.url, body, show, options.api_key)
    except AskError as error:
        print(f"triptych ask: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print()
    return 0


def _demo(_: argparse.Namespace) -> int:
    from triptych.demo import demo

    return demo()
