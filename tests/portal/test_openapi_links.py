"""The links in the description of the admin API: each leads from an operation to one that is there, and it works."""

import re
from collections.abc import Mapping
from typing import Any

import httpx
from portal_rig import PortalRig

from gateway.admin.links import LINKS

BODIES: Mapping[str, Any] = {
    "createOrganisation": {"name": "Linked"},
    "updateOrganisation": {"name": "Linked again"},
    "createProject": {"name": "p"},
    "updateProject": {"name": "q"},
    "createKey": {"name": "k"},
    "updateKey": {"limits": {"requests_per_minute": 5}},
    "rotateKey": {"overlap_s": 60},
    "createServiceAccount": {"name": "s"},
    "createInvite": {"email": "guest@example.org", "role": "viewer"},
    "putHold": {"mode": "read_only"},
}
CHAINS = (
    ("createOrganisation", "getOrganisation", "updateOrganisation", "getOrganisation"),
    ("createOrganisation", "createProject", "createKey", "getKey", "updateKey", "rotateKey", "revokeKey", "getKey"),
    ("createOrganisation", "createProject", "updateProject", "createServiceAccount", "deleteServiceAccount"),
    ("createOrganisation", "createInvite", "deleteInvite"),
    ("createOrganisation", "putHold", "deleteHold"),
)


class Described:
    """The operations of a description, by id."""

    def __init__(self, document: Any) -> None:
        self.operations: dict[str, tuple[str, str, Any]] = {
            operation["operationId"]: (method.upper(), path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        }

    def links(self, name: str) -> Mapping[str, Any]:
        answers = self.operations[name][2]["responses"]
        found: Mapping[str, Any] = next(answer for status, answer in answers.items() if status[0] == "2").get(
            "links", {}
        )
        return found


async def described(client: httpx.AsyncClient) -> Described:
    return Described((await client.get("/schema/openapi.json")).json())


def path_parameters(path: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", path))


async def test_every_link_leads_to_an_operation_and_says_where_each_of_its_parameters_comes_from(
    portal: PortalRig,
) -> None:
    known = await described(portal.rig.client)
    num_links = 0
    for source in LINKS:
        links = known.links(source)
        assert set(links) == set(LINKS[source]), source
        for target, link in links.items():
            num_links += 1
            assert link["operationId"] == target
            assert set(link["parameters"]) == path_parameters(known.operations[target][1]), (source, target)
            for expression in (*link["parameters"].values(), *link.get("requestBody", {}).values()):
                if expression.startswith("$request.path."):
                    name = expression.removeprefix("$request.path.")
                    assert name in path_parameters(known.operations[source][1]), (source, target)
                else:
                    assert expression.startswith("$response.body#/"), (source, target)
            if fields := link.get("requestBody"):
                schema = known.operations[target][2]["requestBody"]["content"]["application/json"]["schema"]
                assert set(fields) <= set(schema["properties"]), (source, target)
    assert num_links >= 50


async def test_what_was_made_is_got_changed_and_deleted_by_following_links_alone(
    portal: PortalRig, operator: httpx.AsyncClient
) -> None:
    known = await described(operator)
    followed = set()
    for chain in CHAINS:
        parameters: dict[str, str] = {}
        extra: dict[str, Any] = {}
        for step, name in enumerate(chain):
            method, path, _ = known.operations[name]
            filled = path.format(**parameters)
            body = {**BODIES[name], **extra} if name in BODIES else None
            answer = await operator.request(method, filled, json=body)
            assert answer.is_success, (chain, name, answer.text)
            if step + 1 == len(chain):
                break
            link = known.links(name)[chain[step + 1]]
            followed.add((name, chain[step + 1]))

            def value(expression: str, answer: httpx.Response = answer, came: Mapping[str, str] = parameters) -> Any:
                if expression.startswith("$request.path."):
                    return came[expression.removeprefix("$request.path.")]
                found = answer.json()
                for part in expression.removeprefix("$response.body#/").split("/"):
                    found = found[int(part)] if isinstance(found, list) else found[part]
                return found

            extra = {field: value(one) for field, one in link.get("requestBody", {}).items()}
            parameters = {field: value(one) for field, one in link["parameters"].items()}
    assert len(followed) >= 17
