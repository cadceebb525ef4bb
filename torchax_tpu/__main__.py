"""``python -m torchax_tpu script.py [args]``: run an unmodified script with the device ready.

``--cuda-as-jax`` (before or after the script's name) gives the script's "cuda" the JAX device. That takes a
TorchFunctionMode, which the package otherwise does without: it is active in this run only, in
every thread, and costs a microsecond or so per call.
"""

import functools
import os
import runpy
import sys

from torchax_tpu.cuda_names import cuda_as_jax

FLAG = "--cuda-as-jax"
USAGE = f"usage: python -m torchax_tpu [{FLAG}] (script.py | -m module) [arguments]"


def main(argv):
    """Run the script (or ``-m module``) named in ``argv`` as ``__main__``; returns the exit status."""
    translated = FLAG in argv
    argv = [a for a in argv if a != FLAG]
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{__doc__}")
        return 0 if argv else 2
    module = argv[0] == "-m"
    if module and len(argv) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    if not module and not os.path.exists(argv[0]):
        print(f"python -m torchax_tpu: no such script: {argv[0]}\n{USAGE}", file=sys.stderr)
        return 2
    sys.argv = argv[1:] if module else argv
    sys.path[0] = "" if module else os.path.dirname(os.path.abspath(argv[0]))
    run = functools.partial(runpy.run_module, argv[1], run_name="__main__", alter_sys=True) if module else functools.partial(
        runpy.run_path, argv[0], run_name="__main__")
    if translated:
        with cuda_as_jax():
            run()
    else:
        run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
