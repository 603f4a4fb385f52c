"""The comparisons of billing.reconcile, each a query that returns the requests that differ.

Parameters: start, end (of `at`, end exclusive), before (nothing younger is expected to be complete), organisation
(NULL = all but the demo week's, which is played and not served). Columns: request_id, organisation, detail.
"""

# ruff: noqa: S608 - put together from constants of this file

from typing import Final

from contracts.demo import DEMO_WEEK_ORG

_WHOSE: Final = f"coalesce(organisation = :organisation ::text, organisation <> '{DEMO_WEEK_ORG}')"
_WINDOW: Final = f"at >= :start AND at < :end AND {_WHOSE}"

RECORDS: Final = f"""
WITH r AS (SELECT * FROM billing.request WHERE {_WINDOW}),
u AS (
    SELECT request_id, min(organisation) AS organisation, sum(cost) AS cost,
        count(*) FILTER (WHERE meter <> 'minimum_charge') AS num,
        bool_and(cost = CASE WHEN billable THEN ceil(tokens::numeric * price / 1000000) ELSE 0 END)
            FILTER (WHERE meter <> 'minimum_charge') AS rated_right,
        coalesce(max(price) FILTER (WHERE meter = 'minimum_charge') = sum(cost), true) AS topped_up_right
    FROM billing.usage_record WHERE {_WINDOW} GROUP BY request_id
)
SELECT request_id, coalesce(r.organisation, u.organisation) AS organisation,
    CASE
        WHEN r.request_id IS NULL THEN 'usage records without a request'
        WHEN u.num IS DISTINCT FROM 3 THEN format('%s usage records, not 3', coalesce(u.num, 0))
        WHEN NOT u.rated_right THEN 'a record is not tokens x price'
        WHEN NOT u.topped_up_right THEN 'a minimum charge does not make it the minimum'
        ELSE format('records cost %s, the request %s', u.cost, r.cost)
    END AS detail
FROM r FULL JOIN u USING (request_id)
WHERE r.request_id IS NULL OR u.num IS DISTINCT FROM 3 OR NOT u.rated_right
    OR NOT u.topped_up_right OR u.cost <> r.cost
"""

PRICES: Final = f"""
SELECT u.request_id, u.organisation,
    format('%s rated at %s, version %s says %s', u.meter, u.price, u.price_version, said.price) AS detail
FROM (SELECT * FROM billing.usage_record WHERE {_WINDOW}) AS u
LEFT JOIN billing.price AS p ON p.model = u.model AND p.version = u.price_version
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN u.meter = 'minimum_charge' THEN p.minimum
        ELSE ceil(
            CASE
                WHEN u.meter = 'prefill_computed' THEN p.prefill_computed
                WHEN u.meter = 'decode' THEN p.decode
                WHEN u.scope = 'shared' THEN coalesce(p.prefill_shared, p.prefill_cached)
                ELSE p.prefill_cached
            END::numeric * CASE WHEN u.batch THEN p.batch_ppm ELSE 1000000 END / 1000000
        )::bigint
    END AS price
) AS said
WHERE said.price IS DISTINCT FROM u.price
"""

