"""Settings: one frozen value per service, read from the environment once, at the door."""

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


class SettingsError(ValueError):
    """The environment does not describe a service; the message names each bad variable."""


def traces_endpoint() -> str:
    """Where OpenTelemetry's standard variables send traces; empty: nowhere."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if endpoint := os.environ.get(name, "").strip():
            return endpoint
    return ""


class ServiceSettings(BaseSettings):
    """Base of a service's settings. A field `port` of prefix `GATEWAY_` is `GATEWAY_PORT`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Reads the settings.

        Raises:
            SettingsError: a variable with the service's prefix is unknown (pydantic-settings
                would drop a misspelt one in silence), missing or of the wrong form.
        """
        environment = os.environ if environment is None else environment
        prefix = cls.model_config.get("env_prefix", "")
        given: dict[str, Any] = {
            name: value for name, value in environment.items() if name.startswith(prefix)
        }
        known = {prefix + name.upper(): name for name in cls.model_fields}
        if unknown := sorted(set(given) - set(known)):
            raise SettingsError(
                f"unknown variable {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        try:
            return cls.model_validate_strings({known[name]: value for name, value in given.items()})
        except ValidationError as error:
            lines = [
                f"{prefix}{'.'.join(map(str, e['loc'])).upper()}: {e['msg']}"
                for e in error.errors()
            ]
            raise SettingsError("; ".join(lines)) from None
