"""What a request leaves open is taken from the model's entry in the catalogue."""

import json

import msgspec

from contracts.catalog import Catalog
from gateway.schemas.chat import decode_chat


def asked(**fields) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_a_request_that_names_no_temperature_gets_the_models(catalog: Catalog):
    model = msgspec.structs.replace(catalog.models["tiny"], default_temperature=0.2, default_top_p=0.9)
    sampling = decode_chat(asked()).sampling(8, model)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (8, 0.2, 0.9)


def test_zero_is_named(catalog: Catalog):
    model = msgspec.structs.replace(catalog.models["tiny"], default_temperature=0.2, default_top_p=0.9)
    sampling = decode_chat(asked(temperature=0, top_p=0.5)).sampling(8, model)
    assert (sampling.temperature, sampling.top_p) == (0, 0.5)


def test_without_a_default_the_engine_decides(catalog: Catalog):
    sampling = decode_chat(asked()).sampling(8, catalog.models["tiny"])
    assert (sampling.temperature, sampling.top_p) == (None, None)
