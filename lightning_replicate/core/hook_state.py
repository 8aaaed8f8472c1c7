"""The state of a communication hook as plain data, so that a checkpoint can hold it and load without running code.

A state with ``state_dict()`` and ``load_state_dict()`` is asked. Of any other the attributes are taken that are
tensors, numbers, text, generators of random numbers, or collections of those: all that torch's own states hold, but for
their process groups, which belong to the run.
"""

from __future__ import annotations

from typing import Any

import torch

_GENERATOR, _ARRAY = "generator of random numbers", "array"


def encode(state: Any) -> dict[str, Any]:
    """What there is to save of a hook's state.

    Args:
        state: The first argument of the hook.

    Returns:
        Tensors (on the CPU), numbers and text in dictionaries and lists.
    """
    found = state.state_dict() if hasattr(state, "state_dict") else _attributes(state)
    plain = {}
    for name, value in found.items():
        try:
            plain[name] = _plain(value)
        except TypeError:  # a process group, a function
            continue
    return plain


def restore(state: Any, saved: dict[str, Any], device: torch.device) -> None:
    """Puts back what :func:`encode` gave. What was left out stays as the new run made it.

    Args:
        state: The first argument of the hook; changed in place.
        saved: What :func:`encode` gave.
        device: Where tensors belong.
    """
    values = {name: _revive(value, device) for name, value in saved.items()}
    if hasattr(state, "load_state_dict"):
        state.load_state_dict(values)
        return
    for name, value in values.items():
        if isinstance(value, tuple) and len(value) == 2 and value[0] == _GENERATOR:
            getattr(state, name).set_state(value[1])
        else:
            setattr(state, name, value)


def _attributes(state: Any) -> dict[str, Any]:
    slots = [name for cls in type(state).__mro__ for name in getattr(cls, "__slots__", ())]
    return {name: getattr(state, name) for name in [*slots, *getattr(state, "__dict__", ())] if hasattr(state, name)}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if hasattr(value, "get_state") and hasattr(value, "set_state"):
        return (_GENERATOR, _plain(value.get_state()))
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # within the state of numpy's generators
        return (_ARRAY, value.tolist())
    raise TypeError(type(value))


def _revive(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _revive(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and len(value) == 2 and value[0] == _GENERATOR:
        return (_GENERATOR, _revive(value[1], torch.device("cpu")))
    if isinstance(value, tuple) and len(value) == 2 and value[0] == _ARRAY:
        return value[1]
    if isinstance(value, (list, tuple)):
        return type(value)(_revive(item, device) for item in value)
    return value
