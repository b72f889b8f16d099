"""Copy many tensors, float32 to another type, in one launch."""

import triton
import triton.language as tl

from structured_ensembles.cuda.kernels.order import wait_for_earlier


@triton.jit(do_not_specialize=("pieces",))
def copy_pieces(table, like, pieces, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False):
    """Copy so many pieces of at most BLOCK numbers; table: (8, pieces) int64.

    A piece has rows of adjacent numbers in the target. For each piece: its source and target (addresses), how many
    numbers it has, whether the target is of the type of `like` (else float32), the length of a row, the step from one
    number of a row to the next in the source, and the steps from row to row in the source and in the target.
    """
    wait_for_earlier(DEPENDENT)
    piece = tl.program_id(0)
    source = tl.load(table + piece).to(tl.pointer_type(tl.float32))
    target = tl.load(table + pieces + piece)
    size = tl.load(table + 2 * pieces + piece)
    narrow = tl.load(table + 3 * pieces + piece)
    length = tl.load(table + 4 * pieces + piece).to(tl.int32)
    step = tl.load(table + 5 * pieces + piece)
    source_row = tl.load(table + 6 * pieces + piece)
    target_row = tl.load(table + 7 * pieces + piece)
    place = tl.arange(0, BLOCK)
    row = place // length
    column = place % length
    used = place < size
    values = tl.load(source + row * source_row + column * step, mask=used)
    at = row * target_row + column
    if narrow == 1:
        tl.store(target.to(tl.pointer_type(like.dtype.element_ty)) + at, values.to(like.dtype.element_ty), mask=used)
    else:
        tl.store(target.to(tl.pointer_type(tl.float32)) + at, values, mask=used)
