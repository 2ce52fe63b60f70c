"""Lua scripts of quotas in Redis. They are atomic, on Redis' own clock, and follow the rules of `policies.quota`; tests
hold both to the same.

Redis keys (those of a caller's key share a slot of a cluster; each expires):
    firsttoken:{NAME}:minute    hash: `r<second>`, `t<second>`: requests and tokens admitted in that second
    firsttoken:{NAME}:running   sorted set: unsettled reservations by expiry, ms
    firsttoken:{NAME}:held      hash: maximum cost of each running reservation, billionths of a USD
    firsttoken:{NAME}:spent     hash: by month, billionths of a USD
    firsttoken:members          sorted set: processes that enforce quotas, by expiry
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import quote

from gateway.cluster.redis_client import PREFIX
from policies.quota.sliding_window import WINDOW_S

LEASE = 60_000  # ms until a reservation without renewal expires
MEMBER = 15_000  # ms
MONTHS = 40 * 86_400_000  # ms to keep the costs of a month after the last cost
NONE = -1  # no limit
MEMBERS_KEY = PREFIX + "members"

CLOCK = "redis.call('TIME')"

_NOW = """
local time = CLOCK
local second = tonumber(time[1])
local now = second * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

# Returns: the limit that refuses (0: none), ms to wait (-1: waiting does not help), requests and tokens that count, ms
# until each resets, the second, the cost of the month.
RESERVE = """
local lease, month = ARGV[1], ARGV[2]
local tokens, cost = tonumber(ARGV[3]), tonumber(ARGV[4])
local most_requests, most_tokens = tonumber(ARGV[5]), tonumber(ARGV[6])
local most_running, most_cost = tonumber(ARGV[7]), tonumber(ARGV[8])

for _, lapsed in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('ZREM', KEYS[2], lapsed)
  redis.call('HDEL', KEYS[3], lapsed)
end

local by = {r = {}, t = {}}
local sum, last, old = {r = 0, t = 0}, {r = 0, t = 0}, {}
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local kind, at, count = string.sub(fields[i], 1, 1), tonumber(string.sub(fields[i], 2)), tonumber(fields[i + 1])
  if at < second - SPAN then
    old[#old + 1] = fields[i]
  else
    by[kind][at] = count
    sum[kind] = sum[kind] + count
    if count > 0 and at > last[kind] then last[kind] = at end
  end
end
if #old > 0 then redis.call('HDEL', KEYS[1], unpack(old)) end

local function wait(kind, excess)
  for at = second - SPAN, second do
    excess = excess - (by[kind][at] or 0)
    if excess <= 0 then return (at + SPAN + 1) * 1000 - now end
  end
  return (SPAN + 1) * 1000
end

local spent = tonumber(redis.call('HGET', KEYS[4], month) or '0')
local refused, longest = 0, -1
local function refuse(limit, ms)
  if ms < 0 then ms = 1e15 end
  if ms > longest then refused, longest = limit, ms end
end
if most_cost >= 0 then
  local held = 0
  for _, one in ipairs(redis.call('HVALS', KEYS[3])) do held = held + tonumber(one) end
  if spent + held + cost > most_cost then refuse(4, -1) end
end
if most_running >= 0 and redis.call('ZCARD', KEYS[2]) >= most_running then refuse(3, 1000) end
if most_requests >= 0 and sum.r >= most_requests then refuse(1, wait('r', sum.r + 1 - most_requests)) end
if most_tokens >= 0 and sum.t + tokens > most_tokens then
  if tokens > most_tokens then refuse(2, -1) else refuse(2, wait('t', sum.t + tokens - most_tokens)) end
end

if refused == 0 then
  redis.call('HINCRBY', KEYS[1], 'r' .. second, 1)
  redis.call('HINCRBY', KEYS[1], 't' .. second, tokens)
  redis.call('PEXPIRE', KEYS[1], (SPAN + 2) * 1000)
  redis.call('ZADD', KEYS[2], now + LEASE, lease)
  redis.call('PEXPIRE', KEYS[2], 2 * LEASE)
  if cost > 0 then
    redis.call('HSET', KEYS[3], lease, string.format('%.0f', cost))
    redis.call('PEXPIRE', KEYS[3], 2 * LEASE)
  end
  sum.r, sum.t, last.r, last.t = sum.r + 1, sum.t + tokens, second, second
end
if longest == 1e15 then longest = -1 end
local function reset(kind) if last[kind] == 0 then return 0 end return (last[kind] + SPAN + 1) * 1000 - now end
return {refused, longest, sum.r, sum.t, reset('r'), reset('t'), second, string.format('%.0f', spent)}
"""

