"""Order of kernels: one may be started while the one before it ends (programmatic dependent launch, from Hopper on)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    """Wait until the kernels before this one are done; then let the next one be started, which waits itself.

    A kernel must neither read nor write before: what it writes may still be read by the one before. DEPENDENT: whether
    it was launched so; see `dependent_launches`.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
