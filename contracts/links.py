"""What lies between two workers, as a bounded label."""

import enum


class Link(enum.StrEnum):
    """The kinds of links, the cheapest first."""

    NODE = "node"
    CROSS_NODE = "cross_node"
    CROSS_ZONE = "cross_zone"


def link_between(node: str, zone: str, other_node: str, other_zone: str) -> Link:
    """Return the link between two machines. Machines have unique names; no zone is a zone of its own."""
    if zone != other_zone:
        return Link.CROSS_ZONE
    return Link.NODE if node == other_node else Link.CROSS_NODE
