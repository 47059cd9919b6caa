"""A Lua script that limits the bytes of each tenant, and of all tenants, in one Redis.

Gateways store responses and images with the script, encoders the files that clients upload. An
index beside the entries has the size and the last use of each entry, so a single call of the script
stores an entry and evicts others: the tenant's own entries if the tenant is over its limit, else
those of the tenant with the most bytes. The new entry counts as its tenant's in that comparison. An
entry that Redis evicts by itself stays in the index until its time to live is over.

KEYS has the prefix of all keys. ARGV has

1. the operation: `get`, `put` or `delete`,
2. the entry: `<tenant>/<name>`,
3. the time to live in milliseconds,
4. for `put`: the size of the entry, the limit of its tenant, the limit of all tenants, all in
bytes,
   and the data.

A caller that writes long data itself leaves the data out. The caller uses `put` before the write,
which evicts other entries, and again afterwards, which counts the entry even if another `put` has
evicted it meanwhile.

The keys are `<tenant>/<name>` for an entry; `@sizes`, a hash of bytes by entry, with their sum as
`@`; `@used` and `@used:<tenant>`, the last uses of entries; and `@tenants`, the bytes by tenant.
The index has no time to live, so that Redis keeps it under the policy `volatile-lru`. If another
policy evicts a part of the index, the bytes of the entries in that part are no longer counted.
"""

# Bytes of a key and of the index that Redis needs for an entry in addition to its name and data.
OVERHEAD_BYTES = 256

BOUNDED_ENTRIES = """
local prefix, what, entry, ttl = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local sizes, used, tenants = prefix .. '@sizes', prefix .. '@used', prefix .. '@tenants'
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function tenant_of(entry) return string.match(entry, '^[^/]*') end
local tenant = tenant_of(entry)
local function uncount(entry)
  local owner = tenant_of(entry)
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
end
local function forget(entry)
  uncount(entry)
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
local size, most_of_tenant, most = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local data = ARGV[7]
if size > most_of_tenant or size > most then
  forget(entry)
  return 0
end
uncount(entry)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', used, '-inf', now - ttl, 'LIMIT', 0, 128)) do
  forget(old)
end
local function bytes_of(owner) return tonumber(redis.call('ZSCORE', tenants, owner) or 0) end
local function make_room(owner_of, held, limit)
  while held() + size > limit do
    local owner = owner_of()
    if not owner then return end
    local oldest = redis.call('ZRANGE', used .. ':' .. owner, 0, 0)[1]
    if oldest then
      forget(oldest)
    else
      redis.call('HINCRBY', sizes, '@', -bytes_of(owner))
      redis.call('ZREM', tenants, owner)
    end
  end
end
make_room(function() return tenant end, function() return bytes_of(tenant) end, most_of_tenant)
local function with_most()
  local owner = redis.call('ZREVRANGE', tenants, 0, 0)[1]
  local own = bytes_of(tenant)
  if owner and own > 0 and own + size >= bytes_of(owner) then return tenant end
  return owner
end
make_room(with_most, function() return tonumber(redis.call('HGET', sizes, '@') or 0) end, most)
if data then redis.call('SET', prefix .. entry, data, 'PX', ttl) end
touch()
redis.call('HSET', sizes, entry, size)
redis.call('HINCRBY', sizes, '@', size)
redis.call('ZINCRBY', tenants, size, tenant)
return 1
"""
