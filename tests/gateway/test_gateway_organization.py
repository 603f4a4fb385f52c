"""Usage and costs of an organisation, in OpenAI's shape, read by OpenAI's own client."""

import csv
import io
import time
import uuid

import openai
import pytest
from gateway_rig import Rig

from billing.accounts import Posting, adjustment, receivable
from billing.consumer import UsageSink
from billing.database import create_engine
from billing.ledger import post_transaction
from billing.moments import moment
from billing.partitions import Partitions, ensure_partitions
from billing.prices import list_prices
from contracts.dimensions import Dimensions
from contracts.identity import new_rid
from contracts.rating import Tokens, cost
from contracts.units import Nano
from contracts.usage import Outcome, UsageEvent
from contracts.wire import encode
from gateway.tenants import Tenants

DAY = 86_400
USAGE = "/v1/organization/usage/completions"
COSTS = "/v1/organization/costs"


@pytest.fixture
async def now_s(rig: Rig):
    """Noon of the day before yesterday: never near the end of a bucket."""
    return int(time.time()) // DAY * DAY - 2 * DAY + DAY // 2


@pytest.fixture
async def bill(rig: Rig, database_url, now_s):
    engine = create_engine(database_url)
    async with engine.begin() as conn:
        await ensure_partitions(conn, moment((now_s - DAY) * 1000).date(), 4)
        price = next(one.price for one in await list_prices(conn, "tiny"))

    async def post(at_s, tokens, **changes):
        fields = {
            "rid": new_rid(at_s * 1000),
            "org": rig.org.id,
            "project": rig.key.project_id,
            "key_id": rig.key.id,
            "model": "tiny",
            "pool": "tiny",
            "tier": "default",
            "outcome": Outcome.FINISHED,
            "price": price,
            "tokens": tokens,
        } | changes
        event = UsageEvent(cost=cost(tokens, price) if fields["outcome"].billable else Nano(0), **fields)
        sink = UsageSink(engine, Partitions(engine))
        await sink.write(await sink.prepare([encode(event)]))

    post.engine = engine
    yield post
    await engine.dispose()


async def ask(rig, path, **query):
    answer = await rig.client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def buckets(page, *names):
    return [
        (bucket["start_time"], *(tuple(result[name] for name in names) for result in bucket["results"]))
        for bucket in page["data"]
    ]


async def test_usage_comes_in_buckets_with_the_empty_ones_and_pages(rig: Rig, bill, now_s):
    hour = now_s // 3600 * 3600
    await bill(hour + 10, Tokens(prefill_computed=100, prefill_cached=30, decode=5))
    await bill(hour + 70, Tokens(prefill_computed=1, decode=1))
    await bill(hour + 80, Tokens(prefill_computed=9, decode=9), outcome=Outcome.INTERRUPTED)
    await bill(hour + 2 * 3600, Tokens(prefill_computed=7, decode=2))
    names = ("input_tokens", "input_cached_tokens", "output_tokens", "num_model_requests")
    page = await ask(rig, USAGE, start_time=hour, end_time=hour + 3 * 3600, bucket_width="1h")
    assert (page["object"], page["has_more"], page["next_page"]) == ("page", False, None)
    assert buckets(page, *names) == [
        (hour, (131, 30, 6, 2)),
        (hour + 3600,),
        (hour + 7200, (7, 0, 2, 1)),
    ]
    (first,) = page["data"][0]["results"]
    assert first["object"] == "organization.usage.completions.result"
    assert (first["model"], first["project_id"]) == (None, None)
    # (100 + 1) x 100 + 30 x 20 + 6 x 400 nano-units
    assert (first["pdgate"]["cost_nano"], first["pdgate"]["prefill_computed"]) == (13_100, 101)
    minutes = await ask(rig, USAGE, start_time=hour, end_time=hour + 120, bucket_width="1m")
    assert buckets(minutes, "output_tokens") == [(hour, (5,)), (hour + 60, (1,))]
    query = {"start_time": hour, "end_time": hour + 3 * 3600, "bucket_width": "1h", "limit": 2}
    one = await ask(rig, USAGE, **query)
    assert one["has_more"] is True
    two = await ask(rig, USAGE, **query, page=one["next_page"])
    assert one["data"] + two["data"] == page["data"]
    assert two["has_more"] is False


