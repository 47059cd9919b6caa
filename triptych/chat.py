"""`triptych chat`: a conversation in the terminal, with images and clips by their paths.

Answers are streamed and added to the conversation. An error ends the turn, but not the chat.
"""

import argparse
import contextlib
import os
import shlex
import sys
from typing import Any

from triptych.client import AskError, Server, ask, begin, is_media, question_message

_HELP = """Write a message. To send an image or clip, write its path in the message, or /image PATH.
/clear starts a new conversation, /bye or Ctrl-D ends the chat, Ctrl-C stops an answer."""


def chat(options: argparse.Namespace) -> int:
    """Runs the chat until the end of input and returns the exit status."""
    try:
        server, body = begin(options)
    except AskError as error:
        print(f"triptych chat: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - makes `input` edit lines
    print(f"{body['model']} at {server.url}; /help lists the commands")
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
    """The messages of a conversation, and images that wait for the next message."""

    def __init__(self, system: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        if system:
            self.messages.append({"role": "system", "content": system})
        self._images: list[str] = []

    def user(self, text: str) -> bool:
        """Adds a user's message.

        Returns:
            True if the message was added. False if it only names images, which are sent with the
            next message.

        Raises:
            AskError: an image cannot be read, or `/image` has no path.
        """
        images, rest = split_images(text)
        if not rest and not images:
            raise AskError("the path is missing: /image PATH")
        message = question_message([*self._images, *images], rest)
        if not rest:
            self._images += images
            return False
        self._images = []
        self.messages.append(message)
        return True


def split_images(text: str) -> tuple[list[str], str]:
    """Divides a message into the paths and URLs of images and clips, and the remaining text."""
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe, for example, is an unclosed quote
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
            print("(will be sent with your next message)")
            return
        said: list[str] = []

        def show(piece: str) -> None:
            said.append(piece)
            print(piece, end="", flush=True)

        try:
            ask(server, body | {"messages": conversation.messages}, show)
        except KeyboardInterrupt:  # the part of the answer that was printed becomes a message
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
