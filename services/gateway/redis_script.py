"""A Redis that is asked by one Lua script: what a gateway leases and keeps there.

Failures are redis-py's, and the caller's to judge; nothing is tried a second time.
"""

import hashlib
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from services.common.security.redis_login import login
from services.common.settings import SettingsError


class RedisScript:
    """The script and the connections that it runs on.

    Args:
        url, password_file: of Redis, see `redis_login`.
        text: of the script; it is given one key.
        connect_timeout_s, timeout_s: of a connection, of an answer; None: the caller bounds it.

    Raises:
        SettingsError: the URL is none of Redis.
    """

    def __init__(
        self, url: str, password_file: Path | None, text: str,
        *, connect_timeout_s: float, timeout_s: float | None,
    ) -> None:  # fmt: skip
        client: Any = Redis  # redis-py's types are partly unknown
        try:
            url, options = login(url, password_file)
            self._redis = client.from_url(
                url, protocol=2, retry=Retry(NoBackoff(), 0),
                socket_connect_timeout=connect_timeout_s, socket_timeout=timeout_s, **options,
            )  # fmt: skip
        except ValueError:  # its text may show a password
            raise SettingsError(
                "GATEWAY_REDIS_URL is no URL of Redis: redis://, rediss:// or unix://"
            ) from None
        self._text = text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, key: str, *arguments: object) -> Any:  # noqa: ANN401 - a reply
        """The script's reply; by its hash where the server knows it.

        Raises:
            RedisError, OSError: there is none.
        """
        run = self._redis.execute_command
        try:
            return await run("EVALSHA", self._sha, 1, key, *arguments)
        except NoScriptError:  # a new server
            return await run("EVAL", self._text, 1, key, *arguments)

    async def close(self) -> None:
        await self._redis.aclose()
