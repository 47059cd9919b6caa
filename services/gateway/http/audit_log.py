"""The audit log: a line for each request that generates, and the counters of each tenant's use."""

import logging
from collections.abc import Mapping

from starlette.types import Scope

from services.common.telemetry import log_line
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenancy.tenants import Identity

log = logging.getLogger("triptych.audit")


class AuditLog:
    """Writes the audit log.

    Args:
        metrics: metrics of the gateway.
        model: name of the model.
    """

    def __init__(self, metrics: GatewayMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model

    def write(self, identity: Identity, scope: Scope) -> None:
        """Writes the line of a request that has ended, and counts its tokens for the tenant.
        Nothing of the request's content is logged.
        """
        tenant, outcome = identity.tenant.name, scope["state"]["outcome"]
        used: Mapping[str, int] = scope["state"]["used"]
        self._metrics.tenant_request(tenant, outcome).inc()
        for kind, amount in used.items():
            if amount:
                self._metrics.used_by_tenant(tenant, kind).inc(amount)
        who = {"tenant": tenant, "key": identity.key_id, "model": self._model}
        log_line(log, logging.INFO, scope["path"], {**who, **used, "outcome": outcome})
