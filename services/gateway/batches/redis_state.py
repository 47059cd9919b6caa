"""The state of batches in the Redis of all gateways of one installation.

Only the keys of leases have a time to live. Redis therefore evicts no other key under the policies
`noeviction` and `volatile-lru`.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from services.common.errors import Unavailable
from services.gateway.batches.state import Check, Write
from services.gateway.redis_script import RedisScript

log = logging.getLogger(__name__)

# Below the keys of stored responses, which the gateways' user of Redis may write. No tenant's name
# begins with `@`.
PREFIX = "triptych:kept:@batch:"
_CONNECT_TIMEOUT_S, _TIMEOUT_S = 1.0, 5.0
_LOG_PAUSE_S = 10.0

# ARGV: the operation, and its arguments; see `State`. A check is four arguments: the key, the field
# ("" for a text), "1" if a value is expected, and the value. A write is the number of its
# arguments, followed by them.
_SCRIPT = """
local prefix, what = KEYS[1], ARGV[1]
if what == 'get' then return redis.call('GET', prefix .. ARGV[2]) end
if what == 'fields' then return redis.call('HKEYS', prefix .. ARGV[2]) end
if what == 'values' then return redis.call('HMGET', prefix .. ARGV[2], unpack(ARGV, 3)) end
if what == 'members' then
  return redis.call('ZRANGEBYSCORE', prefix .. ARGV[2], '-inf', ARGV[3])
end
local at = 3
for _ = 1, tonumber(ARGV[2]) do
  local key, field, found = prefix .. ARGV[at], ARGV[at + 1], nil
  if field == '' then found = redis.call('GET', key)
  else found = redis.call('HGET', key, field) end
  if ARGV[at + 2] == '1' then
    if found ~= ARGV[at + 3] then return 0 end
  elseif found then return 0 end
  at = at + 4
end
while at <= #ARGV do
  local num, name, key = tonumber(ARGV[at]), ARGV[at + 1], prefix .. ARGV[at + 2]
  if name == 'set' and num == 4 then
    redis.call('SET', key, ARGV[at + 3], 'PX', ARGV[at + 4])
  else
    redis.call(name, key, unpack(ARGV, at + 3, at + num))
  end
  at = at + num + 1
end
return 1
"""


class RedisState:
    """State of all gateways that use one Redis.

    Args:
        url: URL of Redis, see `redis_login`.
        password_file: file with the password of the URL's user. None if the URL has the password.
    """

    def __init__(self, url: str, password_file: Path | None = None) -> None:
        self._redis = RedisScript(
            url,
            password_file,
            _SCRIPT,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            timeout_s=_TIMEOUT_S,
        )
        self._logged_at = float("-inf")

    async def get(self, key: str) -> bytes | None:
        return await self._run("get", key)

    async def fields(self, key: str) -> list[str]:
        return [name.decode() for name in await self._run("fields", key)]

    async def values(self, key: str, fields: Sequence[str]) -> list[bytes | None]:
        return await self._run("values", key, *fields) if fields else []

    async def members(self, key: str, most: float | None = None) -> list[str]:
        found = await self._run("members", key, "+inf" if most is None else most)
        return [name.decode() for name in found]

    async def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        arguments: list[object] = [len(checks)]
        for check in checks:
            is_there = "0" if check.value is None else "1"
            arguments += [check.key, check.field or "", is_there, check.value or b""]
        for write in writes:
            arguments += [len(write), *write]
        return bool(await self._run("transact", *arguments))

    async def close(self) -> None:
        await self._redis.close()

    async def _run(self, *arguments: object) -> Any:  # noqa: ANN401 - a reply
        try:
            return await self._redis.run(PREFIX, *arguments)
        except (RedisError, OSError) as error:
            if time.monotonic() - self._logged_at > _LOG_PAUSE_S:
                self._logged_at = time.monotonic()
                log.warning("batches cannot be reached in Redis: %s", error)
            full = str(error).startswith("OOM") or "maxmemory" in str(error)
            reason = "Redis has no memory left for it" if full else "Redis does not answer"
            raise Unavailable(f"batches cannot be reached: {reason}", retry_after_s=1) from None
