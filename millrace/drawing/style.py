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
    "weights": "#f0d9a8",
    "on_weights": "#1f2328",
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
    f":root {{ color-scheme: light dark; --num-colors: {NUM_SERIES_COLORS}; "
    f"{_declare(LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_declare(DARK)} }} }}\n"
)
"""The palette as CSS variables."""

FIGURES = """
svg.chart { display: block; width: 100%; height: auto; }
.figures { display: grid; gap: 1.4rem 1.6rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 34rem; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
figcaption small { font-weight: normal; color: var(--muted); }
.gallery { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); }
.gallery figure { display: flex; flex-direction: column-reverse;
  justify-content: flex-end; }
.gallery figcaption { font-weight: normal; font-size: .82rem; line-height: 1.35; }
img { display: block; max-width: 100%; height: auto; image-rendering: pixelated; }
.gallery img { width: 100%; } .grid img { image-rendering: auto; border-radius: 4px; }
.earlier { display: grid; gap: .8rem; margin-top: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); }
.earlier figcaption { font-weight: normal; font-size: .82rem; color: var(--muted); }
.scroll { overflow-x: auto; }
"""
"""Figures and groups of figures."""

PAGE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--surface);
  max-width: 72rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
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
th { color: var(--muted); min-width: 7.6rem; }
td { min-width: 4.6rem; font-variant-numeric: tabular-nums; }
thead th { border-bottom: 1px solid var(--grid); min-width: 4.6rem; }
tfoot td, tfoot th { border-top: 1px solid var(--grid); }
th[class^=k] { min-width: max-content; white-space: nowrap; }
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
.tile span { color: var(--muted); font-size: .85rem; line-height: 1.3; display: block; }
.tile small { color: var(--muted); font-size: .78rem; }
.tile.first { box-shadow: inset 3px 0 var(--good); }
details summary { cursor: pointer; }
@media (max-width: 36rem) { /* A command has a line of its own on a phone. */
  tr:has(> td.code) { display: flex; flex-wrap: wrap; padding-bottom: .4rem; }
  tr:has(> td.code) > td.code { flex-basis: 100%; } }
@media print { h2, figure { break-inside: avoid; } }
""" + "".join(f".k{n} {{ color: var(--c{n}); }}\n" for n in range(NUM_SERIES_COLORS))
"""Everything else on a page."""

INTERACTIVE = """
figure[hidden], [hidden] { display: none; }
figure.interactive { position: relative; }
figure.interactive.wide { grid-column: 1 / -1; max-width: none; }
.interactive figcaption { display: flex; flex-wrap: wrap; align-items: baseline;
  gap: 0 .5rem; }
.interactive figcaption .tools { margin-left: auto; white-space: nowrap; }
.plot { position: relative; touch-action: pan-y; cursor: crosshair;
  border-radius: 4px; min-height: 210px; }
.plot:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
.plot svg { display: block; width: 100%; font: 12px system-ui, sans-serif;
  overflow: visible; }
.plot text { fill: var(--muted); } .plot .grid { stroke: var(--grid); }
.plot .curve { fill: none; stroke-width: 1.9; stroke-linejoin: round;
  stroke-linecap: round; }
.plot .raw { fill: none; stroke-width: 1.2; stroke-linejoin: round; opacity: .28; }
.plot .band { fill: var(--muted); fill-opacity: .16; }
.plot .level { stroke: var(--muted); stroke-dasharray: 4 3; }
.plot .zoom { fill: var(--c0); fill-opacity: .14; stroke: var(--c0); stroke-width: 1; }
.cursor { pointer-events: none; } .cursor line { stroke: var(--muted); }
.cursor circle { stroke: var(--surface); stroke-width: 1.5; }
.tip { position: absolute; top: .6rem; z-index: 2; visibility: hidden;
  pointer-events: none; width: max-content; max-width: min(20rem, 92%);
  padding: .35rem .55rem; font-size: .8rem; line-height: 1.45; background: var(--surface);
  border: 1px solid var(--grid); border-radius: 6px;
  box-shadow: 0 4px 14px rgb(0 0 0 / .16); }
