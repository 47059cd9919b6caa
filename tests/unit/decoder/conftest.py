"""Profiles of hypothesis, chosen by `--hypothesis-profile`."""

from hypothesis import settings

settings.register_profile("schedules", max_examples=10_000)
