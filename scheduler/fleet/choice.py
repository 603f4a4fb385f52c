"""Which fleet the settings ask for. Adapters with libraries of their own are imported only where they are chosen."""

from pathlib import Path

from scheduler.fleet.agent import AgentFleet
from scheduler.fleet.protocol import Fleet


class FleetSettingsError(ValueError):
    """The settings name no usable fleet."""


def fleet_of(kind: str, address: str) -> Fleet | None:
    """Return the adapter of a kind; None = workers are started by others, and their number is theirs.

    Raises:
        FleetSettingsError: an unknown kind, or no address.
    """
    match kind:
        case "none":
            return None
        case "local" | "ray" | "kubernetes":  # an agent beside the processes, or at Ray's or Kubernetes' interface
            if not address:
                raise FleetSettingsError(
                    f"SCHEDULER_FLEET_ADDRESS: the {kind} fleet needs the path of its agent's socket"
                )
            return AgentFleet(Path(address))
        case _:
            raise FleetSettingsError(f"SCHEDULER_FLEET: {kind!r} is no fleet")
