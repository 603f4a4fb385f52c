-- Brings one budget up to date: its limit, its period, and what was spent as far as billing knows better.
--
-- KEYS[1] budget (hash)
-- ARGV: limit ('' = none, 'keep' = as it is), ends_ms, next_ends_ms ('' = no periods), delta
-- A period that is not the one in the hash starts with nothing spent.
-- `delta` is added to `spent`, which never falls below 0.
--
-- Returns {spent, reserved} after all that, as text.

local ends = redis.call('HGET', KEYS[1], 'ends_ms')
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], 'ends_ms', 'next_ends_ms')
elseif ends ~= ARGV[3] then -- otherwise reserve.lua began the next period already
  if ends ~= ARGV[2] then redis.call('HSET', KEYS[1], 'spent', '0') end
  redis.call('HSET', KEYS[1], 'ends_ms', ARGV[2], 'next_ends_ms', ARGV[3])
end
if ARGV[4] ~= '0' then
  local spent = redis.call('HINCRBY', KEYS[1], 'spent', ARGV[4])
  if spent < 0 then redis.call('HSET', KEYS[1], 'spent', '0') end
end
if ARGV[1] == '' then
  redis.call('HDEL', KEYS[1], 'limit')
elseif ARGV[1] ~= 'keep' then
  redis.call('HSET', KEYS[1], 'limit', ARGV[1])
end
local seen = redis.call('HMGET', KEYS[1], 'spent', 'reserved')
return {seen[1] or '0', seen[2] or '0'}
