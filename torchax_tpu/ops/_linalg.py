"""What the linear algebra files share: private ops behind error checks, transposes, batch broadcasting."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..registry import aten, special

# Ops whose aten form may raise (check_errors) or looks at strides call a private op that is one compiled program.
_library = torch.library.Library("torchax_tpu", "DEF")


def private(schema):
    """Define a private op; returns its overload, for `op(...)` to declare."""
    _library.define(schema)
    return getattr(torch.ops.torchax_tpu, schema.split("(")[0]).default


def is_traced(tensor):
    """Whether the values of a tensor on the device are not known yet."""
    return isinstance(tensor.jax(), jax.core.Tracer)


@special(aten._linalg_check_errors.default)
def check_errors(info, api_name, is_matrix):
    """Raise LinAlgError for a non-zero info; in a traced program values are unknown and nothing is checked."""
    if is_traced(info):
        return
    values = np.asarray(info.jax())
    if values.any():
        aten._linalg_check_errors(torch.tensor(values), api_name, is_matrix=is_matrix)


def floating(x, name):
    if x.dtype.kind not in "fc" or x.dtype.itemsize < 4:
        raise RuntimeError(f"{name}: expected a float, double, cfloat or cdouble tensor, got {x.dtype.name}")


def matrices(x, name, square=False):
    """Check that ``x`` is a batch of (square) matrices of a LAPACK dtype."""
    floating(x, name)
    if x.ndim < 2:
        raise RuntimeError(f"{name}: The input tensor A must have at least 2 dimensions.")
    if square and x.shape[-1] != x.shape[-2]:
        raise RuntimeError(f"{name}: A must be batches of square matrices, but they are {x.shape[-2]} by {x.shape[-1]} "
                           "matrices")


def mt(x):
    return jnp.swapaxes(x, -1, -2)


def mh(x):
    return jnp.conj(mt(x))


def together(*arrays):
    """Broadcast the batch axes of matrices against each other."""
    batch = np.broadcast_shapes(*(a.shape[:-2] for a in arrays))
    return [jnp.broadcast_to(a, (*batch, *a.shape[-2:])) for a in arrays]


def real_dtype(dtype):
    return np.finfo(dtype).dtype if np.dtype(dtype).kind == "f" else np.zeros((), dtype).real.dtype


def mm(a, b):
    """Matrix product at full precision, whatever the platform's default is: factors must reproduce their matrix."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
