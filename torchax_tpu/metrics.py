"""What the device did that a user may want to count.

Attributes:
    host_calls: {overload name, such as "aten.linalg_ldl_solve.default": how often torch's CPU kernel ran for it}.
"""

host_calls = {}


def reset():
    """Count from zero again."""
    host_calls.clear()
