"""Where one installation keeps its files. Nothing here touches the disk."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

DEFAULT_DATA = Path(".pdgate")


def checkout() -> Path:
    """Return the folder that holds the packages: a clone, or site-packages of an installed wheel."""
    return Path(__file__).resolve().parent.parent


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of one data folder, and of the downloads that all data folders share."""

    data: Path
    engine: Path  # virtual environment with SGLang; the same for every data folder
    models: Path  # one folder per prepared model; the same for every data folder

    @property
    def env_file(self) -> Path:
        """URLs and keys of the running stack, mode 0600."""
        return self.data / "env"

    @property
    def lock_file(self) -> Path:
        """Held by the running stack; names its process."""
        return self.data / "lock"

    @property
    def logs(self) -> Path:
        """One file per process."""
        return self.data / "logs"

    @property
    def decisions(self) -> Path:
        """The scheduler's decision logs, one per pool, rotated."""
        return self.data / "decisions"

    @property
    def prometheus(self) -> Path:
        """What Prometheus is started with to scrape this stack."""
        return self.data / "prometheus"

    @property
    def demo_week(self) -> Path:
        """Whether a week of demo traffic is to be played, and which."""
        return self.data / "demo-week.json"

    @property
    def timed_models(self) -> Path:
        """Tokenizers for the timed engine: trained here, nothing to download."""
        return self.data / "models-timed"

    @property
    def libraries(self) -> Path:
        """Shared libraries that the machine lacks."""
        return self.engine.parent / "lib"

    @property
    def kv_store(self) -> Path:
        """KV pages that engines share under hand-off store; bounded and swept by the workers."""
        return self.data / "kv-store"

    @property
    def fleet_socket(self) -> Path:
        """Where the scheduler asks the stack for workers; in a folder of its own, which is closed to others."""
        return self.data / "fleet" / "socket"

    def journal(self, process: str) -> Path:
        """Return the folder for the journal of one process."""
        return self.data / "journals" / process


def layout_of(data: Path, environ: Mapping[str, str] = os.environ) -> Layout:
    """Return the layout for a data folder.

    PDGATE_ENGINE_DIR and PDGATE_MODELS_DIR move the shared downloads, which otherwise live in the
    checkout's own `.pdgate`, or beside the data when pdgate was installed from a wheel.
    """
    root = checkout()
    shared = root / DEFAULT_DATA if (root / "pyproject.toml").exists() else data.absolute()
    engine = Path(environ["PDGATE_ENGINE_DIR"]) if environ.get("PDGATE_ENGINE_DIR") else shared / "engine"
    models = Path(environ["PDGATE_MODELS_DIR"]) if environ.get("PDGATE_MODELS_DIR") else engine.parent / "models"
    return Layout(data=data.absolute(), engine=engine.absolute(), models=models.absolute())


def catalog_file() -> Path:
    """Return the catalogue in force: PDGATE_CATALOG, `models.toml` here, or the one that came with pdgate."""
    if named := os.environ.get("PDGATE_CATALOG"):
        return Path(named).absolute()
    here = Path("models.toml")
    if here.exists():
        return here.absolute()
    shipped = checkout() / "models.toml"
    return shipped if shipped.exists() else Path(__file__).with_name("models.toml")
