"""The leases of all gateways in one Redis hash, changed by one script: one command a round trip.

The hash has a field `<tenant>:<gateway>` for each lease, five numbers (the kinds of `quota`), and
`@`: when the hash began to be, and when each gateway was seen last. A gateway says what it holds in
full each time, so a command may be lost, or arrive twice. What a gateway holds counts for a window
after it was seen last, because its requests do; what it holds at a time, for a few seconds.

The leases are one key, so that they are there or not as a whole: a Redis that evicts or forgets
them begins anew, and the script's answer says how long ago that was.

A gateway that had to refuse requests since it told last is short. While another one is, a gateway
that holds more than a fair part takes no more: so gateways that all have more to do than they may
come to hold the same, which is what each has when Redis is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.redis_script import RedisScript
from services.gateway.tenancy.quota import KINDS, PIXELS

KEY = "triptych:limits"
_KINDS, _IN_WINDOW = len(KINDS), PIXELS + 1
_CONNECT_TIMEOUT_S = 1.0

# KEYS: the hash. ARGV: this gateway; whether all tenants' leases are asked for; the window in ms;
# `alive_s` in ms; then for each tenant its name, and in one text 16 numbers: its limits (-1: none),
# what is held, what is wanted, and whether it is short.
# Answer: gateways alive; age of the hash in ms; for each tenant what may be used, then what others
# hold; the hash, if all is asked for. Numbers are below 2^53. A field of the hash has what is held,
# and whether it is short.
_SCRIPT = f"""
local key, me, window, alive = KEYS[1], ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local state = redis.call('HGET', key, '@')
state = state and cjson.decode(state) or {{began = now, seen = {{}}}}
state.seen[me] = now
local names, num_alive, gone = {{}}, 0, {{}}
for name, seen in pairs(state.seen) do
  if now - seen > window + alive then
    gone[name] = true
  else
    names[#names + 1] = name
    if now - seen <= alive then num_alive = num_alive + 1 end
  end
end
if next(gone) then
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if gone[string.match(field, ':(.*)$')] then redis.call('HDEL', key, field) end
  end
  for name in pairs(gone) do state.seen[name] = nil end
end
redis.call('HSET', key, '@', cjson.encode(state))
local answer = {{num_alive, now - state.began}}
for at = 5, #ARGV, 2 do
  local tenant, numbers, fields = ARGV[at], {{}}, {{}}
  for number in string.gmatch(ARGV[at + 1], '%S+') do numbers[#numbers + 1] = tonumber(number) end
  for i, name in ipairs(names) do fields[i] = tenant .. ':' .. name end
  local leases, others, calm = redis.call('HMGET', key, unpack(fields)), {{}}, {{}}
  local num_short, short = 0, numbers[{3 * _KINDS + 1}]
  for kind = 1, {_KINDS} do others[kind], calm[kind] = 0, 0 end
  for i, name in ipairs(names) do
    if name ~= me and leases[i] then
      local held, is_alive = {{}}, now - state.seen[name] <= alive
      for number in string.gmatch(leases[i], '%S+') do held[#held + 1] = tonumber(number) end
      local is_short = is_alive and held[{_KINDS + 1}] == 1
      if is_short then num_short = num_short + 1 end
      for kind = 1, {_KINDS} do
        if kind <= {_IN_WINDOW} or is_alive then
          others[kind] = others[kind] + held[kind]
          if not is_short then calm[kind] = calm[kind] + held[kind] end
        end
      end
    end
  end
  local texts, sum = {{}}, short
  for kind = 1, {_KINDS} do
    local limit, held = numbers[kind], numbers[{_KINDS} + kind]
    local want = numbers[{2 * _KINDS} + kind]
    local lease = 0
    if limit >= 0 then
      local fair = math.floor((limit - calm[kind]) / (num_short + 1))
      if num_short > 0 and held >= fair then want = math.min(want, fair) end
      lease = math.max(0, math.min(want, limit - others[kind]))
      held = math.max(held, lease)
    end
    sum = sum + held
    texts[kind] = string.format('%.0f', held)
    answer[#answer + 1] = lease
  end
  texts[{_KINDS + 1}] = short
  for kind = 1, {_KINDS} do answer[#answer + 1] = others[kind] end
  local field = tenant .. ':' .. me
  if sum > 0 then redis.call('HSET', key, field, table.concat(texts, ' '))
  else redis.call('HDEL', key, field) end
end
if ARGV[2] == '1' then answer[#answer + 1] = redis.call('HGETALL', key) end
return answer
"""


@dataclass(frozen=True, slots=True)
class Asked:
    """One tenant's part of a question; five numbers each.

    Attributes:
        limits: -1: none.
        held: what this gateway keeps, whatever others have.
        wanted: what it would like to have.
        is_short: it has refused requests since it told last.
    """

    tenant: str
    limits: Sequence[int]
    held: Sequence[int]
    wanted: Sequence[int]
    is_short: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What Redis says.

    Attributes:
        gateways: those seen in the last seconds, this one included.
        age_s: since the first lease was written.
        rows: in the order of the question, what this gateway may use (less than it holds, if it is
            to take nothing), and what all other gateways hold.
        of_others: by tenant, of all tenants; None: not asked for.
    """

    gateways: int
    age_s: float
    rows: list[tuple[list[int], list[int]]]
    of_others: dict[str, list[int]] | None


class LeaseStore:
    """The hash, for one gateway.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        gateway: a name that no other gateway has.
        alive_s: as `leases.Times.alive`.
        password_file: password of the URL's user, read at each connection; None: the URL's.
    """

    def __init__(
        self,
        url: str,
        gateway: str,
        window_s: float,
        alive_s: float,
        password_file: Path | None = None,
    ) -> None:
        self._gateway = gateway
        self._times = str(round(window_s * 1e3)), str(round(alive_s * 1e3))
        # Waiting for the answer is bounded by the caller.
        self._redis = RedisScript(
            url, password_file, _SCRIPT, connect_timeout_s=_CONNECT_TIMEOUT_S, timeout_s=None
        )

    async def ask(self, asked: Sequence[Asked], *, all_tenants: bool = False) -> Answer:
        """Says what this gateway holds, and obtains what it may have.

        Raises:
            RedisError, OSError: there is no answer.
        """
        arguments = [self._gateway, "1" if all_tenants else "0", *self._times]
        for row in asked:
            numbers = (*row.limits, *row.held, *row.wanted, int(row.is_short))
            arguments += [row.tenant, " ".join(map(str, numbers))]
        found: list[Any] = await self._redis.run(KEY, *arguments)
        starts = range(2, 2 + 2 * _KINDS * len(asked), 2 * _KINDS)
        rows = [(found[at : at + _KINDS], found[at + _KINDS : at + 2 * _KINDS]) for at in starts]
        of_others = self._of_others(found[-1]) if all_tenants else None
        return Answer(found[0], found[1] / 1e3, rows, of_others)

    async def close(self) -> None:
        await self._redis.close()

    def _of_others(self, pairs: Sequence[bytes]) -> dict[str, list[int]]:
        """Sums over the other gateways; `pairs` are fields and values in turn."""
        sums: dict[str, list[int]] = {}
        for field, value in zip(pairs[::2], pairs[1::2], strict=True):
            tenant, _, gateway = field.decode().partition(":")
            if gateway and gateway != self._gateway:
                found = sums.setdefault(tenant, [0] * _KINDS)
                for kind, number in enumerate(value.split()[:_KINDS]):
                    found[kind] += int(number)
        return sums
