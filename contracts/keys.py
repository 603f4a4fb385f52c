"""Names of every Redis key. A script touches keys of one tag only, so Redis Cluster needs no change.

Tags: `{sNN}` an organisation's shard, `{m:POOL}` a model pool, `{gw:ID}` one gateway process.
"""

from contracts.identity import shard_of

CONSUMER_GROUP_SCHEDULER = "scheduler"
CONSUMER_GROUP_BILLING = "billing"


def shard_tag(org: str) -> str:
    """Return the tag that holds all limit and money keys of `org`."""
    return f"{{s{shard_of(org):02d}}}"


# -- one organisation's shard ------------------------------------------------------------------


def reservation(org: str, rid: str) -> str:
    """Return the reservation of one request: msgpack, written by reserve.lua, deleted by settle.lua."""
    return f"pdgate:{shard_tag(org)}:res:{rid}"


def reservation_added(org: str, rid: str) -> str:
    """Return the money that was reserved for one request while it ran, nano-units. Deleted by settle.lua."""
    return f"pdgate:{shard_tag(org)}:res:{rid}:added"


def reservation_cached(org: str, rid: str) -> str:
    """Return the cached prompt tokens that a running request gave back: cached.lua writes it, settle.lua deletes it."""
    return f"pdgate:{shard_tag(org)}:res:{rid}:cached"


def open_reservations(org: str) -> str:
    """Return the sorted set of open reservations of the organisation's shard: `org/rid` by deadline, Unix ms."""
    return open_reservations_of_shard(shard_of(org))


def open_reservations_of_shard(shard: int) -> str:
    """Return the sorted set of open reservations of one shard."""
    return f"pdgate:{{s{shard:02d}}}:open"


def usage_stream(shard: int) -> str:
    """Return the stream of usage events of one shard."""
    return f"pdgate:{{s{shard:02d}}}:usage"


def dead_letters(shard: int) -> str:
    """Return the stream of usage events that billing could not post."""
    return f"pdgate:{{s{shard:02d}}}:usage-dead"


def settled_request(org: str, rid: str) -> str:
    """Return the usage event of a settled request, kept 10 minutes for reads ahead of billing."""
    return f"pdgate:{shard_tag(org)}:req:{rid}"


def response(org: str, response_id: str) -> str:
    """Return a stored response with its conversation, JSON, with an expiry."""
    return f"pdgate:{shard_tag(org)}:org:{org}:response:{response_id}"


def response_cancel(org: str, response_id: str) -> str:
    """Return the mark that tells the gateway that makes a response to stop."""
    return f"pdgate:{shard_tag(org)}:org:{org}:response-cancel:{response_id}"


def idempotent(org: str, name: str) -> str:
    """Return the claim or the answer of one idempotency key. `name` is a hash of tenant, endpoint and key."""
    return f"pdgate:{shard_tag(org)}:idem:{name}"


def key_states(org: str) -> str:
    """Return the hash of key id -> `STATE:VERSION` of one organisation."""
    return f"pdgate:{shard_tag(org)}:org:{org}:keys"


def rate_bucket(org: str, scope: str, scope_id: str, meter: str) -> str:
    """Return one token bucket. `scope` is org, project or key; `meter` as in contracts.limits."""
    return f"pdgate:{shard_tag(org)}:org:{org}:rate:{scope}:{scope_id}:{meter}"


def concurrency_leases(org: str, scope: str, scope_id: str) -> str:
    """Return the sorted set of running requests of a scope, by lease expiry in Unix ms."""
    return f"pdgate:{shard_tag(org)}:org:{org}:running:{scope}:{scope_id}"


def budget(org: str, scope: str, scope_id: str) -> str:
    """Return the hash of one scope's budget; scope `credit` is what a prepaid organisation has left.

    `spent` and `reserved` in nano-units; `limit`, `ends_ms` and `next_ends_ms` are filled by billing, and without
    `limit` there is none. From `ends_ms` on what was spent is of the period before.
    """
    return f"pdgate:{shard_tag(org)}:org:{org}:budget:{scope}:{scope_id}"


# -- one pool ------------------------------------------------------------------------------------


def inbox(pool: str) -> str:
    """Return the pool's request stream, read by the scheduler's consumer group."""
    return f"pdgate:{{m:{pool}}}:inbox"


def inbox_dead_letters(pool: str) -> str:
    """Return the stream of inbox entries that the scheduler could not read."""
    return f"pdgate:{{m:{pool}}}:inbox-dead"


def inflight(pool: str, rid: str) -> str:
    """Return the write-ahead record of a placed request (wire.Inflight, msgpack)."""
    return f"pdgate:{{m:{pool}}}:inflight:{rid}"


def leader(pool: str) -> str:
    """Return the leader lease: `SCHEDULER_ID:EPOCH`, PX."""
    return f"pdgate:{{m:{pool}}}:leader"


def leader_epoch(pool: str) -> str:
    """Return the highest leader epoch ever given out for the pool."""
    return f"pdgate:{{m:{pool}}}:leader-epoch"


