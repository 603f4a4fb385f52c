"""What can be done next with what an operation of the admin API answers: OpenAPI's links. Pure.

Programs that read the description find their way from what they made to what they may do with it: get, change, delete.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

_BODY_ID: Final = "$response.body#/id"
_FIRST_ID: Final = "$response.body#/data/0/id"


class Lead(msgspec.Struct, frozen=True, kw_only=True):
    """One operation that may follow: where its path parameters, and fields of its body, come from."""

    parameters: Mapping[str, str]
    body: Mapping[str, str] = MappingProxyType({})


def _same(*names: str) -> Mapping[str, str]:
    """Return path parameters that stay as they were."""
    return {name: f"$request.path.{name}" for name in names}


_ORG: Final = _same("organisation")
_NEW_ORG: Final = {"organisation": _BODY_ID}


def _of_new_org(*targets: str) -> Mapping[str, Lead]:
    return {target: Lead(parameters=_NEW_ORG) for target in targets}


def _of_made(name: str, *targets: str, found: str = _BODY_ID) -> Mapping[str, Lead]:
    return {target: Lead(parameters={**_ORG, name: found}) for target in targets}


def _of_same(*targets: str, names: tuple[str, ...] = ("organisation",)) -> Mapping[str, Lead]:
    return {target: Lead(parameters=_same(*names)) for target in targets}


_KEY: Final = ("organisation", "key")
_BUDGET: Final = ("organisation", "kind", "kind_id")
_IN_PROJECT: Final = {
    target: Lead(parameters=_ORG, body={"project_id": _BODY_ID}) for target in ("createKey", "createServiceAccount")
}

LINKS: Final[Mapping[str, Mapping[str, Lead]]] = MappingProxyType(
    {
        "createOrganisation": _of_new_org(
            *("getOrganisation", "updateOrganisation", "createProject", "createInvite", "putHold", "putProfile"),
        ),
        "listOrganisations": {"getOrganisation": Lead(parameters={"organisation": _FIRST_ID})},
        "getOrganisation": _of_same("updateOrganisation", "listProjects", "putHold"),
        "updateOrganisation": _of_same("getOrganisation"),
        "createProject": {**_of_made("project", "updateProject"), **_of_same("listProjects"), **_IN_PROJECT},
        "updateProject": _IN_PROJECT,
        "putHold": _of_same("listHolds", "deleteHold"),
        "createKey": _of_made("key", "getKey", "updateKey", "rotateKey", "revokeKey"),
        "getKey": _of_same("updateKey", "rotateKey", "revokeKey", names=_KEY),
        "updateKey": _of_same("getKey", "rotateKey", "revokeKey", names=_KEY),
        "rotateKey": _of_same("getKey", "revokeKey", names=_KEY),
        "revokeKey": _of_same("getKey", names=_KEY),
        "createInvite": {**_of_made("invite", "deleteInvite"), **_of_same("listInvites")},
        "createServiceAccount": {**_of_made("account", "deleteServiceAccount"), **_of_same("listServiceAccounts")},
        "listMembers": _of_made("person", "updateMember", found=_FIRST_ID),
        "updateMember": _of_same("resetMember", "deleteMember", names=("organisation", "person")),
        "putBudget": {**_of_same("deleteBudget", names=_BUDGET), **_of_same("listBudgets")},
        "createCredit": _of_same("listCredits"),
        "putProfile": _of_same("getProfile"),
        "listInvoices": _of_made("invoice", "getInvoice", found="$response.body#/data/0/value/id"),
        "getInvoice": _of_same("issueInvoice", names=("organisation", "invoice")),
        "putStoredTexts": _of_same("getStoredTexts", "deleteStoredTexts"),
        "deleteStoredTexts": _of_same("getStoredTexts"),
        "adminListModels": {"adminPauseModel": Lead(parameters={"model": "$response.body#/data/0/value/id"})},
        "adminPauseModel": _of_same("adminResumeModel", names=("model",)),
        "putModelName": _of_same("deleteModelName", names=("name",)),
        "getWorker": _of_same("orderWorker", names=("worker",)),
        "orderWorker": {"getWorkerOrder": Lead(parameters={**_same("worker"), "order": _BODY_ID})},
        "putSteering": _of_same("getSteering", "deleteSteering", names=("pool",)),
        "deleteSteering": _of_same("getSteering", names=("pool",)),
    }
)
