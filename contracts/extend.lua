-- Reserves more money for a request that runs, from all its budgets or from none.
--
-- KEYS[1] reservation   KEYS[2] what was added to it (nano-units)
-- ARGV[1] nano-units
--
-- Returns {1} granted
--         {0, index (from 0), available}  one budget does not have that much
--         {-1}                            settled already

local raw = redis.call('GET', KEYS[1])
if not raw then return {-1} end
local a = cmsgpack.unpack(raw)
local MAX_EXACT = 9007199254740992

for i, b in ipairs(a.budgets) do
  local known = redis.call('HMGET', b.key, 'limit', 'spent', 'reserved')
  local limit = math.min(tonumber(known[1] or b.limit or '0'), MAX_EXACT)
  local available = limit - tonumber(known[2] or '0') - tonumber(known[3] or '0')
  if tonumber(ARGV[1]) > available then return {0, i - 1, available} end
end
for _, b in ipairs(a.budgets) do redis.call('HINCRBY', b.key, 'reserved', ARGV[1]) end
redis.call('INCRBY', KEYS[2], ARGV[1])
return {1}
