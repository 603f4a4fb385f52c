"""The organisation whose week of traffic new data show: played, never paid for, never an operator's worry."""

from typing import Final

DEMO_WEEK_ORG: Final = "org_demo_week"
"""Left out of reconciliation, of what is invoiced, of targets and of `pdgate usage` unless one asks for it by name."""
