"""What clients name again later, in Redis: for all gateways of one installation.

An entry is a string with a time to live. An index beside it has the sizes and when each entry was
used, so that one script puts an entry and takes away those that it has no room beside. An entry
that Redis evicts by itself stays in the index until its hour is over.
"""

import logging
import time
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from services.common.errors import Unavailable
from services.gateway.kept import KEPT_S, MAX_BYTES, MAX_TENANT_BYTES
from services.gateway.redis_script import RedisScript

log = logging.getLogger(__name__)

PREFIX = "triptych:kept:"
_TIMEOUT_S = 1.0
# After a failure Redis is left alone for so long: no answer waits for it twice.
_SILENCE_S = 1.0
_OVERHEAD_BYTES = 256

# KEYS: what all keys begin with. ARGV: what to do; tenant; name; time to live in ms; to put also
# the bytes that the tenant and all may have, and the data.
# Keys: `<tenant>/<name>`: an entry; `@sizes`: hash of bytes by entry, and `@` for the sum;
# `@used`, `@used:<tenant>`: when entries were used; `@tenants`: bytes by tenant.
_SCRIPT = f"""
local prefix, what, tenant, ttl = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[4])
local entry = tenant .. '/' .. ARGV[3]
local sizes, used, tenants = prefix .. '@sizes', prefix .. '@used', prefix .. '@tenants'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function forget(entry)
  local owner = string.match(entry, '^[^/]*')
  local size = tonumber(redis.call('HGET', sizes, entry) or 0)
  redis.call('HDEL', sizes, entry)
  redis.call('ZREM', used, entry)
  redis.call('ZREM', used .. ':' .. owner, entry)
  if size > 0 then
    redis.call('HINCRBY', sizes, '@', -size)
    if tonumber(redis.call('ZINCRBY', tenants, -size, owner)) <= 0 then
      redis.call('ZREM', tenants, owner)
    end
  end
  return redis.call('DEL', prefix .. entry)
end
local function touch()
  redis.call('ZADD', used, now, entry)
  redis.call('ZADD', used .. ':' .. tenant, now, entry)
end
if what == 'delete' then return forget(entry) end
if what == 'get' then
  local data = redis.call('GET', prefix .. entry)
  if data then
    redis.call('PEXPIRE', prefix .. entry, ttl)
    touch()
  else
    forget(entry)
  end
  return data
end
local most_of_tenant, most, data = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local size = #data + #entry + {_OVERHEAD_BYTES}
forget(entry)
if size > most_of_tenant or size > most then return 0 end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', used, '-inf', now - ttl, 'LIMIT', 0, 128)) do
  forget(old)
end
local function make_room(owner_of, held, limit)
  while held() + size > limit do
    local oldest = redis.call('ZRANGE', used .. ':' .. owner_of(), 0, 0)[1]
    if not oldest then return end
    forget(oldest)
  end
end
make_room(function() return tenant end,
  function() return tonumber(redis.call('ZSCORE', tenants, tenant) or 0) end, most_of_tenant)
make_room(function() return redis.call('ZREVRANGE', tenants, 0, 0)[1] or '' end,
  function() return tonumber(redis.call('HGET', sizes, '@') or 0) end, most)
redis.call('SET', prefix .. entry, data, 'PX', ttl)
touch()
redis.call('HSET', sizes, entry, size)
redis.call('HINCRBY', sizes, '@', size)
redis.call('ZINCRBY', tenants, size, tenant)
return 1
"""


class RedisKept:
    """Entries of all gateways of one Redis.

    Args:
        url, password_file: of Redis, see `redis_login`.
        max_tenant_bytes, max_bytes: of one tenant, of all.
    """

    terms = (
        "Gateways keep what they have answered in Redis: an hour after the last use at most, until "
        "newer entries need the room or Redis restarts"
    )

    def __init__(
        self,
        url: str,
        max_tenant_bytes: int = MAX_TENANT_BYTES,
        max_bytes: int = MAX_BYTES,
        *,
        password_file: Path | None = None,
    ) -> None:
        self._max_bytes = max_tenant_bytes, max_bytes
        self._redis = RedisScript(
            url, password_file, _SCRIPT, connect_timeout_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S
        )
        self._silent_until = 0.0

    async def get(self, tenant: str, name: str) -> bytes | None:
        return await self._run("get", tenant, name)

    async def put(self, tenant: str, name: str, data: bytes) -> bool:
        try:
            return bool(await self._run("put", tenant, name, *self._max_bytes, data))
        except Unavailable:
            return False

    async def delete(self, tenant: str, name: str) -> bool:
        return bool(await self._run("delete", tenant, name))

    async def close(self) -> None:
        await self._redis.close()

    async def _run(self, what: str, tenant: str, name: str, *more: object) -> Any:  # noqa: ANN401
        try:
            if time.monotonic() < self._silent_until:
                raise OSError("it has just failed")
            return await self._redis.run(PREFIX, what, tenant, name, round(KEPT_S * 1e3), *more)
        except (RedisError, OSError) as error:
            if time.monotonic() >= self._silent_until:
                self._silent_until = time.monotonic() + _SILENCE_S
                log.warning("Redis does not keep what clients name later: %s", error)
            message = "what is kept for later requests cannot be reached now"
            raise Unavailable(message, retry_after_s=_SILENCE_S) from None
