"""Lua scripts of quotas in Redis. They are atomic, on Redis' own clock, and follow the rules of `policies.quota`; tests
hold both to the same.

Redis keys (those of a caller's key share a slot of a cluster; each expires). NAME, DIGEST: of the account, so that a
key that is made again under its old name starts with nothing used:
    NAMESPACE:{NAME}:DIGEST:minute    hash: `r<second>`, `t<second>`: requests and tokens admitted in that second
    NAMESPACE:{NAME}:DIGEST:running   sorted set: unsettled reservations by expiry, ms
    NAMESPACE:{NAME}:DIGEST:held      hash: `COST:TOKENS:SECOND` of running reservations; cost in billionths of a USD
    NAMESPACE:{NAME}:DIGEST:spent     hash: by month, billionths of a USD; `0`: by a clock that did not know the month
    NAMESPACE:{NAME}:spent            the same of a gateway before 0.2.0: goes to the account that asks first
    NAMESPACE:members                 sorted set: processes that enforce quotas, by expiry
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gateway.admission.auth import account_parts
from gateway.cluster.redis_names import DEFAULT_NAMESPACE, redis_name
from policies.quota.sliding_window import WINDOW_S

LEASE = 60_000  # ms until a reservation without renewal expires
MEMBER = 15_000  # ms
MONTHS = 40 * 86_400_000  # ms to keep the costs of a month after the last cost
NONE = -1  # no limit

CLOCK = "redis.call('TIME')"

_NOW = """
local time = CLOCK
local second = tonumber(time[1])
local now = second * 1000 + math.floor(tonumber(time[2]) / 1000)
"""

# Takes over the costs that a gateway before 0.2.0 has counted, and those of an unknown month; in such a month, the
# latest one that is known counts.
_MONTH = """
local function adopt(from, field, to)
  local cost = redis.call('HGET', from, field)
  if not cost then return end
  redis.call('HINCRBY', KEYS[4], to, cost)
  redis.call('PEXPIRE', KEYS[4], MONTHS)
  redis.call('HDEL', from, field)
end
local function known_month(month)
  if KEYS[5] then
    for _, old in ipairs(redis.call('HKEYS', KEYS[5])) do adopt(KEYS[5], old, old) end
  end
  if month == '0' then
    for _, each in ipairs(redis.call('HKEYS', KEYS[4])) do if each > month then month = each end end
  else
    adopt(KEYS[4], '0', month)
  end
  return month
end
"""

# Returns: the limit that refuses (0: none), why (of CAUSES), ms to wait (-1: waiting does not help), requests and
# tokens that count, ms until each resets, the second, the cost of the month, the tokens and the cost that are held.
RESERVE = """
local lease, month = ARGV[1], ARGV[2]
local tokens, cost = tonumber(ARGV[3]), tonumber(ARGV[4])
local more_tokens, more_cost = tonumber(ARGV[5]), tonumber(ARGV[6])
local most_requests, most_tokens = tonumber(ARGV[7]), tonumber(ARGV[8])
local most_running, most_cost = tonumber(ARGV[9]), tonumber(ARGV[10])
local REACHED, HELD, SPENT, TOO_LARGE = 0, 1, 2, 3

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

local spent, held_cost, held_tokens = 0, 0, 0
if most_cost >= 0 then
  month = known_month(month)
  spent = tonumber(redis.call('HGET', KEYS[4], month) or '0')
end
if most_cost >= 0 or most_tokens >= 0 and sum.t + tokens > most_tokens then
  for _, one in ipairs(redis.call('HVALS', KEYS[3])) do
    local of_cost, of_tokens, at = string.match(one, '(%d+):(%d+):(%d+)')
    held_cost = held_cost + of_cost
    if tonumber(at) >= second - SPAN then held_tokens = held_tokens + of_tokens end
  end
end

local refused, cause, longest = 0, REACHED, -1
local function refuse(limit, why, ms)
  if ms < 0 then ms = 1e15 end
  if ms > longest then refused, cause, longest = limit, why, ms end
