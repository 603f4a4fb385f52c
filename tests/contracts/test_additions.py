"""Models beside the file: the file comes first, and a catalogue that grows is the same object for who holds it."""

import msgspec
import pytest
from redis.asyncio import Redis

from contracts import keys
from contracts.additions import AddedModel, decode_added, encode_added, live, read_added
from contracts.catalog import Catalog, Model, PriceText

PRICE = PriceText(prefill_computed="1", prefill_cached="1", decode="1")


def added(name: str, *aliases: str, **fields: int) -> AddedModel:
    model = Model(tokenizer="tiny", context_tokens=1024, price=PRICE, aliases=aliases)
    return AddedModel(name=name, model=model, folder="/models/x", **fields)


def test_a_catalogue_grows_and_shrinks_for_everybody_who_holds_it(catalog: Catalog) -> None:
    grown, models = live(catalog)
    models.take([added("new", "fresh")])
    assert list(grown.models) == ["tiny", "new"]
    assert grown.pools == ("tiny", "new")
    assert grown.find("fresh") == ("new", grown.models["new"])
    assert models.added("new") is not None
    models.take([])
    assert grown.find("fresh") is None
    assert "new" not in catalog.models


def test_what_the_file_names_is_hidden_by_nothing(catalog: Catalog) -> None:
    grown, models = live(catalog)
    models.take([added("tiny"), added("other", "tiny-alias"), added("third"), added("fourth", "third")])
    assert list(grown.models) == ["tiny", "third"]
    assert models.added("tiny") is None


def test_who_iterates_sees_one_state(catalog: Catalog) -> None:
    grown, models = live(catalog)
    models.take([added("a"), added("b")])
    seen = []
    for name in grown.models:
        seen.append(name)
        models.take([])
    assert seen == ["tiny", "a", "b"]


def test_the_stacks_workers_have_the_pools_name() -> None:
    assert {name: role.value for name, role in added("new", prefill=1, decode=2).workers.items()} == {
        "new-prefill-1": "prefill",
        "new-decode-1": "decode",
        "new-decode-2": "decode",
    }


async def test_nobody_has_said_yet_is_not_that_there_are_none(redis: Redis) -> None:
    await redis.delete(keys.ADDED_MODELS)
    assert await read_added(redis) is None
    await redis.set(keys.ADDED_MODELS, encode_added([]))
    assert await read_added(redis) == ()
    await redis.set(keys.ADDED_MODELS, encode_added([added("new", prefill=1, decode=1)]))
    assert await read_added(redis) == (added("new", prefill=1, decode=1),)


def test_garbage_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_added(b"garbage")
