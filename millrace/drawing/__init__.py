"""Charts, timelines and pages: SVG, PNG and HTML. Never imports JAX."""
