"""The look of all pictures: a colour for each run and each level, numbers read at a glance."""

from collections.abc import Sequence
from typing import Any

from megafrontier.common.errors import UserError

# Okabe and Ito's palette, told apart with any colour vision; its yellow is too pale for lines.
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
RUN_DASHES = ("-", "--", "-.", ":")
# Dark is slow: five steps of one scale (viridis), so that the order shows without colour too.
LEVEL_COLOURS = ("#A8DB34", "#4AC16D", "#1F988B", "#365C8D", "#46085C")

# For the names of runs in letters that the first font lacks, where these are installed.
_FALLBACK_FONTS = ("Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Sans", "Noto Sans Arabic")

_RC = {
    "text.parse_math": False,  # a run's name may have any character
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#E5E5E5",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "savefig.dpi": 150,
}


def run_look(index: int) -> dict[str, Any]:
    """Colour and dashes of the run at `index`, in every picture; no two of 28 runs alike."""
    dashes = RUN_DASHES[index // len(RUN_COLOURS) % len(RUN_DASHES)]
    return {"color": RUN_COLOURS[index % len(RUN_COLOURS)], "linestyle": dashes}


def level_colours(levels: Sequence[str]) -> dict[str, str]:
    """Colours of levels, fastest first, spread over the scale."""
    last = max(len(levels) - 1, 1)
    return {level: _on_scale(i * (len(LEVEL_COLOURS) - 1) / last) for i, level in enumerate(levels)}


def _on_scale(place: float) -> str:
    """The colour at `place` of LEVEL_COLOURS, between two of them where it is no integer."""
    below, part = int(place), place % 1
    pairs = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in LEVEL_COLOURS]
    ends = zip(pairs[below], pairs[min(below + 1, len(pairs) - 1)], strict=True)
    return "#" + "".join(f"{round(low + part * (high - low)):02X}" for low, high in ends)


def short(number: float, unit: str = "") -> str:
    """Three digits with a decimal prefix: `1.23 GB`, `45.6k`, `12 ms`, `0 B`."""
    scale, prefix = 1.0, ""
    for candidate, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        # 999.5 would round to four digits, so it belongs to the next prefix.
        if abs(number) >= 0.9995 * candidate:
            scale, prefix = candidate, name
            break
    else:
        if unit == "s" and number != 0:
            scale, prefix = (1e-3, "m") if abs(number) >= 0.9995e-3 else (1e-6, "µ")
    gap = " " if unit else ""
    return f"{number / scale:.3g}{gap}{prefix}{unit}"


def pyplot() -> Any:
    """matplotlib.pyplot, drawing without a screen in the style of the report.

    Raises UserError when matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "report: needs the package matplotlib: pip install megafrontier[report]"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import font_manager

    plt.rcParams.update(_RC)
    known = set(font_manager.get_font_names())
    plt.rcParams["font.family"] += [font for font in _FALLBACK_FONTS if font in known]
    return plt
