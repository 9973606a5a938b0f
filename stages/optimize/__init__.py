"""optimize: make one variant of a model (fp16, awq, gptq or int8), verify its files, and publish it in the store.

``methods.py`` lists the methods. To add one, write a file with a ``Quantizer`` and add a line there.
"""
