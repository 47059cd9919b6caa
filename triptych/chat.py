"""`triptych chat`: a conversation in the terminal, with images and clips by their paths.

Answers are streamed and added to the conversation. An error ends the turn, but not the chat.
"""

import argparse
import contextlib
import os
import re
import shlex
import sys
from typing import Any

from triptych.client import AskError, Server, ask, begin, is_media, question_message

_HELP = """Write a message. To send an image or clip, write its path in the message, or /image PATH.
/text MESSAGE sends a message as it is, though it names a file that does not exist.
/clear starts a new conversation, /bye or Ctrl-D ends the chat, Ctrl-C stops an answer."""
_COMMAND = re.compile(r"/[a-z]+", re.ASCII)
# Endings that name an image or clip and nothing else, unlike `.ts`.
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic")
_ENDINGS = (*_PICTURES, ".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
# Punctuation that stands before and behind a path in a sentence.
_OPENING, _CLOSING = "([{<\"'`\u201c\u2018", ")]}>\"'`\u201d\u2019?!.,;:\u2026"


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
            AskError: an image cannot be read or does not exist, `/image` has no path, or the
                message begins with an unknown command.
        """
        command = text.split(maxsplit=1)[0]
        if command == "/text":
            images, rest = [], text[len(command) :].strip()
            if not rest:
                raise AskError("the message is missing: /text MESSAGE")
        elif command != "/image" and _COMMAND.fullmatch(command) and not os.path.exists(command):
            raise AskError(f"no such command: {command}; /help lists the commands")
        else:
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
    """Divides a message into the paths and URLs of images and clips, and the remaining text.

    Raises:
        AskError: a word has the ending of an image or clip, but there is no such file.
    """
    try:
        words = shlex.split(text)
    except ValueError:  # an apostrophe, for example, is an unclosed quote
        words = text.split()
    if words[:1] == ["/image"]:
        return [os.path.expanduser(word) for word in words[1:]], ""
    images = [image for word in words if (image := _image_in(word)) is not None]
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
    if images:
        text = re.sub(r" (?=[?!.,;:])", "", " ".join(text.split()))
    return shown, text


def _image_in(word: str) -> str | None:
    """Returns the path or URL of an image or clip that a word consists of, without punctuation
    around it. None if the word is something else.

    Raises:
        AskError: the word has the ending of an image or clip, but there is no such file.
    """
    bare = word.lstrip(_OPENING).rstrip(_CLOSING)
    for image in (word, bare):
        is_there = image.startswith(("http://", "https://")) or _is_file(image)
        if is_there and is_media(image):
            return image
    if bare.lower().endswith(_ENDINGS):
        raise AskError(
            f"there is no file {bare}, so nothing was sent; /text MESSAGE sends a message that "
            "only mentions a file"
        )
    return None


def _is_file(path: str) -> bool:
    return os.path.isfile(os.path.expanduser(path))


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
