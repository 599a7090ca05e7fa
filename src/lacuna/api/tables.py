"""Rows that become a pandas DataFrame where pandas is installed; nothing else needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lacuna.basics.errors import UserError

if TYPE_CHECKING:
    import pandas


class Rows(list[dict[str, Any]]):
    """A list of dicts with `frame()`."""

    def frame(self) -> pandas.DataFrame:
        """One line per dict; what a dict lacks is NaN."""
        return pandas_module().DataFrame(list(self))


def pandas_module() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("frame() needs pandas, which is not installed: `pip install pandas`. Everything else gives "
                        "plain lists and arrays.") from None
    return pandas
