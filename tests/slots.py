"""Admission slots for tests of parts that only count memory and name the tenant."""

from services.gateway.tenancy.leases import Leases
from services.gateway.tenancy.request_memory import MemoryBudget, RequestMemory
from services.gateway.tenancy.slot import Slot
from services.gateway.tenancy.tenants import Limits, Tenant
from services.gateway.tenancy.usage import counting


def slot_of(
    tenant: str = "", memory: RequestMemory | None = None, *, is_background: bool = False
) -> Slot:
    """A slot of a tenant without limits. Defaults to 1 GiB of memory."""
    leases = Leases()
    found = Tenant(tenant, Limits(), shares_caches=True, is_background=is_background)
    return Slot(found, counting(leases, found), memory or RequestMemory(MemoryBudget(1 << 30)))
