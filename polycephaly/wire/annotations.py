"""Annotations of functions and classes that are pickled by value.

From 3.14 on, an annotation is evaluated when it is read first. A name in it may exist for type
checkers only (`if TYPE_CHECKING:`): then a `ForwardRef` of that name is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ForwardRef


def has_lazy_annotations(definition: Any) -> bool:
    """Return whether this very function or class has annotations that are evaluated when read."""
    if isinstance(definition, type):
        return "__annotate_func__" in vars(definition)
    return getattr(definition, "__annotate__", None) is not None


def annotations_of(definition: Any) -> dict[str, Any]:
    """Return lazy annotations, as far as their names exist."""
    import annotationlib  # type: ignore[import-not-found]

    found: dict[str, Any] = annotationlib.get_annotations(
        definition, format=annotationlib.Format.FORWARDREF
    )
    return found


def evaluated(value: Any, attribute: str) -> Any:
    """Return `__attribute__` of a type variable or alias, which 3.12 and later evaluate when it is
    read. Returns None if there is no such attribute.
    """
    try:
        return getattr(value, f"__{attribute}__", None)
    except Exception:
        evaluate: Callable[..., Any] | None = getattr(value, f"evaluate_{attribute}", None)
        if evaluate is None or sys.version_info < (3, 14):
            raise
        import annotationlib

        return annotationlib.call_evaluate_function(evaluate, annotationlib.Format.FORWARDREF)


def reduce_forward_reference(reference: ForwardRef) -> tuple[Any, ...]:
    """Without the namespaces in which 3.14 and later look for the name."""
    return _make_forward_reference, (
        reference.__forward_arg__,
        reference.__forward_is_argument__,
        reference.__forward_module__,
        reference.__forward_is_class__,
    )


def _make_forward_reference(
    name: str, is_argument: bool, module: str | None, is_class: bool
) -> ForwardRef:
    return ForwardRef(name, is_argument=is_argument, module=module, is_class=is_class)
