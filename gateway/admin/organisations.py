"""`/admin/v1/organisations`, their projects, and what holds them."""

from litestar import delete, get, patch, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admin.callers import Callers
from gateway.admin.handlers import AnyRequest, checked, holds_secret, taken
from gateway.admin.paging import ListOf, page
from gateway.admin.shapes import (
    Done,
    HoldView,
    NewHold,
    NewOrganisation,
    NewProject,
    OrganisationChange,
    OrganisationView,
    ProjectChange,
    ProjectView,
)
from gateway.bounds import Bounds
from gateway.changes import Announcer, HoldBook
from gateway.holds import Hold
from gateway.limits import NO_LIMITS
from gateway.openapi import json_operation
from gateway.portal.factors import Factors
from gateway.portal.links import Links
from gateway.portal.people import normal_email
from gateway.portal.roles import Right, Role
from gateway.portal.transport import Transport
from gateway.tenants import NoSuchTenant, Organisation, Project, Tenants

TAGS = ["admin: organisations"]
ORG = "/admin/v1/organisations/{organisation:str}"


class Organisations:
    """What the handlers do beside reading and answering."""

    def __init__(self, engine: AsyncEngine, redis: Redis, links: Links, factors: Factors, transport: Transport) -> None:
        self.tenants = Tenants(engine)
        self.bounds = Bounds(engine)
        self.holds = HoldBook(engine)
        self.links = links
        self.factors = factors
        self.transport = transport
        self._announcer = Announcer(engine, redis)

    async def publish(self) -> None:
        """Make every gateway know what was changed."""
        await self._announcer.publish_pending()

    async def project(self, tenant: str, project_id: str) -> Project:
        """Return one of a tenant's projects. Raises NoSuchTenant."""
        for found in await self.tenants.list_projects(tenant):
            if found.id == project_id:
                return found
        raise NoSuchTenant(f"{tenant} has no project {project_id}")

    async def held(self, tenant: str) -> list[Hold]:
        """Return what is held of a tenant."""
        mine = {tenant, *(found.id for found in await self.tenants.list_projects(tenant))}
        return [hold for hold in await self.holds.all() if hold.kind != "model" and hold.id in mine]


def organisation_routes(callers: Callers, parts: Organisations) -> list[HTTPRouteHandler]:
    """Return the handlers of organisations."""

    @get("/admin/v1/organisations", summary="List organisations", operation_id="listOrganisations", tags=TAGS)
    async def list_organisations(request: AnyRequest) -> ListOf[OrganisationView]:
        """Return the organisations that the caller may know of; filter by `name`."""
        _, known = await callers.anybody(request)
        wanted = request.query_params.get("name")
        views = [organisation_view(found) for found in known if wanted in (None, found.name)]
        return page(request, views, lambda view: view.id)

    @post(
        "/admin/v1/organisations",
        summary="Create an organisation",
        operation_id="createOrganisation",
        tags=TAGS,
        operation_class=json_operation(NewOrganisation, OrganisationView, status=201),
    )
    async def create_organisation(request: AnyRequest) -> OrganisationView:
        """Create an organisation with one project; with `owner_email` the answer has the owner's invite."""
        caller = await callers.operator(request)
        wanted = await taken(request, NewOrganisation)
        email = normal_email(wanted.owner_email) if wanted.owner_email else ""
        made = await parts.tenants.create_organisation(
            wanted.name, limits=wanted.limits or NO_LIMITS, actor=caller.actor
        )
        await parts.tenants.create_project(made.id, "Default", actor=caller.actor)
        url = None
        if email:
            holds_secret(request)
            _, token = await parts.links.invite(made.id, email, Role.OWNER, actor=caller.actor)
            url = link_url(parts.transport, request, token)
        return organisation_view(made, invite_url=url)

    @get(ORG, summary="Get an organisation", operation_id="getOrganisation", tags=TAGS)
    async def get_organisation(request: AnyRequest, organisation: FromPath[str]) -> OrganisationView:
        """Return an organisation."""
        caller = await callers.about(request, organisation, Right.READ)
        return organisation_view(await _found(parts.tenants, caller.tenant))

    @patch(
        ORG,
        summary="Change an organisation",
        operation_id="updateOrganisation",
        tags=TAGS,
        operation_class=json_operation(OrganisationChange, OrganisationView),
    )
    async def update_organisation(request: AnyRequest, organisation: FromPath[str]) -> OrganisationView:
        """Change its name; limits are the operator's to set, whether a second factor is asked for the owner's."""
        wanted = await taken(request, OrganisationChange)
        right = Right.OWNERS if wanted.needs_second_factor is not None else Right.PROJECTS
        right = Right.FLEET if wanted.limits is not None else right
        caller = await callers.about(request, organisation, right)
        if wanted.name is not None:
            await parts.tenants.rename_organisation(caller.tenant, wanted.name, actor=caller.actor)
        if wanted.needs_second_factor is not None:
            await parts.factors.need(caller.tenant, on=wanted.needs_second_factor, actor=caller.actor)
        if wanted.limits is not None:
            await parts.bounds.set_organisation(caller.tenant, limits=wanted.limits, actor=caller.actor)
            await parts.publish()
        return organisation_view(await _found(parts.tenants, caller.tenant))

    return [list_organisations, create_organisation, get_organisation, update_organisation]


