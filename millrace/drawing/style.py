"""Colors and layout of the pages, light and dark; the charts have the same ones."""

NUM_COLORS = 8

_LIGHT = {
    "ink": "#1f2328",
    "muted": "#59636e",
    "grid": "#d8dee4",
    "surface": "#ffffff",
    "raised": "#f6f8fa",
    "good": "#1a7f37",
    "bad": "#c5221f",
    "warn": "#8a5a00",
    # Told apart also by those who see red and green alike (after Okabe and Ito).
    **dict(
        zip(
            (f"c{n}" for n in range(NUM_COLORS)),
            (
                *("#0b62c4", "#c2570c", "#00795c", "#9b4d8c"),
                *("#8a6d00", "#3a8fd0", "#5b5fc7", "#6e7781"),
            ),
            strict=True,
        )
    ),
}
_DARK = {
    "ink": "#e6edf3",
    "muted": "#9aa4af",
    "grid": "#373e47",
    "surface": "#0f1419",
    "raised": "#1a2027",
    "good": "#4ac26b",
    "bad": "#ff7b72",
    "warn": "#e3b341",
    **dict(
        zip(
            (f"c{n}" for n in range(NUM_COLORS)),
            (
                *("#5ea9ff", "#ff9f5a", "#3fc9a2", "#d898c8"),
                *("#e0c04c", "#8fd0f5", "#a6a9ff", "#a8b1bb"),
            ),
            strict=True,
        )
    ),
}


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


COLORS = (
    f":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}\n"
    "@media (prefers-color-scheme: dark) {"
    f" :root {{ {_variables(_DARK)} }} }}\n"
)
"""The palette as CSS variables."""

CHART = (
    """
svg.chart { display: block; width: 100%; height: auto; }
svg.chart text { font: 12px system-ui, sans-serif; fill: var(--muted); }
svg.chart .strong { fill: var(--ink); font-weight: 600; }
svg.chart .grid { stroke: var(--grid); stroke-width: 1; fill: none; }
svg.chart .line { fill: none; stroke-width: 1.75; stroke-linejoin: round; }
svg.chart .band { fill: var(--muted); opacity: .16; }
svg.chart .steady { stroke: var(--muted); stroke-dasharray: 4 3; }
svg.chart .hover { fill: transparent; }
"""
    + "\n".join(
        f"svg.chart .c{n} {{ stroke: var(--c{n}); }} svg.chart .f{n}, "
        f"svg.chart text.f{n} {{ fill: var(--c{n}); }} .k{n} {{ color: var(--c{n}); }}"
        for n in range(NUM_COLORS)
    )
    + "\n"
)
"""How the parts of a chart look."""

FIGURES = """
.figures { display: grid; gap: 1.4rem 1.6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 34rem; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
figcaption small { font-weight: normal; color: var(--muted); }
.gallery { display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); }
.gallery figcaption { font-weight: normal; font-size: .82rem; line-height: 1.35; }
img { display: block; max-width: 100%; height: auto; image-rendering: pixelated; }
.gallery img { width: 100%; } .scroll { overflow-x: auto; }
"""
"""How figures and groups of them are laid out."""

PAGE = """
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--surface);
  max-width: 68rem; margin: 0 auto; padding: 1rem 1rem 3rem; }
h1 { font-size: 1.35rem; line-height: 1.25; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; padding-top: .6rem;
  border-top: 1px solid var(--grid); }
p { margin: .4rem 0; max-width: 46rem; } .note { color: var(--muted); font-size: .88rem; }
code, pre { font: .86rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; background: var(--raised); padding: .6rem .8rem;
  border-radius: 6px; margin: .4rem 0; }
table { border-collapse: collapse; max-width: 100%; }
td, th { padding: .18rem 1rem .18rem 0; vertical-align: top; text-align: left;
  font-weight: normal; overflow-wrap: anywhere; }
th { color: var(--muted); min-width: 5rem; }
td { min-width: 4.6rem; font-variant-numeric: tabular-nums; }
thead th { border-bottom: 1px solid var(--grid); }
.best { font-weight: 700; } .side td, td.state { white-space: nowrap; }
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
"""
