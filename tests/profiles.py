"""How hard hypothesis tries: ``ci`` by default, ``HYPOTHESIS_PROFILE=long`` for a night's run.

Laws take the number of examples from here, scaled down where one example is dear, so that the same test serves both.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["examples"]

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
_CI, _LONG = 200, 10_000

settings.register_profile("ci", max_examples=_CI, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW)
settings.register_profile("long", max_examples=_LONG, deadline=None, suppress_health_check=_SLOW, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def examples(ci: int) -> settings:
    """``@examples(50)``: so many in CI, the full ten thousand in the long run."""
    return settings(max_examples=_LONG if settings.default is not None and settings.default.max_examples == _LONG else ci)
