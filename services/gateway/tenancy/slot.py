"""The admission slot of a request. `Admission` makes one for each request."""

from dataclasses import dataclass

from services.gateway.tenancy.request_memory import RequestMemory
from services.gateway.tenancy.tenants import Tenant
from services.gateway.tenancy.usage import Usage


@dataclass(frozen=True, slots=True)
class Slot:
    """The admission slot of a running request. Valid inside the `with` that made it.

    Attributes:
        tenant: tenant that the request belongs to.
        usage: part of the tenant's limits that the request uses.
        memory: memory that the request holds.
    """

    tenant: Tenant
    usage: Usage
    memory: RequestMemory
