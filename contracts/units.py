"""Types that carry their unit, so that a money amount is never added to a token count."""

from typing import Final, NewType

Nano = NewType("Nano", int)
"""Money: 1/1,000,000,000 of the installation's currency."""

NanoPerMillion = NewType("NanoPerMillion", int)
"""Price: nano-units per million tokens."""

WorkerId = NewType("WorkerId", str)
OrgId = NewType("OrgId", str)
PoolId = NewType("PoolId", str)

MAX_EXACT_NANO: Final = 2**53
"""Redis scripts compare money as IEEE doubles; a larger balance is refused, never rounded."""