LEDGER: Final = f"""
WITH r AS (SELECT request_id, organisation, cost FROM billing.request WHERE {_WINDOW} AND cost > 0),
u AS (
    SELECT request_id, jsonb_object_agg(meter, cost) AS by_meter
    FROM billing.usage_record WHERE {_WINDOW} AND cost > 0 GROUP BY request_id
),
posted AS (
    SELECT t.id AS request_id, min(t.organisation) AS organisation, sum(e.amount) AS total,
        sum(e.amount) FILTER (WHERE a.code = 'receivable:' || t.organisation) AS owed,
        jsonb_object_agg(a.meter, -e.amount) FILTER (WHERE a.kind = 'revenue') AS by_meter
    FROM (SELECT * FROM billing.ledger_transaction WHERE kind = 'usage' AND {_WINDOW}) AS t
    JOIN billing.ledger_entry AS e ON e.transaction_id = t.id
    JOIN billing.account AS a ON a.id = e.account_id
    GROUP BY t.id
)
SELECT request_id, coalesce(r.organisation, posted.organisation) AS organisation,
    CASE
        WHEN posted.request_id IS NULL THEN format('costs %s, posted nothing', r.cost)
        WHEN r.request_id IS NULL THEN format('posted %s for no billable request', posted.owed)
        WHEN posted.total <> 0 THEN format('entries sum to %s', posted.total)
        WHEN posted.owed IS DISTINCT FROM r.cost THEN format('costs %s, posted %s', r.cost, posted.owed)
        ELSE 'revenue differs by meter'
    END AS detail
FROM r FULL JOIN posted USING (request_id) LEFT JOIN u USING (request_id)
WHERE posted.request_id IS NULL OR r.request_id IS NULL OR posted.total <> 0
    OR posted.owed IS DISTINCT FROM r.cost OR posted.by_meter IS DISTINCT FROM u.by_meter
"""

ANSWERED: Final = f"""
SELECT request_id, organisation, format('the client was told %s, the request costs %s', answered_cost, cost) AS detail
FROM billing.request WHERE {_WINDOW} AND answered_cost <> cost
"""

# Any attempt's own figures will do: a retried request is billed by the attempt that served it. n > 1: the prompt
# counts once, from sample 0; what was generated is summed over the samples. A continuation's prompt holds what was
# answered before it, so what exceeds the billed prompt was generated. A side of which no attempt's record came is
# unsaid: a worker that is killed takes its last records with it; of a continued request, the first prompt's too.
_COUNTED: Final = f"""
WITH r AS (
    SELECT request_id, organisation, at, estimated, attempts AS served_by
    FROM billing.request WHERE {_WINDOW} AND billable
),
corrected AS (
    SELECT DISTINCT ON (request_id) request_id, prefill_computed + prefill_cached AS prompt, prefill_cached AS cached,
        decode
    FROM billing.correction WHERE request_at >= :start AND request_at < :end ORDER BY request_id, sequence DESC
),
billed AS (
    SELECT request_id, sum(tokens) FILTER (WHERE meter <> 'decode') AS prompt,
        sum(tokens) FILTER (WHERE meter = 'prefill_cached') AS cached,
        sum(tokens) FILTER (WHERE meter = 'decode') AS decode
    FROM billing.usage_record WHERE {_WINDOW} AND billable GROUP BY request_id
),
u AS (
    SELECT request_id, coalesce(c.prompt, b.prompt) AS prompt, coalesce(c.cached, b.cached) AS cached,
        coalesce(c.decode, b.decode) AS decode
    FROM billed AS b LEFT JOIN corrected AS c USING (request_id)
),
w AS (
    SELECT c.request_id, attempt,
        max(prompt_tokens) FILTER (WHERE sample = 0 AND phase <> 'decode') AS prompt,
        max(cached_tokens) FILTER (WHERE sample = 0 AND phase <> 'decode') AS cached,
        sum(completion_tokens + CASE WHEN attempt > 1 THEN greatest(0, prompt_tokens - u.prompt) ELSE 0 END)
            FILTER (WHERE phase <> 'prefill') AS decode
    FROM billing.attempt_cost AS c JOIN u USING (request_id)
    WHERE at >= :start AND at < :end GROUP BY c.request_id, attempt
),
seen AS (
    SELECT r.request_id, r.organisation, r.at, r.estimated, u.prompt, u.cached, u.decode,
        count(w.attempt) AS attempts,
        coalesce(bool_or(w.prompt = u.prompt AND w.cached = u.cached), false) AS prompt_right,
        coalesce(bool_or(w.decode = u.decode) OR u.decode = 0, false) AS decode_right,
        u.prompt > 0 AND (count(w.prompt) = 0 OR (r.served_by > 1 AND min(w.attempt) FILTER (WHERE w.prompt > 0) > 1))
            AS prompt_unsaid,
        u.decode > 0 AND count(w.decode) = 0 AS decode_unsaid,
        string_agg(
            format('attempt %s: %s prompt, %s cached, %s generated', w.attempt, w.prompt, w.cached, w.decode),
            '; ' ORDER BY w.attempt
        ) AS counted
    FROM r JOIN u USING (request_id) LEFT JOIN w USING (request_id)
    GROUP BY r.request_id, r.organisation, r.at, r.estimated, r.served_by, u.prompt, u.cached, u.decode
)
"""

