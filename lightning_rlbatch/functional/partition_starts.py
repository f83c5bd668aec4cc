"""First partitions for a search to improve, as matrices of sample indices (see `exchange`)."""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from lightning_rlbatch.functional.workload import IntArray


def to_matrix(parts: list[list[int]], num_samples: int, extra: int = 0) -> IntArray:
    """Write parts as rows, padded with the dummy index ``num_samples``.

    Args:
        parts: ``k`` lists of sample indices.
        num_samples: N, also the index of the dummy.
        extra: Columns beyond the longest part.

    Returns:
        ``[k, longest + extra]``, int64.

    Example:
        >>> to_matrix([[2], [0, 1]], 3)
        array([[2, 3],
               [0, 1]])
    """
    sizes = np.array([len(part) for part in parts])
    members = np.full((len(parts), int(sizes.max()) + extra), num_samples, dtype=np.int64)
    members[np.arange(members.shape[1]) < sizes[:, None]] = np.array([i for part in parts for i in part], dtype=np.int64)
    return members


def difference_rows(weights: IntArray, num_parts: int) -> IntArray:
    """Partition into equal sizes by balanced differencing, vectorised over parts.

    Samples in descending order form rows of ``num_parts``. The two rows of largest spread are joined, heaviest entry to lightest, until one
    row of sums is left. Near perfect for many samples per part, poor if few samples hold most of the weight.

    Args:
        weights: ``[N]``, int64.
        num_parts: Number of parts.

    Returns:
        ``[num_parts, ceil(N / num_parts)]``, int64, sample indices; the dummy index N where a part is one short.

    Source:
        Michiels, Korst, Aarts and van Leeuwen, "Performance Ratios for the Differencing Method Applied to the Balanced Number
        Partitioning Problem" (2003).

    Example:
        >>> difference_rows(np.array([4, 3, 2, 1]), 2)
        array([[0, 3],
               [1, 2]])
    """
    n, k = len(weights), num_parts
    m = -(-n // k)
    padded = np.append(weights, 0)
    order = np.concatenate([np.argsort(-weights, kind="stable"), np.full(m * k - n, n)]).reshape(m, k)
    heap = [(int(sums[-1] - sums[0]), i, sums, row[:, None]) for i, (row, sums) in enumerate(zip(order, padded[order]))]
    heapify(heap)
    serial = m
    while len(heap) > 1:
        _, _, first, first_members = heappop(heap)
        _, _, second, second_members = heappop(heap)
        sums = first + second[::-1]
        by_sum = np.argsort(-sums, kind="stable")
        sums = sums[by_sum]
        members = np.concatenate([first_members, second_members[::-1]], axis=1)[by_sum]
        heappush(heap, (int(sums[-1] - sums[0]), serial, sums, members))
        serial += 1
    return heap[0][3]


def longest_first(weights: IntArray, num_parts: int, equal_size: bool) -> list[list[int]]:
    """Give the heaviest remaining sample to the lightest part that is not full (LPT).

    Args:
        weights: ``[N]``, int64.
        num_parts: Number of parts.
        equal_size: A part is full at ceil(N / k) samples, or at floor(N / k) once N % k parts have one more.

    Returns:
        ``num_parts`` lists of sample indices.

    Source:
        Graham, "Bounds on multiprocessing timing anomalies" (1969).

    Example:
        >>> longest_first(np.array([9, 2, 1, 1]), 2, equal_size=True)
        [[0, 3], [1, 2]]
    """
    order = np.argsort(-weights, kind="stable").tolist()
    weight = weights.tolist()
    floor, num_larger = divmod(len(order), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, 0, p) for p in range(num_parts)]  # equal loads: the part with fewest samples
    for i in order:
        load, size, p = heap[0]
        parts[p].append(i)
        size += 1
        if equal_size and size > floor:
            num_larger -= 1
            heappop(heap)
            if num_larger == 0:  # everybody else is full at floor samples
                heap = [entry for entry in heap if entry[1] < floor]
                heapify(heap)
        elif equal_size and size == floor and num_larger == 0:
            heappop(heap)
        else:
            heapreplace(heap, (load + weight[i], size, p))
    return parts


def isolate_outliers(weights: IntArray, num_parts: int) -> list[list[int]]:
    """Complete samples that exceed the mean load with the lightest samples, one part each, as long as there are any.

    Such a part is as light as a part with that sample can be, and it is the heaviest of all parts, so that nothing is lost.

    Args:
        weights: ``[N]``, int64.
        num_parts: Number of parts of equal size (floor or ceil of N / num_parts).

    Returns:
        The finished parts, fewer than ``num_parts``; the others keep the remaining samples.

    Example:
        >>> isolate_outliers(np.array([50, 1, 1, 2, 5, 5]), 3)
        [[0, 2]]
    """
    order = np.argsort(-weights, kind="stable")
    total, low, high = int(weights.sum()), 0, len(order)
    done: list[list[int]] = []
    while num_parts > 1:
        size = (high - low) // num_parts
        part = [int(order[low]), *order[high - size + 1 : high].tolist()] if size else []
        load = int(weights[part].sum())
        if not part or load * num_parts < total:
            break
        done.append(part)
        low, high, total, num_parts = low + 1, high - size + 1, total - load, num_parts - 1
    return done
