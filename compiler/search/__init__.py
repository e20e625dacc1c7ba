"""From predicted losses and costs to a plan. Every promise is measured: solve, apply, measure, bisect."""