async def test_usage_is_grouped_and_filtered(rig: Rig, bill, now_s):
    await bill(now_s, Tokens(decode=1), dimensions=Dimensions(user="ann"))
    await bill(now_s, Tokens(decode=2), dimensions=Dimensions(user="bob"), batch=True)
    await bill(now_s, Tokens(decode=4), key_id="key_other", tier="fast")

    async def seen(**query):
        page = await ask(rig, USAGE, start_time=now_s, end_time=now_s + 60, **query)
        groups = query.get("group_by[]", [])
        names = [groups] if isinstance(groups, str) else groups
        return [tuple(r[name] for name in (*names, "output_tokens")) for r in page["data"][0]["results"]]

    assert await seen() == [(7,)]
    assert await seen(**{"group_by[]": ["user_id"]}) == [("ann", 1), ("bob", 2), (None, 4)]
    assert await seen(**{"group_by[]": ["batch", "service_tier"]}) == [
        (False, "default", 1), (False, "fast", 4), (True, "default", 2),
    ]  # fmt: skip
    assert await seen(batch="true") == [(2,)]
    assert await seen(**{"user_ids[]": "ann"}) == [(1,)]
    assert await seen(**{"api_key_ids[]": "key_other"}) == [(4,)]
    assert await seen(models="nothing") == []


async def test_costs_have_line_items_and_what_was_adjusted(rig: Rig, bill, now_s):
    await bill(now_s, Tokens(prefill_computed=1_000_000, decode=1_000_000))
    admin = await rig_admin(rig)
    async with bill.engine.begin() as conn:
        await post_transaction(
            conn, transaction_id=uuid.uuid4(), kind=Posting.ADJUSTMENT, organisation=rig.org.id,
            at=moment(now_s * 1000),
            entries={receivable(rig.org.id): -50_000_000, adjustment("decode"): 50_000_000},
        )  # fmt: skip
    query = {"start_time": now_s, "end_time": now_s + 60, "group_by[]": "line_item"}
    own = await ask(rig, COSTS, **query)
    items = [(r["line_item"], r["amount"]["nano"]) for r in own["data"][0]["results"] if r["amount"]["nano"]]
    assert items == [("tiny, decode", 400_000_000), ("tiny, prefill computed", 100_000_000)]
    answer = await rig.client.get(COSTS, params=query, headers={"authorization": f"Bearer {admin}"})
    amounts = {r["line_item"]: r["amount"] for r in answer.json()["data"][0]["results"]}
    assert amounts["adjustment"] == {"value": -0.05, "currency": "eur", "nano": -50_000_000}


