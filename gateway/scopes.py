"""What a key may be used for, and what it may ask. Pure. A project's scopes bind all its keys."""

import ipaddress
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import msgspec

from contracts.errors import ModelNotFound, PermissionDenied
from contracts.slo import SloTarget

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Scopes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None = everything. Whatever is named narrows it."""

    models: tuple[str, ...] | None = None  # public names
    endpoints: tuple[str, ...] | None = None  # paths such as /v1/chat/completions; what is below them too
    networks: tuple[str, ...] | None = None  # source networks, CIDR
    tiers: tuple[str, ...] | None = None  # service tiers; "default" is always there
    strictest_ttft_ms: float | None = None  # the targets that a request may name for itself go down to here
    strictest_tpot_ms: float | None = None
    slo: SloTarget | None = None  # targets in place of the tier's, as a whole; the key's go before its project's
    local_models: bool | None = None  # False: never; True: also for who names the primary; None: who names a route
    sees_workers: bool = False  # answers name the workers
    hashes_identifiers: bool = False  # safety identifiers are stored as keyed hashes


NO_SCOPES: Final = Scopes()


class WrongNetwork(ValueError):
    """A source network that is none."""


def check_scopes(scopes: Scopes) -> Scopes:
    """Return `scopes` if its networks can be read. Raises WrongNetwork."""
    for text in scopes.networks or ():
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            raise WrongNetwork(str(error)) from None
    return scopes


def check_call(bounds: Sequence[Scopes], *, endpoint: str, address: str) -> None:
    """Raise PermissionDenied when a key may not be used for an endpoint, or from an address."""
    for scopes in bounds:
        if scopes.endpoints is not None and not any(
            endpoint == allowed or endpoint.startswith(f"{allowed.rstrip('/')}/") for allowed in scopes.endpoints
        ):
            raise PermissionDenied(f"This API key may not be used for {endpoint}.")
        if scopes.networks is not None and not within(address, scopes.networks):
            raise PermissionDenied("This API key may not be used from this network.")


def check_model(bounds: Sequence[Scopes], model: str) -> None:
    """Raise ModelNotFound when a key may not use a model: which models exist is nobody else's business."""
    if not allows_model(bounds, model):
        raise ModelNotFound(model)


def allows_model(bounds: Sequence[Scopes], model: str) -> bool:
    """Return whether a key may use a model."""
    return all(scopes.models is None or model in scopes.models for scopes in bounds)


def local_consent(bounds: Sequence[Scopes]) -> bool | None:
    """Return whether a local model may stand in: False = never, True = always, None = for who names a route.

    Any False forbids it; else the first word, of the key before its project, counts.
    """
    said = [scopes.local_models for scopes in bounds if scopes.local_models is not None]
    return all(said) if said else None


def check_tier(bounds: Sequence[Scopes], tier: str) -> None:
    """Raise PermissionDenied when a key may not ask for a service tier."""
    if tier != "default" and not all(scopes.tiers is None or tier in scopes.tiers for scopes in bounds):
        raise PermissionDenied(f"This API key may not use the service tier '{tier}'.", param="service_tier")


def forwarded(headers: Iterable[tuple[bytes, bytes]], what: bytes = b"x-forwarded-for") -> str:
    """Return all headers of a name as one: some proxies add a line of their own below the client's."""
    return ", ".join(value.decode("latin-1") for name, value in headers if name == what)


def client_address(peer: str, forwarded_for: str, trusted: Sequence[str]) -> str:
    """Return who really calls: the last address before our own proxies.

    Args:
        peer: the other end of the connection.
        forwarded_for: the `x-forwarded-for` header; believed as far as trusted proxies wrote it.
        trusted: networks of our proxies, CIDR.
    """
    address = peer
    hops = [hop.strip() for hop in forwarded_for.split(",") if hop.strip()]
    while trusted and hops and within(address, trusted):
        address = hops.pop()
    return address


def within(address: str, networks: Sequence[str]) -> bool:
    """Return whether an address is in one of the networks."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket has no address
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in _network(text) for text in networks)


@lru_cache(maxsize=4096)
def _network(text: str) -> Network:
    return ipaddress.ip_network(text)
