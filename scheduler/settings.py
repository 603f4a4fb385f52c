"""Settings of the scheduler process, read from ``SCHEDULER_*``."""

import uuid
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from contracts.environment import RedisUrl, Secret
from scheduler.helm import HelmSettings
from scheduler.policy.ratio import Mode

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scheduler process. It serves every pool of the catalogue, as leader or standby of each."""

    redis_url: RedisUrl
    catalog: Path
    id: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))
    suspect_after_s: Positive = 0.3
    """Silence of a worker's Control stream after which it gets no new requests."""
    dead_after_s: Positive = 1.0
    """Silence, or time without a stream, after which a worker's requests count as lost."""
    pools: tuple[str, ...] = ()
    """Pools that this process serves; none = all, of which it leads its share. Each pool needs at least one process,
    better two."""
    ratio_mode: Literal["auto", "shadow", "manual"] = "auto"
    """Who decides how many workers prefill and decode, unless an operator set it per pool: the controller;
    nobody, and the controller only says what it would do; or the roles that workers started with."""
    fleet: Literal["none", "local", "ray", "kubernetes"] = "none"
    """Who places workers of pools that have `scaling` in the catalogue; none = nobody: they are started by hand."""
    fleet_address: str = ""
    """Path of the socket of that fleet's agent: pdgate up, scheduler.fleet.ray_agent or .kubernetes_agent."""
    fleet_simulated: bool = False
    """Whether the workers that it starts run the timed engine: told to clients before the first one is there."""
    scaling: Literal["auto", "shadow", "off"] = "auto"
    """Whether the autoscaler acts, only says what it would do, or is not there."""
    decision_log: Path | None = None
    """Folder of the decision log, one file per pool; none = no log."""
    decision_log_max_bytes: Annotated[int, msgspec.Meta(ge=65_536)] = 64 * 1024 * 1024
    decision_log_keep: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8
    """Full files kept per pool."""
    peer_token: Secret = Secret("")
    """Shown to workers: one of those that they accept. Of several, by commas, the first."""
    tls_ca: str = ""
    """PEM: with the next two, TLS in both directions between our processes."""
    tls_cert: str = ""
    """PEM: shown to workers."""
    tls_key: str = ""
    """PEM: of the certificate."""
    tls_name: str = ""
    """Name that the certificates of workers carry; empty = their host."""
    metrics_listen: str = ""
    """host:port of the metrics endpoint; empty = none."""
    otlp_endpoint: str = ""
    """OTLP/gRPC collector, http://host:4317; empty = no traces."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_json: bool = True

    @property
    def helm(self) -> HelmSettings:
        """What the settings say about steering."""
        return HelmSettings(
            mode=Mode(self.ratio_mode),
            decision_log=self.decision_log,
            decision_log_max_bytes=self.decision_log_max_bytes,
            decision_log_keep=self.decision_log_keep,
            scaling=self.scaling,
            fleet_simulated=self.fleet_simulated,
        )


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Periods and limits of time that operators do not set, seconds."""

    discover_s: float = 0.5
    tick_s: float = 0.1
    lease_ttl_s: float = 1.5
    lease_renew_s: float = 0.5
    elect_poll_s: float = 0.2
    hand_back_after_s: float = 20.0
    """How long another process must have been the first for a pool before its leader gives it up."""
    gateway_poll_s: float = 1.0
    gateway_dead_after_s: float = 3.0
    hand_off_min_s: float = 5.0
    hand_off_factor: float = 10.0
    sweep_s: float = 2.0
    outcome_poll_s: float = 0.2
