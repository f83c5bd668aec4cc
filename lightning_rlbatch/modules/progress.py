"""Show the progress of rollouts beside Lightning's own progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from tqdm.auto import tqdm


@contextmanager
def rollout_progress(trainer: "pl.Trainer", total: int, description: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while rollouts are sampled, in the style of the Trainer's progress bar; none if that is off.

    Args:
        trainer: The Trainer; rank 0 alone shows anything.
        total: Rollouts to come, on this rank.
        description: What the bar is called.

    Yields:
        A function that takes the numbers of rollouts and of tokens that came since its last call.
    """
    callback = trainer.progress_bar_callback
    if callback is None or not getattr(callback, "is_enabled", True) or not trainer.is_global_zero:
        yield lambda num_finished, num_tokens: None
    elif isinstance(callback, RichProgressBar) and callback.progress is not None:
        progress = callback.progress  # two live displays in one terminal would overwrite each other
        task = progress.add_task(description, total=total)
        try:
            yield lambda num_finished, num_tokens: progress.update(task, advance=num_finished)
        finally:
            progress.remove_task(task)
    else:
        with tqdm(total=total, desc=description, unit="rollout", leave=False, mininterval=0.5) as bar:

            def update(num_finished: int, num_tokens: int) -> None:
                bar.update(num_finished)

            yield update
