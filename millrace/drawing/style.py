"""The palette and the stylesheet of all pages and drawings, light and dark."""

from collections.abc import Mapping

# Of similar contrast, and distinct with any color vision (after Okabe and Ito).
_LIGHT_SERIES = (
    *("#0b62c4", "#c2570c", "#00795c", "#9b4d8c"),
    *("#8a6d00", "#3a8fd0", "#5b5fc7", "#6e7781"),
)
_DARK_SERIES = (
    *("#5ea9ff", "#ff9f5a", "#3fc9a2", "#d898c8"),
    *("#e0c04c", "#8fd0f5", "#a6a9ff", "#a8b1bb"),
)
NUM_SERIES_COLORS = len(_LIGHT_SERIES)

LIGHT = {
    "ink": "#1f2328",
    "muted": "#59636e",
    "grid": "#d8dee4",
    "surface": "#ffffff",
    "raised": "#f6f8fa",
    "good": "#1a7f37",
    "bad": "#c5221f",
    "warn": "#8a5a00",
    # Boxes of a timeline: forward and backward also differ in brightness.
    "forward": _LIGHT_SERIES[0],
    "on_forward": "#ffffff",
    "backward": "#e69f00",
    "on_backward": "#1f2328",
    "all_reduce": "#cc79a7",
    "on_all_reduce": "#1f2328",
    "update": "#009e73",
    "on_update": "#1f2328",
    "idle": "#f0f2f4",
    "hatch": "#c6cbd1",
    **{f"c{n}": color for n, color in enumerate(_LIGHT_SERIES)},
}
DARK = LIGHT | {
    "ink": "#e6edf3",
    "muted": "#9aa4af",
    "grid": "#373e47",
    "surface": "#0f1419",
    "raised": "#1a2027",
    "good": "#4ac26b",
    "bad": "#ff7b72",
    "warn": "#e3b341",
    "forward": _DARK_SERIES[0],
    "on_forward": "#1f2328",
    "idle": "#1a2027",
    "hatch": "#444c56",
    **{f"c{n}": color for n, color in enumerate(_DARK_SERIES)},
}
PAGE_COLORS = {name: f"var(--{name})" for name in LIGHT}
"""The palette inside a page, where a color follows the reader's choice of light or dark."""


def _declare(colors: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


COLORS = (
    f":root {{ color-scheme: light dark; {_declare(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_declare(DARK)} }} }}\n"
)
"""The palette as CSS variables."""

FIGURES = """
svg.chart { display: block; width: 100%; height: auto; }
.figures { display: grid; gap: 1.4rem 1.6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 34rem; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
figcaption small { font-weight: normal; color: var(--muted); }
.gallery { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); }
.gallery figure { display: flex; flex-direction: column-reverse;
  justify-content: flex-end; }
.gallery figcaption { font-weight: normal; font-size: .82rem; line-height: 1.35; }
img { display: block; max-width: 100%; height: auto; image-rendering: pixelated; }
.gallery img { width: 100%; } .scroll { overflow-x: auto; }
"""
"""Figures and groups of figures."""

PAGE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--surface);
  max-width: 68rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
body.wide { max-width: none; }
h1 { font-size: 1.35rem; line-height: 1.25; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; padding-top: .6rem;
  border-top: 1px solid var(--grid); }
p { margin: .4rem 0; max-width: 46rem; } .note { color: var(--muted); font-size: .88rem; }
code, pre, .code { font: .86rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; background: var(--raised); padding: .6rem .8rem;
  border-radius: 6px; margin: .4rem 0; }
table { border-collapse: collapse; max-width: 100%; }
td, th { padding: .18rem 1rem .18rem 0; vertical-align: top; text-align: left;
  font-weight: normal; overflow-wrap: anywhere; }
th { color: var(--muted); min-width: 5rem; }
td { min-width: 4.6rem; font-variant-numeric: tabular-nums; }
thead th { border-bottom: 1px solid var(--grid); }
tfoot td, tfoot th { border-top: 1px solid var(--grid); }
.best { font-weight: 700; } .runs td, .runs th, td.state { white-space: nowrap; }
.numbers td, .numbers th { text-align: right; }
.status { display: inline-block; padding: .1rem .6rem; border-radius: 1rem;
  border: 1px solid currentColor; font-weight: 600; }
.completed { color: var(--good); } .failed { color: var(--bad); }
.interrupted, .unfinished, .diverged { color: var(--warn); }
.error { border-left: 3px solid var(--bad); padding-left: .8rem; overflow-wrap: anywhere; }
.tiles { display: grid; gap: .6rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(48%, 9.5rem), 1fr)); }
.tile { background: var(--raised); border-radius: 6px; padding: .5rem .7rem; }
.tile b { display: block; font-size: 1.25rem; line-height: 1.3;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tile span { color: var(--muted); font-size: .85rem; }
details summary { cursor: pointer; }
@media print { h2, figure { break-inside: avoid; } }
""" + "".join(f".k{n} {{ color: var(--c{n}); }}\n" for n in range(NUM_SERIES_COLORS))
"""Everything else on a page."""
