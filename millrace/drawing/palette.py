"""The colors of drawings: told apart with any color vision, and in gray."""

LIGHT = {
    "surface": "#ffffff",
    "ink": "#1a1a19",
    "muted": "#5f5e5a",
    "grid": "#8f8e88",
    "idle": "#f0efeb",
    "hatch": "#c9c8c1",
    # Okabe and Ito's colors, which people with any kind of color vision tell apart.
    "forward": "#0072b2",
    "on_forward": "#ffffff",
    "backward": "#e69f00",
    "on_backward": "#1a1a19",
    "all_reduce": "#cc79a7",
    "on_all_reduce": "#1a1a19",
    "update": "#009e73",
    "on_update": "#1a1a19",
}
DARK = LIGHT | {
    "surface": "#1c1c1b",
    "ink": "#f2f1ec",
    "muted": "#aeada7",
    "grid": "#7b7a75",
    "idle": "#2a2a28",
    "hatch": "#4a4a46",
    "forward": "#56b4e9",
    "on_forward": "#10202b",
}
