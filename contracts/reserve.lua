-- Reserves every limit of one request in one step, or nothing at all.
--
-- KEYS[1] reservation   KEYS[2] open (zset)   KEYS[3] key states (hash)
-- ARGV[1] msgpack map:
--   rid, member (of `open`), now_ms, deadline_ms, key_id, key_state ("active:7"), owner (opaque text),
--   rates:   list of {key, limit, amount, meter}   token bucket: `limit` a minute, refilled evenly
--   leases:  list of {key, limit}                  running requests, expiring at deadline + 60 s
--   budgets: list of {key, limit, amount, required} nano-units; compared and added, never multiplied. A `limit` in
--            the hash, written by billing, replaces the one here; `required`: there must be one. After the hash's
--            `ends_ms` what was spent is of the period before
-- All keys carry the organisation's shard tag (those in ARGV too: same slot, so legal in a cluster).
--
-- Returns {1, "ok", {remaining, reset_ms per rate ...}}
--         {0, kind, index (from 0), retry_after_ms, available, {remaining, reset_ms per rate ...}}
--                                               kind = rate | lease | budget
--         {-1, "unknown_key" | "key_changed", current}  the caller loads the key's state and repeats
--         {-2, "duplicate"}                             this rid is reserved already
--         {-3, "budget_unknown", index}                 Redis lost the budget; billing writes it again
-- Bucket levels are kept in thousandths of a token so that refill loses nothing to rounding.

local a = cmsgpack.unpack(ARGV[1])
local now = a.now_ms
local MAX_EXACT = 9007199254740992

local state = redis.call('HGET', KEYS[3], a.key_id)
if not state then return {-1, 'unknown_key', ''} end
if state ~= a.key_state then return {-1, 'key_changed', state} end
if redis.call('EXISTS', KEYS[1]) == 1 then return {-2, 'duplicate'} end

-- A gateway whose clock is behind must not set a bucket's clock back: the same minute would refill it twice.
local function level_of(key, limit)
  local capacity = limit * 1000
  local stored = redis.call('HMGET', key, 'level', 'at')
  if not stored[1] then return capacity, now end
  local at = tonumber(stored[2])
  local elapsed = math.max(0, now - at)
  return math.min(capacity, tonumber(stored[1]) + math.floor(elapsed * capacity / 60000)), math.max(now, at)
end

local levels, times = {}, {}
for i, r in ipairs(a.rates) do levels[i], times[i] = level_of(r.key, r.limit) end

-- What each rate leaves, with (1) or without (0) what this request takes.
local function left(taken)
  local flat = {}
  for i, r in ipairs(a.rates) do
    local level = levels[i] - taken * r.amount * 1000
    flat[#flat + 1] = math.max(0, math.floor(level / 1000))
    flat[#flat + 1] = math.ceil((r.limit * 1000 - level) * 60 / math.max(1, r.limit))
  end
  return flat
end

for i, r in ipairs(a.rates) do
  local need = r.amount * 1000
  if need > levels[i] then
    local wait = -1
    if r.amount <= r.limit then wait = math.ceil((need - levels[i]) * 60 / r.limit) end
    return {0, 'rate', i - 1, wait, math.floor(levels[i] / 1000), left(0)}
  end
end
for i, l in ipairs(a.leases) do
  redis.call('ZREMRANGEBYSCORE', l.key, '-inf', now)
  local running = redis.call('ZCARD', l.key)
  if running >= l.limit then return {0, 'lease', i - 1, 1000, 0, left(0)} end
end
local next_ends = {} -- of budgets whose period is over: the next one begins with nothing spent
for i, b in ipairs(a.budgets) do
  local known = redis.call('HMGET', b.key, 'limit', 'spent', 'reserved', 'ends_ms', 'next_ends_ms')
  if b.required and not known[1] then return {-3, 'budget_unknown', i - 1} end
  if known[4] and now >= tonumber(known[4]) then
    next_ends[i] = known[5] or ''
    known[2] = '0'
  end
  local limit = math.min(tonumber(known[1] or b.limit), MAX_EXACT)
  local available = limit - tonumber(known[2] or '0') - tonumber(known[3] or '0')
  if b.amount > available then return {0, 'budget', i - 1, -1, available, left(0)} end
end

for i, r in ipairs(a.rates) do
  local level = string.format('%.0f', levels[i] - r.amount * 1000)
  redis.call('HSET', r.key, 'level', level, 'at', string.format('%.0f', times[i]))
  redis.call('PEXPIRE', r.key, 120000)
end
for _, l in ipairs(a.leases) do
  redis.call('ZADD', l.key, a.deadline_ms + 60000, a.rid)
  local until_ms = string.format('%.0f', a.deadline_ms + 60000)
  redis.call('PEXPIREAT', l.key, until_ms, 'NX')
  redis.call('PEXPIREAT', l.key, until_ms, 'GT') -- a short request must not end a longer one's lease
end
for i, b in ipairs(a.budgets) do
  if next_ends[i] then
    redis.call('HSET', b.key, 'spent', '0')
    redis.call('HDEL', b.key, 'ends_ms', 'next_ends_ms')
    if next_ends[i] ~= '' then redis.call('HSET', b.key, 'ends_ms', next_ends[i]) end
  end
  redis.call('HINCRBY', b.key, 'reserved', string.format('%.0f', b.amount))
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('ZADD', KEYS[2], a.deadline_ms, a.member)
return {1, 'ok', left(1)}
