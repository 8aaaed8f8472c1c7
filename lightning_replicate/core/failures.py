"""What a rank can tell about the failure of another one.

A rank notices that another one failed when its connection breaks, which says nothing about why; and it notices that
after the other's traceback was shown, so that the error at the end of the output is not the cause. So a rank that fails
leaves one line in the default process group's store before it goes, and the errors of the others quote it. None of this
may replace an error or hold it up: the store may be gone with the rank that held it, and answers in a second or never.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import torch.distributed as dist

from lightning_replicate import _private
from lightning_replicate.core.api import ReplicateError

_PATIENCE = 2.0  # seconds; a store that is there answers in less than a millisecond
_LONGEST = 300  # characters of a message that are quoted
_KEY = "lightning_replicate/first_failure"

_runs = 0  # process groups may outlive what failed in them


def forget_failures() -> None:
    """Begins anew: failures of earlier runs are not quoted any more. On all ranks alike."""
    global _runs
    _runs += 1


def note_failure(exception: BaseException) -> None:
    """Leaves a line about this rank's exception for the other ranks.

    Does nothing if another rank has failed before, or if the exception comes from that.
    """
    if is_from_another_rank(exception):
        return
    text = " ".join(f"{type(exception).__name__}: {exception}".split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    _ask_store(lambda store: store.compare_set(_key(), "", f"rank {dist.get_rank()} failed: {text}"))


def first_failure() -> str | None:
    """What the first rank that failed has left, if it could."""
    return _ask_store(lambda store: store.get(_key()).decode() if store.check([_key()]) else None)


def consequence(what: str, error: BaseException) -> ReplicateError:
    """What to raise where a collective failed.

    Args:
        what: What could not be done.
        error: The backend's error. It is told in short; raise ``from None`` if it is one of another rank's failure.
    """
    if not is_from_another_rank(error):
        return ReplicateError(f"{what}: {in_short(error)}")
    cause = first_failure() or (
        "another rank has failed, or did not come to the end of its backward in time. Look for that rank's own error,"
        " which may stand further up"
    )
    result = ReplicateError(f"{what}, because {cause.rstrip('.')}. ({in_short(error)})")
    result.from_another_rank = True
    return result


def is_from_another_rank(error: BaseException | None) -> bool:
    """Whether an error is the backend's about a connection or a time-out, or one of ours that came of such an error."""
    if error is None:
        return False
    connection = isinstance(error, dist.DistError) or "/gloo/" in str(error)
    return connection or getattr(error, "from_another_rank", False)


def in_short(error: BaseException) -> str:
    """A backend's error without the place in its source code and without its advice."""
    text = str(error).strip()
    text = text.splitlines()[0] if text else type(error).__name__
    text = re.sub(r"^\[[^\]\s]*/gloo/[^\]\s]*\]\s*", "", text)
    return re.split(r"\.?\s+This is typically caused by", text)[0].rstrip(".")


def _key() -> str:
    return f"{_KEY}/{_runs}"


def _ask_store(question: Callable[[dist.Store], str | bytes | None]) -> str | None:
    """Asks the default process group's store from a thread of its own, since a dead host's store is waited for."""
    if not dist.is_initialized():
        return None
    found: list[str | bytes | None] = []

    def ask() -> None:
        try:
            found.append(question(_private.default_store()))
        except (ImportError, KeyError, RuntimeError, ValueError):  # it is gone, so there is nothing to tell
            found.append(None)

    thread = threading.Thread(target=ask, daemon=True, name="lightning_replicate failure")
    thread.start()
    thread.join(_PATIENCE)
    answer = found[0] if found else None
    return answer.decode() if isinstance(answer, bytes) else answer
