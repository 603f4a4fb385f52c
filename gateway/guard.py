"""Who may call what: the key, then what holds its tenant, then its scopes."""

from collections.abc import Mapping, Sequence
from typing import Any

from litestar import Request

from contracts.errors import InvalidApiKey
from gateway.auth import Authenticator, credential, headers_of
from gateway.holds import Holds
from gateway.scopes import check_call, check_model, check_tier, client_address, forwarded
from gateway.tenants import ApiKey


class Guard:
    """Checks callers. Errors: InvalidApiKey, PermissionDenied, ModelNotFound, NoCapacity, DependencyDown."""

    def __init__(self, auth: Authenticator, holds: Holds, *, trusted_proxies: Sequence[str]) -> None:
        """`trusted_proxies`: networks whose `x-forwarded-for` is believed."""
        self._auth = auth
        self._holds = holds
        self._trusted = trusted_proxies

    async def key_of(
        self, request: Request[Any, Any, Any], *, serving: bool = False, headers: Mapping[str, str] | None = None
    ) -> ApiKey:
        """Return the key of a request.

        `serving`: the call would run on a worker. Then the reserve script compares the key's state; otherwise it is
        compared here. `headers`: the request's, from who has decoded them.
        """
        authorization = credential(headers_of(request.scope) if headers is None else headers)
        key = await (self._auth.authenticate if serving else self._auth.confirm)(authorization)
        self._holds.check_caller(key.organisation_id, key.project_id, serving=serving)
        self.check_endpoint(request, key, request.scope["path"])
        return key

    def check_endpoint(self, request: Request[Any, Any, Any], key: ApiKey, endpoint: str) -> None:
        """Check that a key may call an endpoint from where the request comes from."""
        if any(scopes.endpoints is not None or scopes.networks is not None for scopes in key.bounds):
            peer = request.client.host if request.client is not None else ""
            address = client_address(peer, forwarded(request.scope["headers"]), self._trusted)
            check_call(key.bounds, endpoint=endpoint, address=address)

    async def reload(self, authorization: str | None) -> ApiKey:
        """Return the key as Postgres has it now."""
        return await self._auth.reload(authorization)

    def check_still(self, key: ApiKey, *, model: str) -> None:
        """Check again what may have changed since the request was admitted."""
        if self._auth.was_revoked(key.id):
            raise InvalidApiKey("This API key was revoked.")
        self._holds.check_caller(key.organisation_id, key.project_id, serving=True)
        self._holds.check_model(model)

    def check_work(self, key: ApiKey, *, model: str, tier: str) -> None:
        """Check that a key may use a model in a tier, and that nothing holds it."""
        self._holds.check_caller(key.organisation_id, key.project_id, serving=True)
        self._holds.check_model(model)
        check_model(key.bounds, model)
        check_tier(key.bounds, tier)
