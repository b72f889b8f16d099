"""Copy many tensors, float32 to another type, in one launch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("pieces",))
def copy_pieces(table, like, pieces, BLOCK: tl.constexpr):
    """Copy so many pieces of at most BLOCK numbers; table: (4, pieces) int64.

    For each piece its source, its target (addresses), its length, and whether the target is of the type of `like`
    (else float32).
    """
    piece = tl.program_id(0)
    source = tl.load(table + piece).to(tl.pointer_type(tl.float32))
    target = tl.load(table + pieces + piece)
    length = tl.load(table + 2 * pieces + piece)
    narrow = tl.load(table + 3 * pieces + piece)
    place = tl.arange(0, BLOCK)
    values = tl.load(source + place, mask=place < length)
    if narrow == 1:
        tl.store(
            target.to(tl.pointer_type(like.dtype.element_ty)) + place,
            values.to(like.dtype.element_ty),
            mask=place < length,
        )
    else:
        tl.store(target.to(tl.pointer_type(tl.float32)) + place, values, mask=place < length)
