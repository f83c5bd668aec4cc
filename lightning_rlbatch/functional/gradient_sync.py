"""When sharded gradients are reduced: after every micro-batch, or once per optimizer step."""

from typing import Literal

GradientSync = Literal["auto", "every", "last"]
WHOLE_GRADIENTS_LIMIT = 4 * 2**30  # bytes


def reduces_once(grad_sync: GradientSync, num_trained: int) -> bool:
    """Return whether gradients stay whole on every rank until the last micro-batch.

    That saves the reductions of the other micro-batches, and takes 4 bytes for each parameter however many ranks share them, beside
    states of 16 bytes divided by their number. So ``"auto"`` does it while that is little.

    Args:
        grad_sync: ``"every"``, ``"last"``, or ``"auto"`` for ``"last"`` up to 4 GiB of whole gradients and ``"every"`` above.
        num_trained: Trained parameters, over all ranks.

    Example:
        >>> [reduces_once("auto", 500_000_000), reduces_once("auto", 7_000_000_000), reduces_once("last", 7_000_000_000)]
        [True, False, True]
    """
    return grad_sync == "last" or (grad_sync == "auto" and 4 * num_trained <= WHOLE_GRADIENTS_LIMIT)