.tip.shown { visibility: visible; }
.tip p { margin: 0; color: var(--muted); white-space: nowrap; }
.tip div { display: flex; gap: .4rem; align-items: center; }
.tip span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.tip b, .tip small { font-variant-numeric: tabular-nums; white-space: nowrap; }
.tip b { margin-left: auto; padding-left: .6rem; } .tip small { color: var(--muted); }
.tip i, .legend i { flex: none; width: .6rem; height: .6rem; border-radius: 50%; }
.legend { display: flex; flex-wrap: wrap; gap: .15rem .3rem; min-width: 0; }
.legend:empty { display: none; }
.toolbar button, .legend button, .tool { font: inherit; font-size: .82rem;
  color: var(--ink); background: none; border: 1px solid transparent; border-radius: 6px;
  padding: .12rem .5rem; cursor: pointer; }
.legend button { display: inline-flex; gap: .35rem; align-items: center; max-width: 100%;
  overflow-wrap: anywhere; text-align: left; padding: .08rem .4rem; }
.legend button[aria-pressed=false] { color: var(--muted); text-decoration: line-through; }
.legend button[aria-pressed=false] i { opacity: .25; }
.toolbar button:hover, .legend button:hover, .tool:hover { background: var(--raised);
  border-color: var(--grid); }
.tool { color: var(--muted); font-weight: normal; padding: 0 .4rem; }
.tool[aria-pressed=true] { color: var(--ink); border-color: var(--muted); }
.tool:disabled { opacity: .35; cursor: default; }
.toolbar { position: sticky; top: 0; z-index: 3; display: flex; flex-wrap: wrap;
  gap: .3rem 1rem; align-items: center; padding: .45rem 0; margin-bottom: .7rem;
  background: var(--surface); border-bottom: 1px solid var(--grid); font-size: .85rem; }
.toolbar label { display: flex; gap: .4rem; align-items: center; }
.toolbar input[type=range] { width: 7.5rem; accent-color: var(--c0); }
.toolbar output { width: 2.2rem; font-variant-numeric: tabular-nums; }
.toolbar .hint { color: var(--muted); }
.toolbar .legend { flex-basis: 100%; max-height: 6rem; overflow-y: auto; }
.toolbar > button { border-color: var(--grid); }
.segments { display: inline-flex; border: 1px solid var(--grid); border-radius: 7px;
  overflow: hidden; }
.toolbar .segments button { border: 0; border-radius: 0; }
.toolbar .segments button[aria-pressed=true] { background: var(--c0);
  color: var(--surface); }
.filters { display: flex; flex-wrap: wrap; gap: .4rem .8rem; align-items: center;
  margin: .6rem 0; }
.filters input { font: inherit; font-size: .9rem; flex: 1 1 16rem; max-width: 26rem;
  padding: .3rem .6rem; color: var(--ink); background: var(--raised);
  border: 1px solid var(--grid); border-radius: 7px; }
.filters .note { margin: 0; }
header.live { display: flex; flex-wrap: wrap; gap: 0 .8rem; align-items: baseline; }
header.live code { color: var(--muted); }
table.live { width: 100%; font-size: .9rem; }
table.live th, table.live td { white-space: nowrap; min-width: 0; padding: .3rem .9rem
  .3rem 0; border-bottom: 1px solid var(--grid); }
table.live thead button { font: inherit; color: inherit; background: none; border: 0;
  padding: 0; cursor: pointer; }
table.live thead button:hover { color: var(--ink); }
table.live [aria-sort=ascending] button, table.live [aria-sort=descending] button {
  color: var(--ink); font-weight: 600; }
table.live .arrow { display: inline-block; width: 1em; font-size: .7em; }
table.live tbody tr:hover { background: var(--raised); }
table.live label { display: inline-flex; gap: .35rem; align-items: center; }
table.live small { display: block; color: var(--muted); font-weight: normal; }
table.live td.in-best { font-weight: 600; }
table.live .name a { color: var(--ink); font-weight: 600; text-decoration: none; }
table.live .name a:hover { text-decoration: underline; }
table.live .name { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
table.live input { accent-color: var(--c0); margin: 0; }
.dot { width: .6rem; height: .6rem; border-radius: 50%; }
.running { color: var(--good); }
.running::before { content: ""; display: inline-block; width: .5rem; height: .5rem;
  margin-right: .35rem; border-radius: 50%; background: currentColor;
  animation: pulse 1.6s ease-in-out infinite; }
@keyframes pulse { 50% { opacity: .25; } }
@media (prefers-reduced-motion: reduce) { .running::before { animation: none; } }
@media (hover: none), (max-width: 34rem) { .toolbar .hint { display: none; } }
@media print { .toolbar, .tools { display: none; } }
"""
"""Charts that ``charts.js`` has made interactive."""
