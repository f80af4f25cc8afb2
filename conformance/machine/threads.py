"""Running with another number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def run_with_threads(count: int, run: Callable[[], Any]) -> Any:
    """Run something with ``count`` threads, in a new thread.

    OpenMP keeps a pool for each thread that starts one, and a process forked later would wait for its workers for ever:
    this pool ends with the thread.
    """
    before, outcomes = torch.get_num_threads(), list[Any]()

    def work() -> None:
        torch.set_num_threads(count)
        try:
            outcomes.append((run(), None))
        except Exception as error:
            outcomes.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    ((outcome, error),) = outcomes
    if error is not None:
        raise error
    return outcome
