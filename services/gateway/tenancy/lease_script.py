"""Lua script that changes the leases of one gateway in Redis; see `lease_store`.

KEYS[1] is the hash. ARGV is:

1. the name of the gateway that reports,
2. "1" if the whole hash is to be returned as well, else "0",
3. the window, in milliseconds,
4. the time after which a gateway counts as dead, in milliseconds,
5. then, for each tenant, its name and one text of 16 numbers: the limit of each kind (-1 for a kind
   without a limit), the amount of each kind that the gateway holds, the amount of each kind that it
   wants, and 1 if it has refused a request of the tenant since its last report, else 0.

The reply is a flat list: the number of gateways that are alive; the age of the hash in
milliseconds; for each tenant the lease of each kind, then the amount of each kind that other
gateways hold; and at the end the hash, if it was asked for. All numbers are below 2^53.

A lease's field in the hash is a text of six numbers: the amount held of each kind, and 1 if the
gateway had refused requests.
"""

from services.gateway.tenancy.quota import KINDS, PIXELS

LEASE_SCRIPT = (
    f"local NUM_KINDS, NUM_WINDOW_KINDS = {len(KINDS)}, {PIXELS + 1}"
    """
local key, me, window, alive = KEYS[1], ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function numbers_of(text)
  local numbers = {}
  for number in string.gmatch(text, '%S+') do numbers[#numbers + 1] = tonumber(number) end
  return numbers
end

-- Notes that this gateway was seen, and removes gateways whose requests have all left the windows.
local state = redis.call('HGET', key, '@')
state = state and cjson.decode(state) or {began = now, seen = {}}
state.seen[me] = now
local names, num_alive, removed = {}, 0, {}
for name, seen in pairs(state.seen) do
  if now - seen > window + alive then
    removed[name] = true
  else
    names[#names + 1] = name
    if now - seen <= alive then num_alive = num_alive + 1 end
  end
end
if next(removed) then
  for _, field in ipairs(redis.call('HKEYS', key)) do
    if removed[string.match(field, ':(.*)$')] then redis.call('HDEL', key, field) end
  end
  for name in pairs(removed) do state.seen[name] = nil end
end
redis.call('HSET', key, '@', cjson.encode(state))

local reply = {num_alive, now - state.began}
for at = 5, #ARGV, 2 do
  local tenant, report, fields = ARGV[at], numbers_of(ARGV[at + 1]), {}
  for i, name in ipairs(names) do fields[i] = tenant .. ':' .. name end
  local leases = redis.call('HMGET', key, unpack(fields))

  -- others: amounts that all other gateways hold; content: the part of gateways without refusals.
  local others, content = {}, {}
  local num_refusing, has_refused = 0, report[3 * NUM_KINDS + 1]
  for kind = 1, NUM_KINDS do others[kind], content[kind] = 0, 0 end
  for i, name in ipairs(names) do
    if name ~= me and leases[i] then
      local held, is_alive = numbers_of(leases[i]), now - state.seen[name] <= alive
      local is_refusing = is_alive and held[NUM_KINDS + 1] == 1
      if is_refusing then num_refusing = num_refusing + 1 end
      for kind = 1, NUM_KINDS do
        if kind <= NUM_WINDOW_KINDS or is_alive then
          others[kind] = others[kind] + held[kind]
          if not is_refusing then content[kind] = content[kind] + held[kind] end
        end
      end
    end
  end

  local texts, sum = {}, has_refused
  for kind = 1, NUM_KINDS do
    local limit, held = report[kind], report[NUM_KINDS + kind]
    local wanted = report[2 * NUM_KINDS + kind]
    local lease = 0
    if limit >= 0 then
      local fair = math.floor((limit - content[kind]) / (num_refusing + 1))
      if num_refusing > 0 and held >= fair then wanted = math.min(wanted, fair) end
      lease = math.max(0, math.min(wanted, limit - others[kind]))
      held = math.max(held, lease)
    end
    sum = sum + held
    texts[kind] = string.format('%.0f', held)
    reply[#reply + 1] = lease
  end
  texts[NUM_KINDS + 1] = has_refused
  for kind = 1, NUM_KINDS do reply[#reply + 1] = others[kind] end
  local field = tenant .. ':' .. me
  if sum > 0 then redis.call('HSET', key, field, table.concat(texts, ' '))
  else redis.call('HDEL', key, field) end
end
if ARGV[2] == '1' then reply[#reply + 1] = redis.call('HGETALL', key) end
return reply
"""
)
