"""Split attention heads over the ranks of a sequence-parallel group, evenly or not."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each rank attends with, after the sequence was gathered.

    Rank r owns a contiguous range of query heads, and receives the key/value heads that these use. Ranges differ by at most one
    head, so a number of heads that P does not divide costs ``ceil(Hq / P) * P / Hq`` in balance and nothing in exactness. A key/value
    head that several ranks need is sent to each of them; its gradient is the sum over them.

    Attributes:
        num_heads: Hq.
        num_kv_heads: Hk.
        query_bounds: P + 1 boundaries: rank r owns query heads ``query_bounds[r]`` to ``query_bounds[r + 1]``.
    """

    num_heads: int
    num_kv_heads: int
    query_bounds: tuple[int, ...]

    @classmethod
    def build(cls, num_heads: int, num_kv_heads: int, sp_size: int) -> "HeadPlan":
        """Split the heads.

        Args:
            num_heads: Number of query heads.
            num_kv_heads: Number of key/value heads, a divisor of it.
            sp_size: Number of ranks.

        Returns:
            The plan; the first ``num_heads % sp_size`` ranks own one head more.

        Raises:
            ValueError: Fewer query heads than ranks, or a number of query heads that is no multiple of the key/value heads.
        """
        if sp_size < 1:
            raise ValueError(f"sequence_parallel_size must be at least 1 but is {sp_size}.")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"The {num_heads} query heads must be a multiple of the {num_kv_heads} key/value heads.")
        if num_heads < sp_size:
            raise ValueError(
                f"sequence_parallel_size={sp_size} needs at least {sp_size} attention heads but the model has {num_heads} "
                f"(and {num_kv_heads} key/value heads, any number of which is fine). Lower sequence_parallel_size to {num_heads} or less."
            )
        base, extra = divmod(num_heads, sp_size)
        bounds = [rank * base + min(rank, extra) for rank in range(sp_size + 1)]
        return cls(num_heads, num_kv_heads, tuple(bounds))

    @property
    def sp_size(self) -> int:
        """P."""
        return len(self.query_bounds) - 1

    def query_heads(self, sp_rank: int) -> range:
        """Return the query heads of a rank."""
        return range(self.query_bounds[sp_rank], self.query_bounds[sp_rank + 1])

    def kv_heads(self, sp_rank: int) -> range:
        """Return the key/value heads that a rank's query heads use."""
        group, heads = self.num_heads // self.num_kv_heads, self.query_heads(sp_rank)
        return range(heads[0] // group, heads[-1] // group + 1)

    def kv_repeats(self, sp_rank: int) -> list[int] | None:
        """Say how many of the rank's query heads use each of its key/value heads.

        Returns:
            One count per local key/value head, or None where all counts are equal, which attention kernels handle by themselves.
        """
        group, heads = self.num_heads // self.num_kv_heads, self.query_heads(sp_rank)
        counts = [0] * len(self.kv_heads(sp_rank))
        for head in heads:
            counts[head // group - heads[0] // group] += 1
        return None if len(set(counts)) == 1 else counts
