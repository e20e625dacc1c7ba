"""From predicted losses and costs to a plan, with every promise measured: solve, apply, measure, bisect."""
