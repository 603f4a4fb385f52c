"""What the adapter uses of Stripe's API, on this machine: its shapes, its idempotency keys, and its bad days."""

import asyncio
import hashlib
import hmac
import json
import re
import time
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl

from granian.constants import Interfaces
from granian.server.embed import Server
from litestar import HttpMethod, Litestar, Request, Response, route
from litestar.params import FromPath

from tests.processes import free_port

API_KEY = "sk_test_verysecretkey"
WEBHOOK_SECRET = "whsec_verysecret"
_FIELD = re.compile(r"\[(.*?)\]")


class Refusal(Exception):
    """An error in Stripe's shape."""

    def __init__(self, status, kind, code, message):
        super().__init__(message)
        self.answer = status, {"error": {"type": kind, "code": code, "message": message}}


class StripeServer:
    """Keeps what it was told. `faults`: (path's end, what, how often); `declines`: cards that the bank refuses."""

    def __init__(self):
        self.url = ""
        self.calls = []  # (method, path, idempotency key)
        self.customers = {}
        self.invoices = {}
        self.notes = []
        self.charges = []  # (invoice, amount): money that really moved
        self.refunds = []
        self.faults = []
        self.declines = 0
        self.no_card = False
        self.refuses_refunds = False
        self.acted = asyncio.Event()  # something was done whose answer is held
        self.released = asyncio.Event()
        self._kept = {}

    def fail(self, path, what, times=1):
        """`lost`: done, and no answer; `held`: the answer waits for `released`; or a status, not done."""
        self.faults.append([path, what, times])

    def keys_of(self, path):
        return [key for _, called, key in self.calls if called.endswith(path)]

    def _fault(self, path):
        for fault in self.faults:
            if path.endswith(fault[0]) and fault[2]:
                fault[2] -= 1
                return fault[1]
        return None

    async def answer(self, request):
        method, path = request.method, request.url.path
        key = request.headers.get("idempotency-key", "")
        self.calls.append((method, path, key))
        if request.headers.get("authorization") != f"Bearer {API_KEY}":
            given = request.headers.get("authorization", "")
            return 401, {"error": {"type": "invalid_request_error", "message": f"Invalid API Key provided: {given}"}}
        fault = self._fault(path)
        if isinstance(fault, int):
            return fault, {"error": {"type": "api_error", "message": "not now"}}
        raw = await request.body()
        done = self._once(method, path, key, raw, dict(request.query_params))
        if fault in ("lost", "held"):
            self.acted.set()
            await self.released.wait()
        return done

    def _once(self, method, path, key, raw, query):
        if key and key in self._kept:
            told, answer = self._kept[key]
            if told != (path, raw):
                return 400, {"error": {"type": "idempotency_error", "message": "Keys for idempotent requests ..."}}
            return answer
        try:
            answer = 200, self._act(method, path.removeprefix("/v1"), _nested(parse_qsl(raw.decode())) | query)
        except Refusal as refusal:
            answer = refusal.answer
        if key:
            self._kept[key] = (path, raw), answer
        return answer

    def _act(self, method, path, told):  # noqa: PLR0911 - a route each
        match (method, *path.strip("/").split("/")):
            case ("POST", "customers"):
                made = {"id": f"cus_{len(self.customers)}", "object": "customer", **told}
                self.customers[made["id"]] = made
                return made
            case ("POST", "invoices"):
                made = {
                    "id": f"in_{len(self.invoices)}", "object": "invoice", "status": "draft", "total": 0,
                    "amount_due": 0, "amount_paid": 0, "hosted_invoice_url": None, "metadata": {}, **told,
                }  # fmt: skip
                self.invoices[made["id"]] = made
                return made
            case ("GET", "invoices"):
                mine = [one for one in self.invoices.values() if one["customer"] == told["customer"]]
                return {"object": "list", "data": mine, "has_more": False, "url": "/v1/invoices"}
            case ("GET", "invoices", invoice):
                return self.invoices[invoice]
            case ("DELETE", "invoices", invoice):
                del self.invoices[invoice]
                return {"id": invoice, "object": "invoice", "deleted": True}
            case ("POST", "invoiceitems"):
                about = self.invoices[told["invoice"]]
                assert (about["status"], about["currency"]) == ("draft", told["currency"])
                about["total"] += int(told["amount"])
                about["amount_due"] = about["total"]
                return {"id": f"ii_{len(self.calls)}", "object": "invoiceitem", **told}
            case ("POST", "invoices", invoice, "finalize"):
                about = self.invoices[invoice]
                about |= {"status": "open", "hosted_invoice_url": f"https://pay.example/{invoice}"}
                return about
            case ("POST", "invoices", invoice, "void"):
                self.invoices[invoice]["status"] = "void"
                return self.invoices[invoice]
            case ("POST", "invoices", invoice, "pay"):
                return self._pay(self.invoices[invoice], told)
            case ("GET", "invoice_payments"):
                about = told["payment[payment_intent]"].removeprefix("pi_")
                paid = [{"id": f"inpay_{about}", "object": "invoice_payment", "invoice": about}]
                data = paid if about in self.invoices else []
                return {"object": "list", "data": data, "has_more": False, "url": "/v1/invoice_payments"}
            case ("POST", "credit_notes"):
                return self._note(self.invoices[told["invoice"]], told)
        raise Refusal(404, "invalid_request_error", "resource_missing", f"Unrecognized request URL ({method}: {path})")

    def _pay(self, about, told):
        if about["status"] != "open":
            raise Refusal(400, "invalid_request_error", "invoice_not_payable", "Invoice is already paid")
        if self.no_card:
            raise Refusal(
                400, "invalid_request_error", "resource_missing", "This customer has no default payment method"
            )
        if self.declines:
            self.declines -= 1
            raise Refusal(402, "card_error", "card_declined", "Your card was declined.")
        return self.charge(about)

    def charge(self, about):
        """The bank pays: by the adapter's call, by Stripe's own retry, or by the buyer at the hosted page."""
        self.charges.append((about["id"], about["amount_due"]))
        about |= {"status": "paid", "amount_paid": about["amount_due"]}
        return about

    def _note(self, about, told):
        amount = int(told["amount"])
        if about["status"] == "paid":
            if self.refuses_refunds:
                raise Refusal(400, "invalid_request_error", "charge_already_refunded", "already refunded")
            assert int(told["refund_amount"]) == amount
            self.refunds.append((about["id"], amount))
        else:
            about["amount_due"] -= amount
        self.notes.append(told)
        return {"id": f"cn_{len(self.notes)}", "object": "credit_note", **told}

    def refund(self, about, amount):
        """Somebody refunds a payment in Stripe itself; return the charge as messages have it."""
        self.refunds.append((about["id"], amount))
        return self.charge_of(about)

    def charge_of(self, about):
        back = sum(amount for invoice, amount in self.refunds if invoice == about["id"])
        return {
            "id": f"ch_{about['id']}", "object": "charge", "amount": about["amount_paid"], "amount_refunded": back,
            "currency": about["currency"], "payment_intent": f"pi_{about['id']}", "metadata": {},
        }  # fmt: skip

    def event(self, kind, about, *, at_s=None, **changes):
        """A message's body, as Stripe sends it of an invoice."""
        return json.dumps({
            "id": f"evt_{kind}_{about['id']}", "object": "event", "type": kind, "created": int(at_s or time.time()),
            "livemode": False, "data": {"object": {**about, **changes}}, "api_version": "2026-10-01",
        }).encode()  # fmt: skip

    def app(self):
        @route("/{path:path}", http_method=[HttpMethod.GET, HttpMethod.POST, HttpMethod.DELETE])
        async def anything(request: Request, path: FromPath[str]) -> Response:
            status, body = await self.answer(request)
            return Response(body, status_code=status, media_type="application/json")

        return Litestar([anything], openapi_config=None)


def _nested(pairs):
    """`metadata[a]=1` as {"metadata": {"a": "1"}}."""
    told = {}
    for name, value in pairs:
        outer, *inner = name.split("[", 1)[0], *_FIELD.findall(name)
        if inner:
            told.setdefault(outer, {})[inner[0]] = value
        else:
            told[outer] = value
    return told


def signed(body, *, secret=WEBHOOK_SECRET, at_s=None):
    """The header that Stripe sends with a message."""
    at = int(time.time() if at_s is None else at_s)
    mac = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={mac}"


@asynccontextmanager
async def running_stripe():
    server, port = StripeServer(), free_port()
    server.url = f"http://127.0.0.1:{port}"
    embedded = Server(server.app(), address="127.0.0.1", port=port, interface=Interfaces.ASGI, log_enabled=False)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(embedded.serve())
        try:
            yield server
        finally:
            server.released.set()
            embedded.stop()
            await running
