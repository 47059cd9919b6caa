"""The router of all paths: FastAPI's, behind a table of the paths that get most requests.

FastAPI's router compares a request with one route after another, and its layers run again whenever
a stream goes on. A path without parameters that takes nothing but POST needs none of this.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send


class Router(APIRouter):
    """Calls the endpoint of a request's path.

    Args:
        lifespan: makes the block in which the gateway serves.
    """

    def __init__(self, lifespan: Lifespan[Any]) -> None:
        super().__init__(lifespan=lifespan)
        self._posted: dict[str, ASGIApp] = {}  # applications of the paths that take POST alone

    def add(self, routes: Sequence[Route]) -> None:
        """Adds routes behind those that are there."""
        self.routes += routes
        methods_of: dict[str, set[str]] = {}
        for route in routes:
            methods_of.setdefault(route.path, set()).update(route.methods or ())
        for route in routes:
            if methods_of[route.path] == {"POST"} and not route.param_convertors:
                self._posted[route.path] = route.app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = self._posted.get(scope["path"]) if scope.get("method") == "POST" else None
        await (posted or super().__call__)(scope, receive, send)
