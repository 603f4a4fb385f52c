-- Settles one request exactly once: gives back what was reserved, charges what was used, emits the usage event.
--
-- KEYS[1] reservation   KEYS[2] open (zset)   KEYS[3] usage stream   KEYS[4] settled request
-- KEYS[5] what was added to the reservation's money while the request ran
-- KEYS[6] cached prompt tokens that were given back while it ran
-- ARGV[1] msgpack map: now_ms, cost (nano-units), actual {meter -> tokens of the rate meters},
--         scopes: keys of every budget that may be about this request,
--         unreserved (optional): {rates, budgets} of a request that was let in while Redis did not answer,
--         ran: it was let in, so that there was a reservation
-- ARGV[2] the usage event (opaque bytes)      ARGV[3] milliseconds to keep KEYS[4]
--
-- Returns 1 when this call settled; 2 when it did without a reservation, which Redis has lost with its last seconds
-- (neither it nor KEYS[4] is there, and the request ran); 0 when it was settled before, a normal answer.

local raw = redis.call('GET', KEYS[1])
local s = cmsgpack.unpack(ARGV[1])
local a
if raw then
  a = cmsgpack.unpack(raw)
elseif (s.unreserved or s.ran) and redis.call('EXISTS', KEYS[4]) == 0 then
  a = s.unreserved or {rates = {}, budgets = {}}
else
  return 0
end
local now = s.now_ms
local returned

for _, r in ipairs(a.rates) do
  local reserved = r.amount
  if not raw then reserved = 0 end
  if raw and KEYS[6] and r.meter == 'uncached_prompt_tokens' then
    if not returned then returned = tonumber(redis.call('GET', KEYS[6]) or '0') end
    reserved = math.max(0, reserved - returned)
  end
  local actual = s.actual[r.meter]
  if actual == nil then actual = r.amount end
  local back = (reserved - actual) * 1000
  if back ~= 0 then
    local capacity = r.limit * 1000
    local stored = redis.call('HMGET', r.key, 'level', 'at')
    if stored[1] or not raw then
      local at = tonumber(stored[2] or now)
      local elapsed = math.max(0, now - at)
      local level = math.min(capacity, tonumber(stored[1] or capacity) + math.floor(elapsed * capacity / 60000))
      level = math.min(capacity, level + back)
      redis.call('HSET', r.key, 'level', string.format('%.0f', level), 'at', string.format('%.0f', math.max(now, at)))
      redis.call('PEXPIRE', r.key, 120000)
    end
  end
end
if returned and returned > 0 then redis.call('DEL', KEYS[6]) end
if raw then
  for _, l in ipairs(a.leases) do redis.call('ZREM', l.key, a.rid) end
end
if #a.budgets > 0 then
  local added = tonumber(redis.call('GET', KEYS[5]) or '0')
  for _, b in ipairs(a.budgets) do
    if raw then redis.call('HINCRBY', b.key, 'reserved', string.format('%.0f', 0 - b.amount - added)) end
    redis.call('HINCRBY', b.key, 'spent', string.format('%.0f', s.cost))
  end
  redis.call('DEL', KEYS[5])
end
-- A budget that was set while the request ran is charged, too, although nothing was reserved in it.
if s.cost > 0 then
  local charged = {}
  for _, b in ipairs(a.budgets) do charged[b.key] = true end
  for _, key in ipairs(s.scopes or {}) do
    if not charged[key] and redis.call('HEXISTS', key, 'limit') == 1 then
      redis.call('HINCRBY', key, 'spent', string.format('%.0f', s.cost))
    end
  end
end
if raw then
  redis.call('DEL', KEYS[1])
  redis.call('ZREM', KEYS[2], a.member)
end
redis.call('XADD', KEYS[3], '*', 'd', ARGV[2])
redis.call('SET', KEYS[4], ARGV[2], 'PX', ARGV[3])
if raw or s.unreserved then return 1 end
return 2
