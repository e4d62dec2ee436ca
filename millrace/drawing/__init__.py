"""One drawing kit for charts, timelines and pages: SVG, PNG and HTML. Never imports JAX."""