async def test_openais_own_client_reads_usage_and_costs_by_project_key_user_and_model(rig: Rig, bill, now_s):
    """Its parameters as it spells them, and every field in the type that it declares."""
    day = now_s // DAY * DAY
    await bill(now_s, Tokens(prefill_computed=100, prefill_cached=30, decode=5), dimensions=Dimensions(user="ann"))
    await bill(now_s, Tokens(decode=2), dimensions=Dimensions(user="bob"), project="proj_other", key_id="key_other")
    await bill(now_s + DAY, Tokens(decode=4))
    admin = await rig_admin(rig)
    async with openai.AsyncOpenAI(
        api_key="unused", admin_api_key=admin, base_url=f"{rig.client.base_url}/v1", max_retries=0,
        _strict_response_validation=True,
    ) as client:  # fmt: skip
        usage, cost_of = client.admin.organization.usage.completions, client.admin.organization.usage.costs
        page = await usage(start_time=day, end_time=day + 2 * DAY, limit=1, group_by=["project_id", "model"])
        assert {(r.project_id, r.model, r.input_tokens, r.input_cached_tokens, r.output_tokens, r.num_model_requests)
                for r in page.data[0].results} == {
            (rig.key.project_id, "tiny", 130, 30, 5, 1), ("proj_other", "tiny", 0, 0, 2, 1),
        }  # fmt: skip
        assert page.has_more
        assert page.next_page
        rest = await usage(start_time=day, end_time=day + 2 * DAY, limit=1, page=page.next_page)
        assert (rest.has_more, [r.output_tokens for r in rest.data[0].results]) == (False, [4])
        users = await usage(start_time=day, end_time=day + DAY, group_by=["user_id", "api_key_id"])
        assert {(r.user_id, r.api_key_id, r.output_tokens) for r in users.data[0].results} == {
            ("ann", rig.key.id, 5), ("bob", "key_other", 2),
        }  # fmt: skip
        one = await usage(start_time=day, end_time=day + DAY, api_key_ids=["key_other"], models=["tiny"], batch=False)
        assert [r.output_tokens for r in one.data[0].results] == [2]
        money = await cost_of(start_time=day, end_time=day + 2 * DAY, limit=1, group_by=["api_key_id", "line_item"])
        spent = {(r.api_key_id, r.line_item): (round(r.amount.value * 1e9), r.quantity, r.quantity_unit)
                 for r in money.data[0].results if r.amount.value}  # fmt: skip
        assert spent == {
            (rig.key.id, "tiny, prefill computed"): (100 * 100, 100, "tokens"),
            (rig.key.id, "tiny, prefill cached"): (30 * 20, 30, "tokens"),
            (rig.key.id, "tiny, decode"): (5 * 400, 5, "tokens"),
            ("key_other", "tiny, decode"): (2 * 400, 2, "tokens"),
        }
        assert money.next_page
        people = await cost_of(start_time=day, end_time=day + DAY, group_by=["user_id"])
        assert {(r.user_id, round(r.amount.value * 1e9)) for r in people.data[0].results} == {
            ("ann", 12_600), ("bob", 800),
        }  # fmt: skip
        only = await cost_of(
            start_time=day, end_time=day + DAY, line_items=["tiny, decode"], project_ids=["proj_other"]
        )
        assert [(round(r.amount.value * 1e9), r.amount.currency) for r in only.data[0].results] == [(800, "eur")]


async def rig_admin(rig):
    _, secret = await Tenants(rig.gateway.engine).create_key(rig.org.id, rig.key.project_id, "admin", is_admin=True)
    return secret


async def test_a_key_sees_its_own_project_and_no_other_organisation(rig: Rig, bill, now_s):
    await bill(now_s, Tokens(decode=1))
    await bill(now_s, Tokens(decode=2), project="proj_other")
    await bill(now_s, Tokens(decode=4), org="org_other")
    page = await ask(rig, USAGE, start_time=now_s, end_time=now_s + 60)
    assert buckets(page, "output_tokens")[0][1:] == ((1,),)
    other = await ask(rig, USAGE, start_time=now_s, end_time=now_s + 60, **{"project_ids[]": "proj_other"})
    assert buckets(other, "output_tokens")[0][1:] == ()
    admin = await rig_admin(rig)
    answer = await rig.client.get(
        USAGE, params={"start_time": now_s}, headers={"authorization": f"Bearer {admin}", "accept": "text/csv"}
    )
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["output_tokens"], row["pdgate.currency"]) == ("3", "EUR")


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        (USAGE, {}, "start_time"),
        (USAGE, {"start_time": "x"}, "start_time"),
        (USAGE, {"start_time": "5", "end_time": "5"}, "end_time"),
        (USAGE, {"start_time": "0", "bucket_width": "1w"}, "bucket_width"),
        (USAGE, {"start_time": "0", "limit": "32"}, "limit"),
        (USAGE, {"start_time": "0", "group_by": "worker"}, "group_by"),
        (USAGE, {"start_time": "0", "page": "page_!"}, "page"),
        (USAGE, {"start_time": "0", "batch": "maybe"}, "batch"),
        (COSTS, {"start_time": "0", "bucket_width": "1h"}, "bucket_width"),
        (COSTS, {"start_time": "0", "limit": "181"}, "limit"),
    ],
)
async def test_a_question_that_makes_no_sense_names_its_parameter(rig: Rig, path, query, param):
    answer = await rig.client.get(path, params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
