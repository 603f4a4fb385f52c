import msgspec
import pytest

from contracts.catalog import CatalogError, read_catalog
from contracts.environment import Secret, SettingsError, asyncpg_url, from_env, host_and_port, metrics_address

GOOD = """
[models.a]
tokenizer = "a"
context_tokens = 128
aliases = ["b"]
[models.a.price]
prefill_computed = "0.10"
prefill_cached = "0.000000001"
decode = "3"
"""


def catalog_of(tmp_path, text):
    file = tmp_path / "models.toml"
    file.write_text(text)
    return read_catalog(file)


def test_a_model_is_found_by_name_and_by_alias(tmp_path):
    catalog = catalog_of(tmp_path, GOOD)
    assert catalog.find("a")[0] == catalog.find("b")[0] == "a"
    assert catalog.find("c") is None
    assert catalog.pool_of("a") == "a"


def test_prices_are_exact_nano_units(tmp_path):
    price = catalog_of(tmp_path, GOOD).models["a"].price
    assert (price.nano("prefill_computed"), price.nano("prefill_cached")) == (100_000_000, 1)
    assert price.nano("decode") == 3_000_000_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('"0.10"', '"a dime"'), "models.a.price prefill_computed = 'a dime'"),
        (('"0.10"', '"0.0000000001"'), "at most 9 decimals"),
        (('"0.10"', '"-1"'), ">= 0"),
        (('"0.10"', "0.10"), "Expected `str`"),
        (("context_tokens = 128", "context_tokens = 8"), "at least 16"),
        (("context_tokens = 128", "context_tokens = 128\ncolour = 1"), "colour"),
        (('aliases = ["b"]', 'aliases = ["a"]'), "'a' names both a and a"),
        (("[models.a]", "[models.a"), "models.toml"),
    ],
)
def test_a_bad_catalogue_says_what_is_wrong_and_where(tmp_path, change, says):
    with pytest.raises(CatalogError) as caught:
        catalog_of(tmp_path, GOOD.replace(*change))
    assert says in str(caught.value)
    assert "models.toml" in str(caught.value)


def test_a_missing_catalogue_names_the_file(tmp_path):
    with pytest.raises(CatalogError, match=r"nowhere\.toml: No such file"):
        read_catalog(tmp_path / "nowhere.toml")


def test_any_change_of_the_file_is_another_revision(tmp_path):
    assert catalog_of(tmp_path, GOOD).revision != catalog_of(tmp_path, GOOD + "\n").revision


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    redis_url: str
    token: Secret = Secret("")
    tick_s: float = 5.0
    names: tuple[str, ...] = ()
    on: bool = False


def test_settings_come_from_the_prefixed_variables_only():
    got = from_env(Settings, "X_", {"X_REDIS_URL": "r", "X_TICK_S": "2", "X_NAMES": "a,b", "X_ON": "true", "Y": "1"})
    assert got == Settings(redis_url="r", tick_s=2.0, names=("a", "b"), on=True)


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({}, "X_REDIS_URL"),
        ({"X_REDIS_URL": "r", "X_TICK_S": "soon"}, "X_TICK_S"),
        ({"X_REDIS_URL": "r", "X_TOCK": "1"}, "X_TOCK"),
    ],
)
def test_a_bad_setting_stops_the_process_with_its_name(environ, variable):
    with pytest.raises(SettingsError, match=variable):
        from_env(Settings, "X_", environ)


def test_a_secret_does_not_print():
    got = from_env(Settings, "X_", {"X_REDIS_URL": "r", "X_TOKEN": "hunter2"})
    assert got.token == "hunter2"
    assert "hunter2" not in repr(got)


def test_database_urls_get_the_asyncpg_driver():
    assert asyncpg_url("postgresql://u@/d?host=/s") == "postgresql+asyncpg://u@/d?host=/s"
    with pytest.raises(SettingsError, match="postgresql://"):
        asyncpg_url("mysql://u@/d")


def test_an_address_to_listen_on_is_a_host_and_a_port():
    assert metrics_address("X_LISTEN", "") == ("", 0)
    assert metrics_address("X_LISTEN", "127.0.0.1:9100") == ("127.0.0.1", 9100)
    assert host_and_port("X_LISTEN", "[::1]:80") == ("::1", 80)
    assert host_and_port("X_LISTEN", ":80") == ("127.0.0.1", 80)
    for nonsense in ("nonsense", "9100", "host:", "host:x", "host:70000"):
        with pytest.raises(SettingsError, match="X_LISTEN"):
            metrics_address("X_LISTEN", nonsense)
