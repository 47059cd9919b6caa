"""The chat messages that a request of another API is converted into."""

from services.gateway.forms.openai import Message


class ChatMessages:
    """A list of chat messages that records from which field of the client's request each message
    was converted.

    Attributes:
        found: messages, in order.

    Args:
        paths: mapping to which the client's path of each message is added, see
            `RequestContext.paths`.
    """

    def __init__(self, paths: dict[str, str]) -> None:
        self.found: list[Message] = []
        self._paths = paths

    def add(self, message: Message, path: str) -> None:
        self._paths[f"messages[{len(self.found)}]"] = path
        self.found.append(message)
