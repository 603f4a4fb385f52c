"""The pages that people see once they are signed in: `view_routes` is all of them.

Each handler enters with the right that its page needs, reads for the visit's organisation alone, and shows a template.
What is in the address says what is shown, so that links can be shared.
"""

from collections.abc import Sequence

from litestar.handlers import HTTPRouteHandler

from gateway.admin.members import Members
from gateway.admin.model_routes import ModelDesk
from gateway.admin.text_routes import TextDesk
from gateway.portal.links import Links
from gateway.portal.people import People
from gateway.portal.views.account import Account, account_routes
from gateway.portal.views.audit import audit_view_routes
from gateway.portal.views.controls import FleetControls, control_routes
from gateway.portal.views.desk import Desk
from gateway.portal.views.economics import economics_view_routes
from gateway.portal.views.fleet import fleet_view_routes
from gateway.portal.views.keys import key_view_routes
from gateway.portal.views.limits import limit_view_routes
from gateway.portal.views.member_factors import member_factor_routes
from gateway.portal.views.models import model_view_routes
from gateway.portal.views.money import MoneyWriter, money_view_routes
from gateway.portal.views.overview import overview_routes
from gateway.portal.views.people import people_view_routes
from gateway.portal.views.profile import profile_routes
from gateway.portal.views.requests import request_view_routes
from gateway.portal.views.service_accounts import service_account_view_routes
from gateway.portal.views.status import status_view_routes
from gateway.portal.views.tenants import tenant_view_routes
from gateway.portal.views.texts import text_view_routes
from gateway.portal.views.usage import usage_view_routes


def view_routes(
    desk: Desk,
    playground: Sequence[HTTPRouteHandler],
    people: People,
    links: Links,
    *,
    writer: MoneyWriter,
    controls: FleetControls,
    account: Account,
    texts: TextDesk,
    models: ModelDesk,
    members: Members,
) -> list[HTTPRouteHandler]:
    """Return the handlers of every view."""
    return [
        *overview_routes(desk),
        *usage_view_routes(desk),
        *request_view_routes(desk, texts),
        *text_view_routes(desk, texts),
        *key_view_routes(desk, members.accounts),
        *playground,
        *limit_view_routes(desk, controls.organisations),
        *money_view_routes(desk, writer),
        *people_view_routes(desk, people, links, members),
        *service_account_view_routes(desk, members),
        *member_factor_routes(desk, people, account.factors),
        *audit_view_routes(desk, people),
        *status_view_routes(desk),
        *fleet_view_routes(desk, controls),
        *control_routes(desk, controls),
        *model_view_routes(desk, models, controls),
        *tenant_view_routes(desk, controls.organisations),
        *economics_view_routes(desk),
        *account_routes(account),
        *profile_routes(account),
    ]
