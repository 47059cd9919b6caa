"""`triptych chat`: a conversation in the terminal, with images and clips by their paths.

What the server answers is streamed and kept as the history. An error ends the turn, not the chat.
"""

import argparse
import contextlib
import os
import shlex
import sys
from typing import Any

from triptych.client import AskError, Server, ask, begin, is_media, question_message

_HELP = """Write a message. A path of an image or clip in it, or /image PATH, shows it.
/clear begins anew, /bye or Ctrl-D ends, Ctrl-C stops an answer."""


def chat(options: argparse.Namespace) -> int:
    """Talks until the end of input; returns the exit status."""
    try:
        server, body = begin(options)
    except AskError as error:
        print(f"triptych chat: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited
    print(f"{body['model']} at {server.url}; /help says what can be written")
    conversation = Conversation(options.system)
    while (text := _read()) is not None:
        if text == "/bye":
            break
        if text == "/help":
            print(_HELP)
        elif text == "/clear":
            conversation = Conversation(options.system)
        elif text:
            _turn(server, body, conversation, text)
    return 0


class Conversation:
    """The messages so far."""

    def __init__(self, system: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self._images: list[str] = []

    def user(self, text: str) -> bool:
        """Adds a user's message; False: it only shows an image, which goes with the next one.

        Raises:
            AskError: an image cannot be read, or none is named.
        """
        images, rest = split_images(text)
        if not rest and not images:
            raise AskError("which one? /image PATH")
        message = question_message([*self._images, *images], rest)
        if not rest:
            self._images += images
            return False
        self._images = []
        self.messages.append(message)
        return True


def split_images(text: str) -> tuple[list[str], str]:
    """Paths and URLs of images and clips in a message, and the text without them."""
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe is no quote
        words = text.split()
    if words[:1] == ["/image"]:
        return [os.path.expanduser(word) for word in words[1:]], ""
    images = [word for word in words if _is_shown(word)]
    for image in images:
        for form in (
            f'"{image}"',
            f"'{image}'",
            shlex.quote(image),
            image.replace(" ", "\\ "),
            image,
        ):
            if form in text:
                text = text.replace(form, "", 1)
                break
    shown = [os.path.expanduser(image) for image in images]
    return shown, " ".join(text.split()) if images else text


def _is_shown(word: str) -> bool:
    is_there = word.startswith(("http://", "https://")) or os.path.isfile(os.path.expanduser(word))
    return is_there and is_media(word)


def _turn(server: Server, body: dict[str, Any], conversation: Conversation, text: str) -> None:
    before = list(conversation.messages)
    try:
        if not conversation.user(text):
            print("(shown with your next message)")
            return
        said: list[str] = []

        def show(piece: str) -> None:
            said.append(piece)
            print(piece, end="", flush=True)

        try:
            ask(server, body | {"messages": conversation.messages}, show)
        except KeyboardInterrupt:  # what was said stays
            print(" (stopped)", end="")
        print()
        conversation.messages.append({"role": "assistant", "content": "".join(said)})
    except AskError as error:
        conversation.messages = before
        print(f"{error}", file=sys.stderr)


def _read() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        return None
