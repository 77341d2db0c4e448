"""The language of index equations: the operator table states its rows in it, and users write layers in it.

``y[b,o] = sum[i] x[b,i]*w[i,o] + v[o]``.  `grammar` parses a text into a `tree`, `text` writes it back, `ranges` finds the range of
each index, `meaning` evaluates it in float64, and `gradient` derives it.  docs/equations.md describes the language.
"""
