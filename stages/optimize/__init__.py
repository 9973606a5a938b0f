"""optimize: make one variant of a model, verify its files, and publish it in the store.

The formats are those of ``stages.parts.base.formats``.
"""
