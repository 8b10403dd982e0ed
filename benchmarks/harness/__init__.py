"""How everything is measured: works in turn, ratios, rows of pages, made checkpoints."""
