-- Writes placements ahead of their submission: only for the leader, and attempt n only over attempt n-1.
--
-- KEYS[1] leader lease   KEYS[2..] in-flight records, one per placement
-- ARGV[1] the leader's value of KEYS[1] ("ID:EPOCH")
-- ARGV[2..] per placement three: the attempt it replaces (0 = none), its record (msgpack), expiry (Unix ms)
--
-- Returns {} when KEYS[1] is another's: nothing was written.
-- Otherwise one number per placement: 0 = written (or this very record was there already),
-- k > 0 = refused, the record holds attempt k.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {} end
local answers = {}
for i = 2, #KEYS do
  local a = 2 + (i - 2) * 3
  local held = redis.call('GET', KEYS[i])
  local attempt = 0
  if held then attempt = cmsgpack.unpack(held).attempt end
  if attempt == tonumber(ARGV[a]) then
    redis.call('SET', KEYS[i], ARGV[a + 1], 'PXAT', ARGV[a + 2])
    answers[#answers + 1] = 0
  elseif held == ARGV[a + 1] then
    answers[#answers + 1] = 0
  else
    answers[#answers + 1] = attempt
  end
end
return answers