def outcomes(pool: str) -> str:
    """Return the stream of finished requests, for SLO feedback; best effort."""
    return f"pdgate:{{m:{pool}}}:outcomes"


def attempts(pool: str) -> str:
    """Return the stream of the workers' own final counts, for cost rows and reconciliation."""
    return f"pdgate:{{m:{pool}}}:attempts"


def attempts_dead_letters(pool: str) -> str:
    """Return the stream of attempt records that billing could not write."""
    return f"pdgate:{{m:{pool}}}:attempts-dead"


def redis_life(pool: str) -> str:
    """Return the run id of the Redis that the pool's leader has last read its inbox from."""
    return f"pdgate:{{m:{pool}}}:redis-life"


def retold(pool: str) -> str:
    """Return the stream of what workers say again after Redis began another life: lines of their journals."""
    return f"pdgate:{{m:{pool}}}:retold"


def series(pool: str) -> str:
    """Return the stream of the pool's course, one contracts.series.Point each 5 s, for a day."""
    return f"pdgate:{{m:{pool}}}:series"


def steering(pool: str) -> str:
    """Return who decides about the pool's ratio (contracts.steering.Steering, msgpack); absent = the settings' mode."""
    return f"pdgate:{{m:{pool}}}:steering"


def scaling(pool: str) -> str:
    """Return what the pool's leader says of its workers (contracts.scaling.ScaleNote, msgpack), PX 10 s."""
    return f"pdgate:{{m:{pool}}}:scaling"


def renewal(pool: str) -> str:
    """Return when an operator asked for new workers, Unix ms: those that were started before are replaced."""
    return f"pdgate:{{m:{pool}}}:renewal"


def boot(pool: str) -> str:
    """Return how long a worker of the pool takes from being asked for until it serves, seconds as text."""
    return f"pdgate:{{m:{pool}}}:boot"


def schedulers(pool: str) -> str:
    """Return the sorted set of the scheduler processes that serve the pool, by lease expiry in Unix ms."""
    return f"pdgate:{{m:{pool}}}:schedulers"


def learned(pool: str) -> str:
    """Return what the pool's leader has learned and decided, for the next one (scheduler.legacy.Legacy, msgpack)."""
    return f"pdgate:{{m:{pool}}}:learned"


def pool_workers(pool: str) -> str:
    """Return the sorted set of worker ids by lease expiry in Unix ms, by the workers' own clocks.

    It says which leases to look for, not who is alive: that is whose lease is there, by Redis' clock.
    """
    return f"pdgate:{{m:{pool}}}:workers"


CLOCKS_APART_MS = 600_000
"""How long after its expiry a name of `pool_workers` is still looked for: clocks of two machines differ, and jump."""


def worker_lease(pool: str, worker_id: str) -> str:
    """Return the worker's registration (wire.Registration, msgpack), PX 3000."""
    return f"pdgate:{{m:{pool}}}:worker:{worker_id}"


# -- one gateway -----------------------------------------------------------------------------------


def gateway_lease(gateway_id: str) -> str:
    """Return the gateway's liveness key, PX 3000."""
    return f"pdgate:{{gw:{gateway_id}}}:lease"


def notices(gateway_id: str) -> str:
    """Return the stream of notices from schedulers to one gateway."""
    return f"pdgate:{{gw:{gateway_id}}}:notices"


CHANGES = "pdgate:changes"
"""Stream of changes of keys and holds (wire.Change, msgpack), read by every gateway."""

ADDED_MODELS = "pdgate:models"
"""The models beside the catalogue's file (contracts.additions, msgpack), written by every gateway."""

GATEWAYS = "pdgate:gateways"
"""Sorted set of gateway ids by lease expiry in Unix ms."""

BILLING_ADMIN = "pdgate:billing:admin"
"""Address of a billing process's Admin service, host:port; expires with it."""


# -- the portal ------------------------------------------------------------------------------------


def session(token_hash: str) -> str:
    """Return one signed-in browser (gateway.portal.sessions.Session, msgpack), with an expiry."""
    return f"pdgate:{{portal}}:session:{token_hash}"


def person_sessions(person_id: str) -> str:
    """Return the set of the person's sessions, by the hash of their token."""
    return f"pdgate:{{portal}}:sessions-of:{person_id}"


def sign_in_tries(name: str) -> str:
    """Return how often somebody tried to sign in, of one account or address, with an expiry."""
    return f"pdgate:{{portal}}:tries:{name}"


def second_step(token_hash: str) -> str:
    """Return a sign-in that waits for a one-time code (gateway.portal.second_step.Waiting, msgpack), with an expiry."""
    return f"pdgate:{{portal}}:second-step:{token_hash}"


def sign_in_state(state_hash: str) -> str:
    """Return a sign-in that is at an OpenID provider, with an expiry."""
    return f"pdgate:{{portal}}:oidc:{state_hash}"
