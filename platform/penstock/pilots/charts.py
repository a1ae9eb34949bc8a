"""The charts of the pilot's report, as SVG: the same figures give the same bytes.

Letters are drawn as outlines, so that the file needs no font where it is shown.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from django.utils.translation import gettext as _
from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font
from matplotlib.ticker import FuncFormatter, MaxNLocator

from penstock.pilots.returns import Returns
from penstock.pilots.sensitivity import SensitivityRow
from penstock.pilots.wording import percent, significant

FONT = "Noto Sans CJK TC"
BASELINE = "#d55e00"
TRIAL = "#0072b2"
INK = "#182126"
SOFT = "#51606a"
LINE = "#dbe1e4"


@cache
def font_folder() -> Path:
    """Where the font for Chinese and Latin text lies, as its wheel installs it."""
    spec = find_spec("cvttf_NotoSansCJK_Regular")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("cvttf-NotoSansCJK-Regular, which carries the font of reports, is not installed")
    return Path(spec.origin).parent


@cache
def shown_codepoints() -> frozenset[int]:
    """What the font has a glyph for."""
    return frozenset(get_font(str(next(font_folder().glob("*.otf")))).get_charmap())


@cache
def _font_is_known() -> bool:
    for path in sorted(font_folder().glob("*.otf")):
        font_manager.fontManager.addfont(str(path))
    return True


def time_chart(figures: Returns) -> str:
    """Seconds of either way for the same items."""
    assert figures.baseline is not None and figures.trial is not None
    values = [float(figures.baseline.seconds), float(figures.trial.seconds)]
    with _drawing(3.35, 1.25) as (figure, axes):
        bars = axes.barh(_ways(), values, color=[BASELINE, TRIAL], height=0.55)
        axes.bar_label(bars, labels=[f"{significant(value)} s" for value in values], padding=4, color=INK, fontsize=8)
        axes.set_xlim(0, max(values) * 1.28)
        axes.set_xlabel(_("seconds for the same %(n)d items") % {"n": figures.baseline.items})
        _plain(axes, grid="x")
        axes.invert_yaxis()
        return _svg(figure)


def quality_chart(figures: Returns) -> str:
    """Valid rates of either way, with their intervals."""
    assert figures.baseline is not None and figures.trial is not None
    with _drawing(3.35, 1.25) as (figure, axes):
        for row, (way, colour) in enumerate([(figures.baseline, BASELINE), (figures.trial, TRIAL)]):
            if way.valid_rate is None or way.valid_rate_low is None or way.valid_rate_high is None:
                continue
            axes.plot([way.valid_rate_low, way.valid_rate_high], [row, row], color=colour, linewidth=3, alpha=0.45)
            axes.plot([way.valid_rate], [row], "o", color=colour, markersize=7)
            axes.annotate(
                percent(way.valid_rate),
                (way.valid_rate, row),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes.set_yticks([0, 1], _ways())
        axes.set_ylim(1.5, -0.6)
        axes.set_xlim(-0.06, 1.06)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _position: f"{share * 100:.0f} %"))
        axes.set_xlabel(_("valid outputs, with the interval of 95 percent"))
        _plain(axes, grid="x")
        return _svg(figure)


def tornado_chart(rows: Sequence[SensitivityRow], base: Decimal, currency: str) -> str:
    """The net present value over twelve months at either end of each assumption, the widest on top."""
    with _drawing(7.0, 0.62 + 0.36 * len(rows)) as (figure, axes):
        centre = float(base)
        lows = [float(row.npv_at_low) for row in rows]
        highs = [float(row.npv_at_high) for row in rows]
        places = range(len(rows))
        axes.barh(places, [low - centre for low in lows], left=centre, color=BASELINE, height=0.55)
        axes.barh(places, [high - centre for high in highs], left=centre, color=TRIAL, height=0.55)
        axes.axvline(centre, color=INK, linewidth=0.8)
        span = max(abs(value - centre) for value in (*lows, *highs)) or 1.0
        for place, row in enumerate(rows):
            for value, end in ((float(row.npv_at_low), row.low), (float(row.npv_at_high), row.high)):
                if value == centre:
                    continue  # it cannot move that way
                left = value < centre
                axes.annotate(
                    significant(end),
                    (value, place),
                    (-3 if left else 3, 0),
                    textcoords="offset points",
                    ha="right" if left else "left",
                    va="center",
                    fontsize=7,
                    color=SOFT,
                )
        axes.set_yticks(list(places), [row.label for row in rows])
        axes.set_xlim(centre - span * 1.25, centre + span * 1.25)
        axes.invert_yaxis()
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.0f}"))
        axes.set_xlabel(_("net present value over 12 months, %(currency)s") % {"currency": currency})
        _plain(axes, grid="x")
        return _svg(figure)


def _ways() -> list[str]:
    return [_("Baseline"), _("Trial")]


def _plain(axes: Axes, *, grid: str) -> None:
    axes.set_axisbelow(True)
    axes.grid(axis="x" if grid == "x" else "y", color=LINE, linewidth=0.6)
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.xaxis.label.set_color(SOFT)
    axes.xaxis.label.set_fontsize(8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)


@contextmanager
def _drawing(width_inches: float, height_inches: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of its own, outside pyplot's global state: reports are made in threads."""
    _font_is_known()
    with rc_context(
        {
            "font.family": FONT,
            "axes.unicode_minus": False,
            "svg.fonttype": "path",
            "svg.hashsalt": "penstock",
            "figure.constrained_layout.use": True,
        }
    ):
        figure = Figure(figsize=(width_inches, height_inches))
        FigureCanvasSVG(figure)
        yield figure, figure.add_subplot()


def _svg(figure: Figure) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return stream.getvalue().decode()
