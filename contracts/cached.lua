-- Gives back what a running request reserved of the uncached prompt tokens and, as is known now, found cached.
--
-- KEYS[1] reservation   KEYS[2] the cached tokens that were given back, for settle.lua
-- ARGV[1] cached prompt tokens   ARGV[2] now_ms
--
-- Returns 1 when they were given back, 0 when the request is settled, or was corrected before.

local raw = redis.call('GET', KEYS[1])
if not raw or redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
local a = cmsgpack.unpack(raw)
local now, cached = tonumber(ARGV[2]), tonumber(ARGV[1])

for _, r in ipairs(a.rates) do
  if r.meter == 'uncached_prompt_tokens' then
    local stored = redis.call('HMGET', r.key, 'level', 'at')
    if stored[1] then
      local capacity = r.limit * 1000
      local at = tonumber(stored[2])
      local level = tonumber(stored[1]) + math.floor(math.max(0, now - at) * capacity / 60000)
      level = math.min(capacity, math.min(capacity, level) + math.min(cached, r.amount) * 1000)
      redis.call('HSET', r.key, 'level', string.format('%.0f', level), 'at', string.format('%.0f', math.max(now, at)))
    end
  end
end
redis.call('SET', KEYS[2], ARGV[1])
return 1
