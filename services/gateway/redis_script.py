"""Client of a Redis that runs one Lua script, used for leases and for stored entries.

Errors are those of redis-py and are handled by the caller. No command is retried.
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
    """A Lua script, and the connections to the Redis that runs it.

    Args:
        url: URL of Redis, see `redis_login`.
        password_file: file with the password of the URL's user. None if the URL has the password.
        text: text of the script, which takes one key.
        connect_timeout_s: seconds in which a connection has to be established.
        timeout_s: seconds in which Redis has to reply. None if the caller bounds the time.

    Raises:
        SettingsError: the URL is not a URL of Redis.
    """

    def __init__(
        self,
        url: str,
        password_file: Path | None,
        text: str,
        *,
        connect_timeout_s: float,
        timeout_s: float | None,
    ) -> None:
        client: Any = Redis  # redis-py's types are partly unknown
        try:
            url, options = login(url, password_file)
            self._redis = client.from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_connect_timeout=connect_timeout_s,
                socket_timeout=timeout_s,
                **options,
            )
        except ValueError:  # the error's text may contain a password
            raise SettingsError(
                "GATEWAY_REDIS_URL is no URL of Redis: redis://, rediss:// or unix://"
            ) from None
        self._text = text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, key: str, *arguments: object) -> Any:  # noqa: ANN401 - a reply
        """Runs the script and returns its reply. The text is sent only if the server lacks it.

        Args:
            key: key that the script takes.
            arguments: further arguments of the script.

        Raises:
            RedisError: Redis refused the command.
            OSError: the connection failed.
        """
        run = self._redis.execute_command
        try:
            return await run("EVALSHA", self._sha, 1, key, *arguments)
        except NoScriptError:  # the server has not seen the script yet
            return await run("EVAL", self._text, 1, key, *arguments)

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose()