WORKERS: Final = f"""{_COUNTED}
SELECT request_id, organisation,
    format('billed %s prompt, %s cached, %s generated; workers say %s', prompt, cached, decode, counted) AS detail
FROM seen
WHERE attempts > 0 AND NOT ((prompt_right OR prompt_unsaid) AND (decode_right OR decode_unsaid)) AND at < :before
"""

UNCONFIRMED: Final = f"""{_COUNTED}
SELECT request_id, organisation,
    format('billed %s prompt and %s generated tokens that no worker recorded', prompt, decode) AS detail
FROM seen
WHERE ((prompt_unsaid AND NOT prompt_right) OR (decode_unsaid AND NOT decode_right)) AND at < :before
"""

CONFIRMED: Final = f"""{_COUNTED}
SELECT organisation, (at AT TIME ZONE 'UTC')::date AS day,
    sum(prompt + decode) FILTER (WHERE at < :before) AS due,
    sum(CASE WHEN prompt_right THEN prompt ELSE 0 END + CASE WHEN decode_right THEN decode ELSE 0 END) AS tokens,
    sum(CASE WHEN prompt_right THEN prompt ELSE 0 END + CASE WHEN decode_right THEN decode ELSE 0 END)
        FILTER (WHERE at < :before) AS due_tokens
FROM seen GROUP BY 1, 2
"""

UNBILLED: Final = """
SELECT w.request_id, '' AS organisation, format('pool %s finished it, no usage event came', min(w.pool)) AS detail
FROM billing.attempt_cost AS w
LEFT JOIN billing.request AS r ON r.request_id = w.request_id AND r.at = w.at
WHERE w.at >= :start AND w.at < :end AND w.ended_at < :before AND r.request_id IS NULL
    AND w.phase <> 'prefill' AND w.reason IN ('stop', 'length') AND :organisation ::text IS NULL
GROUP BY w.request_id
"""

TOTALS: Final = f"""
WITH used AS (
    SELECT organisation, (at AT TIME ZONE 'UTC')::date AS day, count(*) FILTER (WHERE meter = 'decode') AS requests,
        sum(tokens) AS tokens, sum(tokens) FILTER (WHERE billable) AS billed, sum(cost) AS cost
    FROM billing.usage_record WHERE {_WINDOW} GROUP BY 1, 2
),
rolled AS (
    SELECT organisation, (hour AT TIME ZONE 'UTC')::date AS day, sum(tokens) AS tokens, sum(cost) AS cost
    FROM billing.usage_hourly
    WHERE hour >= :start AND hour < :end AND {_WHOSE}
    GROUP BY 1, 2
),
posted AS (
    SELECT t.organisation, (t.at AT TIME ZONE 'UTC')::date AS day, sum(e.amount) AS cost
    FROM (SELECT * FROM billing.ledger_transaction WHERE kind = 'usage' AND {_WINDOW}) AS t
    JOIN billing.ledger_entry AS e ON e.transaction_id = t.id AND e.amount > 0
    GROUP BY 1, 2
)
SELECT organisation, day, coalesce(used.requests, 0) AS requests, coalesce(used.tokens, 0) AS tokens,
    coalesce(used.billed, 0) AS billed_tokens, coalesce(used.cost, 0) AS usage_cost,
    coalesce(posted.cost, 0) AS ledger_cost, coalesce(rolled.tokens, 0) AS rollup_tokens,
    coalesce(rolled.cost, 0) AS rollup_cost
FROM used FULL JOIN rolled USING (organisation, day) FULL JOIN posted USING (organisation, day)
ORDER BY organisation, day
"""
