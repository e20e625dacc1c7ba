"""An opened bundle that decodes: one sequence, many, or beams."""
