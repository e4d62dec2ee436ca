"""Whether an SVG from a file is a drawing and nothing else."""

from xml.etree import ElementTree

_SVG = "{http://www.w3.org/2000/svg}"
_TAGS = {
    *("svg", "defs", "pattern", "g", "rect", "path", "line", "circle"),
    *("text", "tspan", "title"),
}
_ATTRIBUTES = {
    *("viewBox", "width", "height", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "d"),
    *("role", "aria-label", "id", "class", "patternUnits", "transform"),
    *("fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray"),
    *("font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline"),
}


def check_svg(text: str) -> None:
    """Refuse an SVG that could do more than be looked at: links, scripts, other files."""
    if "<!" in text or "<?" in text:
        raise ValueError("A drawing has no declarations.")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"A drawing must be an SVG: {error}.") from error
    if root.tag.removeprefix(_SVG) != "svg":
        raise ValueError("A drawing must be an SVG.")
    for element in root.iter():
        if element.tag.removeprefix(_SVG) not in _TAGS:
            raise ValueError(f"A drawing cannot have the element {element.tag}.")
        for name, value in element.attrib.items():
            if name not in _ATTRIBUTES or "url(" in value.replace("url(#", ""):
                raise ValueError(f"A drawing cannot have the attribute {name}={value}.")
