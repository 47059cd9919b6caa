"""/v1/batches: many requests in a file, which run in the gaps of other requests."""

import time
from collections.abc import Collection, Mapping

from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import InvalidRequest, NotFound
from services.common.model_spec import Task
from services.gateway.batches.batch_files import LIFETIME_S, new_id
from services.gateway.batches.batch_lines import ENDPOINTS
from services.gateway.batches.batch_runner import BatchRunner
from services.gateway.batches.batch_store import BatchRecord, BatchStore, check_input
from services.gateway.endpoints.file_routes import needed, page
from services.gateway.forms.batches import (
    BatchCounts,
    BatchFault,
    BatchFaults,
    BatchList,
    BatchObject,
    BatchRequest,
    parse_batch_request,
)
from services.gateway.forms.json_body import Body
from services.gateway.http.exchange import JsonResponse
from services.gateway.request.chat import ChatService
from services.gateway.tenancy.slot import Slot
from services.gateway.tenancy.tenants import bound_key_id, bound_tenant

_MAX_WINDOW_H = 168
_FOR_VECTORS = "/v1/embeddings"


class BatchRoutes:
    """The handlers of batches.

    Args:
        runner: runner of batches. None if batches are switched off.
        task: task of the model, which decides which endpoints it has.
    """

    def __init__(self, runner: BatchRunner | None, task: Task) -> None:
        self._runner = runner
        self._task = task

    async def create(self, service: ChatService, _: Request, slot: Slot, body: Body) -> Response:
        """Creates a batch of an uploaded file's lines."""
        batches, tenant = self._batches, slot.tenant.name
        request = parse_batch_request(body)
        window_s = self._check(request)
        await check_input(batches.files, tenant, request.input_file_id)
        now, after = int(time.time()), request.output_expires_after
        record = BatchRecord(
            id=new_id("batch_"),
            endpoint=request.endpoint,
            model=service.model_name,
            input_file_id=request.input_file_id,
            window=request.completion_window,
            key_id=bound_key_id(),
            metadata=request.metadata,
            created_at=now,
            expires_at=now + window_s,
            results_s=LIFETIME_S if after is None else after.seconds,
        )
        await batches.create(tenant, record)
        self._look()
        return JsonResponse(_object(record))

    async def batches(self, request: Request) -> Response:
        """Returns a page of the tenant's batches, the newest first."""
        batches, tenant = self._batches, bound_tenant().name
        while True:
            names = (await batches.names(tenant))[::-1]
            shown, has_more = page(request, names, names, 20, 100)
            data: list[BatchObject] = []
            for name in shown:
                try:
                    data.append(_object(await batches.get(tenant, name)))
                except NotFound:  # Redis has evicted the record.
                    await batches.expire(tenant, name)
            if len(data) == len(shown):
                break
        return JsonResponse(
            BatchList(data, data[0].id if data else None, data[-1].id if data else None, has_more)
        )

    async def batch(self, request: Request) -> Response:
        """Returns a batch."""
        name = request.path_params["name"]
        return JsonResponse(_object(await self._batches.get(bound_tenant().name, name)))

    async def cancel(self, request: Request) -> Response:
        """Cancels a batch. Its results so far remain."""
        name = request.path_params["name"]
        record = await self._batches.cancel(bound_tenant().name, name)
        self._look()
        return JsonResponse(_object(record))

    @property
    def _batches(self) -> BatchStore:
        return needed(None if self._runner is None else self._runner.store)

    def _look(self) -> None:
        """Lets this gateway look at batches now."""
        if self._runner is not None:
            self._runner.wake()

    def _check(self, request: BatchRequest) -> int:
        """Checks a request, and returns its completion window in seconds."""
        hours = int(request.completion_window.removesuffix("h"))
        if hours > _MAX_WINDOW_H:
            raise InvalidRequest(
                f"completion_window is '24h', or another number of hours up to {_MAX_WINDOW_H}",
                param="completion_window",
            )
        served: Collection[str] = ()
        if self._task in ("generate", "embed"):
            is_embedding = self._task == "embed"
            served = [path for path in ENDPOINTS if (path == _FOR_VECTORS) == is_embedding]
        if request.endpoint not in served:
            shown = ", ".join(served) or "none"
            raise InvalidRequest(f"endpoints of this model's batches: {shown}", param="endpoint")
        return hours * 3600


def _object(record: BatchRecord) -> BatchObject:
    faults = [BatchFault(each.code, each.message, each.param, each.line) for each in record.faults]
    times: Mapping[str, int] = record.times
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        model=record.model,
        errors=BatchFaults(faults) if faults else None,
        input_file_id=record.input_file_id,
        completion_window=record.window,
        status=record.status,  # type: ignore[arg-type]
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        created_at=record.created_at,
        expires_at=record.expires_at,
        request_counts=BatchCounts(record.total, record.completed, record.failed),
        metadata=record.metadata,
        in_progress_at=times.get("in_progress_at"),
        finalizing_at=times.get("finalizing_at"),
        completed_at=times.get("completed_at"),
        failed_at=times.get("failed_at"),
        expired_at=times.get("expired_at"),
        cancelling_at=times.get("cancelling_at"),
        cancelled_at=times.get("cancelled_at"),
    )
