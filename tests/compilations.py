"""Counts the programs that are compiled (or fetched from the compile cache), also outside our own functions.

Through `jax.monitoring`: the size of a jitted function's own cache is private, and reads 0 in a session that has compiled thousands.
"""

import jax

PROGRAMS: list[str] = []


def _heard(name, _, **__):
    if name == "/jax/core/compile/backend_compile_duration":
        PROGRAMS.append(name)


jax.monitoring.register_event_duration_secs_listener(_heard)


def count() -> int:
    return len(PROGRAMS)
