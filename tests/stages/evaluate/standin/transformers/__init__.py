"""In Transformers' place: the stand-in for lm-eval, for which it would be imported, reads no tokens."""

AutoTokenizer = None
