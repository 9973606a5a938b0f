"""optimize: make one variant of a model (fp16, awq or gptq), verify its files, publish it.

``methods.py`` names the methods; a new one is a file with a ``Quantizer`` and a line there.
"""
