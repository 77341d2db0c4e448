"""The language of index equations: what the table says its rows compute, and what users write layers in.

``y[b,o] = sum[i] x[b,i]*w[i,o] + v[o]``.  `grammar` reads a text, `tree` is what it becomes, `text` writes it, `ranges` finds how
far each index runs, `meaning` computes it in float64, `gradient` derives it.  docs/equations.md has the language.
"""