def project_routes(callers: Callers, parts: Organisations) -> list[HTTPRouteHandler]:
    """Return the handlers of projects."""

    @get(f"{ORG}/projects", summary="List projects", operation_id="listProjects", tags=TAGS)
    async def list_projects(request: AnyRequest, organisation: FromPath[str]) -> ListOf[ProjectView]:
        """Return the projects, oldest first."""
        caller = await callers.about(request, organisation, Right.READ)
        found = await parts.tenants.list_projects(caller.tenant)
        return page(request, [project_view(one) for one in found], lambda view: view.id)

    @post(
        f"{ORG}/projects",
        summary="Create a project",
        operation_id="createProject",
        tags=TAGS,
        operation_class=json_operation(NewProject, ProjectView, status=201),
    )
    async def create_project(request: AnyRequest, organisation: FromPath[str]) -> ProjectView:
        """Create a project."""
        caller = await callers.about(request, organisation, Right.PROJECTS)
        wanted = await taken(request, NewProject)
        made = await parts.tenants.create_project(
            caller.tenant,
            wanted.name,
            limits=wanted.limits or NO_LIMITS,
            scopes=checked(wanted.scopes),
            actor=caller.actor,
        )
        return project_view(made)

    @patch(
        f"{ORG}/projects/{{project:str}}",
        summary="Change a project",
        operation_id="updateProject",
        tags=TAGS,
        operation_class=json_operation(ProjectChange, ProjectView),
    )
    async def update_project(request: AnyRequest, organisation: FromPath[str], project: FromPath[str]) -> ProjectView:
        """Change its name, limits or scopes."""
        caller = await callers.about(request, organisation, Right.PROJECTS)
        wanted = await taken(request, ProjectChange)
        known = await parts.project(caller.tenant, project)
        if wanted.name is not None:
            await parts.tenants.rename_project(caller.tenant, project, wanted.name, actor=caller.actor)
        if wanted.limits is not None or wanted.scopes is not None:
            await parts.bounds.set_project(
                caller.tenant,
                project,
                limits=known.limits if wanted.limits is None else wanted.limits,
                scopes=known.scopes if wanted.scopes is None else checked(wanted.scopes),
                actor=caller.actor,
            )
            await parts.publish()
        return project_view(await parts.project(caller.tenant, project))

    return [list_projects, create_project, update_project]


def hold_routes(callers: Callers, parts: Organisations) -> list[HTTPRouteHandler]:
    """Return the handlers of what holds organisations."""

    @get(f"{ORG}/holds", summary="List holds", operation_id="listHolds", tags=TAGS)
    async def list_holds(request: AnyRequest, organisation: FromPath[str]) -> ListOf[HoldView]:
        """Return what of the organisation is suspended or may only read."""
        caller = await callers.about(request, organisation, Right.READ)
        return page(request, [hold_view(hold) for hold in await parts.held(caller.tenant)], lambda view: view.id)

    @put(
        f"{ORG}/hold",
        summary="Suspend an organisation or project",
        operation_id="putHold",
        tags=TAGS,
        operation_class=json_operation(NewHold, HoldView),
    )
    async def put_hold(request: AnyRequest, organisation: FromPath[str]) -> HoldView:
        """Refuse its calls on every gateway within the second. Reversible."""
        caller = await callers.about(request, organisation, Right.FLEET)
        wanted = await taken(request, NewHold)
        if wanted.project_id:
            await parts.project(caller.tenant, wanted.project_id)
        hold = Hold(
            kind="project" if wanted.project_id else "org",
            id=wanted.project_id or caller.tenant,
            mode=wanted.mode,
            drain=wanted.drain,
            reason=wanted.reason,
            actor=caller.actor,
        )
        await parts.holds.put(hold, org=caller.tenant)
        await parts.publish()
        return hold_view(hold)

    @delete(f"{ORG}/hold", summary="Resume an organisation", operation_id="deleteHold", tags=TAGS, status_code=200)
    async def delete_hold(request: AnyRequest, organisation: FromPath[str]) -> Done:
        """Undo a suspension; of a project with the query parameter `project_id`."""
        caller = await callers.about(request, organisation, Right.FLEET)
        project = request.query_params.get("project_id", "")
        if project:
            await parts.project(caller.tenant, project)
        kind, name = ("project", project) if project else ("org", caller.tenant)
        gone = await parts.holds.lift(kind, name, org=caller.tenant, actor=caller.actor)
        await parts.publish()
        return Done(id=name, object="hold", deleted=gone)

    return [list_holds, put_hold, delete_hold]


def link_url(transport: Transport, request: AnyRequest, token: str) -> str:
    """Return the address of a one-time link."""
    return f"{transport.origin(request.scope)}/portal/invite/{token}"


def organisation_view(found: Organisation, *, invite_url: str | None = None) -> OrganisationView:
    """Return an organisation as it is answered."""
    return OrganisationView(
        id=found.id,
        name=found.name,
        is_demo=found.is_demo,
        limits=found.limits,
        created_at=found.created_at,
        needs_second_factor=found.needs_second_factor,
        invite_url=invite_url,
    )


def project_view(found: Project) -> ProjectView:
    """Return a project as it is answered."""
    return ProjectView(**{name: getattr(found, name) for name in ProjectView.__struct_fields__})


def hold_view(hold: Hold) -> HoldView:
    """Return a hold as it is answered."""
    return HoldView(**{name: getattr(hold, name) for name in HoldView.__struct_fields__})


async def _found(tenants: Tenants, tenant: str) -> Organisation:
    found = await tenants.find_organisation(tenant)
    if found is None:
        raise NoSuchTenant(tenant)
    return found