# `let_in` 0: admitted by a process alone, `ago` s before; unless the script did too, and the answer came too late.
# `again`: sent before and possibly received; then the lease is gone.
SETTLE = """
local lease, month, let_in, ago = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local reserved, tokens, cost, again = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8] == '1'
local counted = redis.call('ZREM', KEYS[2], lease)
local told = redis.call('ZREM', KEYS[2], lease .. '~')
redis.call('HDEL', KEYS[3], lease, lease .. '~')
if again and counted + told == 0 then return 0 end
if let_in == 0 and counted == 1 then let_in = second - ago end
local function count(at, requests, more)
  if requests > 0 then redis.call('HINCRBY', KEYS[1], 'r' .. at, requests) end
  redis.call('HINCRBY', KEYS[1], 't' .. at, more)
  redis.call('PEXPIRE', KEYS[1], (SPAN + 2) * 1000)
end
if let_in == 0 then
  if ago <= SPAN then count(second - ago, 1, tokens) end
elseif tokens > reserved then
  count(second, 0, tokens - reserved)
elseif tokens < reserved and let_in >= second - SPAN and redis.call('HEXISTS', KEYS[1], 't' .. let_in) == 1 then
  count(let_in, 0, tokens - reserved)
end
if cost ~= '0' then
  redis.call('HINCRBY', KEYS[4], month, cost)
  redis.call('PEXPIRE', KEYS[4], MONTHS)
end
return 1
"""

# Takes pairs of a lease and the held cost. An unknown lease is marked by `~`: not counted here before.
RENEW = """
for i = 1, #ARGV, 2 do
  local lease = ARGV[i]
  if not redis.call('ZSCORE', KEYS[2], lease) then lease = lease .. '~' end
  redis.call('ZADD', KEYS[2], now + LEASE, lease)
  if ARGV[i + 1] ~= '0' then redis.call('HSET', KEYS[3], lease, ARGV[i + 1]) end
end
redis.call('PEXPIRE', KEYS[2], 2 * LEASE)
redis.call('PEXPIRE', KEYS[3], 2 * LEASE)
return 1
"""

# Returns the number of members. ARGV[2] 1: the member leaves.
MEMBERS = """
if ARGV[2] == '1' then redis.call('ZREM', KEYS[1], ARGV[1]) else redis.call('ZADD', KEYS[1], now + MEMBER, ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIRE', KEYS[1], MEMBER)
return redis.call('ZCARD', KEYS[1])
"""


def script(text: str, clock: str) -> str:
    """A script with its constants. `clock`: the expression of the time."""
    text = _NOW + text
    for name, value in (("SPAN", WINDOW_S), ("LEASE", LEASE), ("MEMBER", MEMBER), ("MONTHS", MONTHS), ("CLOCK", clock)):
        text = text.replace(name, str(value))
    return text


@lru_cache(maxsize=4096)
def keys_of(name: str) -> Sequence[str]:
    """Redis keys of a caller's key, in the order of the scripts' KEYS."""
    tagged = f"{PREFIX}{{{quote(name, safe='')}}}"
    return tuple(f"{tagged}:{kind}" for kind in ("minute", "running", "held", "spent"))