end
if most_cost >= 0 and spent + held_cost + cost > most_cost then
  if spent >= most_cost then refuse(4, SPENT, -1)
  elseif cost > most_cost then refuse(4, TOO_LARGE, -1)
  elseif spent + cost > most_cost then refuse(4, SPENT, -1)
  else refuse(4, HELD, 1000) end
end
if most_running >= 0 and redis.call('ZCARD', KEYS[2]) >= most_running then refuse(3, REACHED, 1000) end
if most_requests >= 0 and sum.r >= most_requests then refuse(1, REACHED, wait('r', sum.r + 1 - most_requests)) end
if most_tokens >= 0 and sum.t + tokens > most_tokens then
  local over = wait('t', sum.t + tokens - most_tokens)
  if tokens > most_tokens then refuse(2, TOO_LARGE, -1)
  elseif sum.t - held_tokens + tokens > most_tokens then refuse(2, REACHED, over)
  else refuse(2, HELD, math.min(over, 1000)) end
end

if most_tokens >= 0 then tokens = math.max(tokens, math.min(more_tokens, most_tokens - sum.t)) end
if most_cost >= 0 then cost = math.max(cost, math.min(more_cost, most_cost - spent - held_cost)) end
if refused == 0 then
  redis.call('HINCRBY', KEYS[1], 'r' .. second, 1)
  redis.call('HINCRBY', KEYS[1], 't' .. second, tokens)
  redis.call('PEXPIRE', KEYS[1], (SPAN + 2) * 1000)
  redis.call('ZADD', KEYS[2], now + LEASE, lease)
  redis.call('PEXPIRE', KEYS[2], 2 * LEASE)
  if most_cost >= 0 or most_tokens >= 0 then
    redis.call('HSET', KEYS[3], lease, string.format('%.0f:%.0f:%.0f', cost, tokens, second))
    redis.call('PEXPIRE', KEYS[3], 2 * LEASE)
  end
  sum.r, sum.t, last.r, last.t = sum.r + 1, sum.t + tokens, second, second
end
if longest == 1e15 then longest = -1 end
local function reset(kind) if last[kind] == 0 then return 0 end return (last[kind] + SPAN + 1) * 1000 - now end
local function whole(number) return string.format('%.0f', number) end
return {refused, cause, longest, sum.r, sum.t, reset('r'), reset('t'), second, whole(spent), tokens, whole(cost)}
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
  month = known_month(month)
  redis.call('HINCRBY', KEYS[4], month, cost)
  redis.call('PEXPIRE', KEYS[4], MONTHS)
end
return 1
"""

# Takes pairs of a lease and what it holds. An unknown lease is marked by `~`: not counted here before.
RENEW = """
for i = 1, #ARGV, 2 do
  local lease = ARGV[i]
  if not redis.call('ZSCORE', KEYS[2], lease) then lease = lease .. '~' end
  redis.call('ZADD', KEYS[2], now + LEASE, lease)
  if ARGV[i + 1] ~= '' then redis.call('HSET', KEYS[3], lease, ARGV[i + 1]) end
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
    text = _NOW + (_MONTH if "known_month" in text else "") + text
    for name, value in (("SPAN", WINDOW_S), ("LEASE", LEASE), ("MEMBER", MEMBER), ("MONTHS", MONTHS), ("CLOCK", clock)):
        text = text.replace(name, str(value))
    return text


@lru_cache(maxsize=4096)
def keys_of(namespace: str, account: str) -> Sequence[str]:
    """Redis keys of a caller's key, in the order of the scripts' KEYS."""
    name, digest = account_parts(account)
    kept = [redis_name(namespace, digest, kind, slot=name) for kind in ("minute", "running", "held", "spent")]
    return (*kept, redis_name(namespace, "spent", slot=name)) if namespace == DEFAULT_NAMESPACE else tuple(kept)


def members_key(namespace: str) -> str:
    return redis_name(namespace, "members")
