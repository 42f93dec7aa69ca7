"""Tell an error that a signal handler of the program has raised from one of the interrupted code.

CPython calls handlers in the main thread between any two instructions. So an alarm may raise in the
`__reduce__` of an argument, or in the input of a `map`. Such an error is not that of the argument
or the input, and goes to the caller at once.
"""

from __future__ import annotations

from threading import get_ident, main_thread


def is_of_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler has raised `error`, in code that the calling function has
    called and that has ended.

    A handler is called with the frame that it has interrupted, which is the frame below its own.
    """
    if get_ident() != main_thread().ident:
        return False
    traceback = error.__traceback__
    # Not the caller's own frame: a frame that still runs would keep its `f_locals`, and so `error`.
    while traceback is not None and (traceback := traceback.tb_next) is not None:
        frame = traceback.tb_frame
        if frame.f_back is not None:
            for value in list(frame.f_locals.values()):
                # The latter: a handler with the parameter `*args`.
                if value is frame.f_back or (
                    type(value) is tuple and any(each is frame.f_back for each in value)
                ):
                    return True
    return False
