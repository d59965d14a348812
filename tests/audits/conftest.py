"""Audits read what the compiler made: programs are compiled as users' are, and never loaded from a cache."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True)
def compiled_as_users_compile(monkeypatch):
    """In this process and in those that an audit starts."""
    settings = {"jax_enable_compilation_cache": False, "jax_disable_most_optimizations": False}
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
        monkeypatch.setenv(name.upper(), str(int(value)))
    compilation_cache.reset_cache()  # it remembers whether it was on
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
