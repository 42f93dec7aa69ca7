"""NumPy's arrays of numbers and texts, as the picklers meet them. Nothing here imports NumPy."""

from __future__ import annotations

import copyreg
import sys
from pickle import PickleBuffer
from typing import Any

_PLAIN_KINDS = frozenset("biufcmMSU")
_BUFFER_KINDS = frozenset("biufc")
"""Arrays of these are buffers, if their type is one of NumPy's own and native."""


def is_array_type(kind: type) -> bool:
    """Return whether this is `numpy.ndarray`, and no code of users pickles it."""
    return (
        kind.__module__ == "numpy"
        and getattr(sys.modules.get("numpy"), "ndarray", None) is kind
        and kind not in copyreg.dispatch_table
    )


def is_of_plain_items(array: Any) -> bool:
    """Return whether the items of an array are fully described by the string of their type."""
    dtype = array.dtype
    return dtype.kind in _PLAIN_KINDS and dtype.metadata is None


def reduce_array(array: Any) -> Any:
    """Reduce an array so that little of its pickling is done in Python. Other arrays are left to
    NumPy. `numpy.ndarray(.., buffer=..)` would be faster still, but does not hold the buffer.
    """
    dtype = array.dtype
    is_buffer = dtype.kind in _BUFFER_KINDS and dtype.isbuiltin == 1 and dtype.isnative
    if is_buffer and dtype.metadata is None and array.nbytes and array.flags.c_contiguous:
        content = PickleBuffer(array), dtype.str
        if array.ndim == 1:
            return sys.modules["numpy"].frombuffer, content
        return _shaped, (*content, array.shape)
    return array.__reduce_ex__(5)


def _shaped(content: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy

    return numpy.frombuffer(content, dtype).reshape(shape)
