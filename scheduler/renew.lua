-- KEYS[1] leader lease   ARGV[1] its value   ARGV[2] lease, ms; 0 = give it up
-- Returns 1, or 0 when the lease is another's or gone.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
