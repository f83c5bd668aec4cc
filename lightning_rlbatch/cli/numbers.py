"""Numbers as text: the same value looks the same in every table, page and sentence."""


def number(value: float, decimals: int | None = None) -> str:
    """Return a number with separators between thousands.

    Args:
        value: Any.
        decimals: Digits after the point, for a column; None shows whole numbers whole and others with three significant digits.

    Example:
        >>> number(1234567), number(3.83333), number(3.0), number(1234.56), number(0.00012), number(1, 2)
        ('1,234,567', '3.83', '3', '1,235', '0.00012', '1.00')
    """
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share in percent.

    Args:
        share: 1 is the whole.

    Example:
        >>> percent(0.98765), percent(1)
        ('98.8%', '100.0%')
    """
    return f"{100 * share:.1f}%"


def short(value: float) -> str:
    """Return a number in few letters, for axes and tiles.

    Args:
        value: Any.

    Example:
        >>> short(1234567), short(0.00012), short(3.0), short(0)
        ('1.2M', '1.2e-04', '3', '0')
    """
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if scaled >= 100 else f"{scaled:.2g}{unit}"
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4g}"


def binary_size(size: int) -> str:
    """Return a size with a binary unit.

    Args:
        size: Bytes.

    Example:
        >>> binary_size(3 * 2**29), binary_size(20)
        ('1.50 GiB', '20 B')
    """
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.2f} {units[0]}" if units[0] != "B" else f"{size} B"
