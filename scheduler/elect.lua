-- Takes a free leader lease under a new epoch.
--
-- KEYS[1] leader lease   KEYS[2] highest epoch given out
-- ARGV[1] scheduler id   ARGV[2] highest epoch the workers have seen   ARGV[3] lease, ms
--
-- Returns the epoch, or 0 when somebody leads.

if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[2])) + 1
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. string.format('%.0f', epoch), 'PX', ARGV[3])
return epoch
