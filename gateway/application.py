"""Litestar without what no handler of ours uses."""

from litestar import Litestar
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin


class Application(Litestar):
    """Litestar whose handlers take and give msgspec Structs only.

    By itself Litestar imports pydantic, version 1 in it included, and attrs wherever they are installed, as they are
    with others of our libraries.
    """

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]
