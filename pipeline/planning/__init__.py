"""``slipway plan``: the document for programs, and the page for people."""
