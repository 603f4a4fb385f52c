"""Plans that are handed on: what a report carries of itself, how it is read again, and what is left out of it.

A report holds no request and no prompt, only moments and percentiles of the traffic. Its page carries the plan as
JSON, so whoever gets it can print it again or take its data, without the trace.
"""

import re
from html import escape, unescape
from pathlib import Path

import msgspec

from pdgate.plan.assumptions import PRICES
from pdgate.plan.compare import Option
from pdgate.plan.decide import Smallest
from pdgate.plan.plan import Plan
from pdgate.plan.workload import WorkloadError

MARK = '<pre id="plan">'
CARRIED = re.compile(re.escape(MARK) + r"(.*?)</pre>", re.DOTALL)


def carried(plan: Plan) -> str:
    """Return the part of a page that carries the plan; `pdgate plan --show PAGE` reads it."""
    text = escape(msgspec.json.encode(plan).decode(), quote=False)
    return f"<details><summary>This plan as JSON</summary>{MARK}{text}</pre></details>"


def read_report(file: Path) -> Plan:
    """Return the plan of a page or of the JSON that `--json` prints.

    Raises:
        WorkloadError: unreadable, or neither of both.
    """
    try:
        text = file.read_text(encoding="utf-8")
        found = CARRIED.search(text)
        return msgspec.json.decode(unescape(found[1]) if found else text, type=Plan)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise WorkloadError(f"{file} is no report of `pdgate plan`: {error}") from None


def without_money(plan: Plan) -> Plan:
    """Return the plan without prices, costs and margin."""
    return msgspec.structs.replace(
        plan,
        money=None,
        cost_per_million=None,
        day=None,
        options=[msgspec.structs.replace(option, price_per_hour=None) for option in plan.options],
        smallest_unified=_unpriced(plan.smallest_unified),
        smallest_split=_unpriced(plan.smallest_split),
        assumptions=[text for text in plan.assumptions if not text.startswith(PRICES)],
    )


def _unpriced(fleet: Smallest | None) -> Smallest | None:
    return None if fleet is None else msgspec.structs.replace(fleet, price_per_hour=None)


def price(option: Option) -> str:
    """Return an option's price per hour as a table shows it."""
    return "-" if option.price_per_hour is None else f"{option.price_per_hour:.2f}"
