-- Takes a free leader lease under a new epoch.
--
-- KEYS[1] leader lease   KEYS[2] highest epoch given out
-- ARGV[1] scheduler id   ARGV[2] highest epoch the workers have seen   ARGV[3] lease, ms
-- ARGV[4] 1 = take it, 0 = only look
--
-- Returns {epoch, ''}; {0, lease} when somebody leads, {0, ''} when it is free and was not taken.

local held = redis.call('GET', KEYS[1])
if held then return {0, held} end
if ARGV[4] == '0' then return {0, ''} end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[2])) + 1
redis.call('SET', KEYS[2], string.format('%.0f', epoch))
redis.call('SET', KEYS[1], ARGV[1] .. ':' .. string.format('%.0f', epoch), 'PX', ARGV[3])
return {epoch, ''}
