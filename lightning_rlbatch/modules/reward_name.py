"""Names that a reward function may not have: the metric ``reward/<name>`` would be that of something else."""

import re

_RESERVED = re.compile(r"mean|std|reward_model|zero_variance_all_(right|wrong)|resampled_groups|best_of_\d+|majority_of_\d+")


def reserved_name_problem(name: str) -> str | None:
    """Return why a reward function may not have a name; None if it may.

    Args:
        name: Of the function.

    Example:
        >>> reserved_name_problem("exact_match") is None, reserved_name_problem("mean")[:40]
        (True, "A reward function is named 'mean', but r")
    """
    if not _RESERVED.fullmatch(name):
        return None
    return (
        f"A reward function is named {name!r}, but reward/{name} is a metric of all rewards: one of the two would be lost. Rename the"
        " function, or wrap it in one of another name."
    )
