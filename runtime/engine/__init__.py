"""An opened bundle that decodes one sequence, many sequences, or beams."""
