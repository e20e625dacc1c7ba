"""Charts as SVG text: scales, axes, lines, marks with intervals."""
