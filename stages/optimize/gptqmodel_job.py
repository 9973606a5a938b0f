"""Quantizes with GPTQModel: python -m stages.optimize.gptqmodel_job JOB.json"""

from __future__ import annotations

from typing import Any, Final

from stages.optimize.job import SAVED, Examples, QuantizationJob, main

BITS: Final = 4
BATCH: Final = 4
"""Sequences that run through a layer together. More sequences need more memory and are hardly faster."""


def quantize(job: QuantizationJob, examples: Examples) -> None:
    import torch
    from gptqmodel import BACKEND, GPTQModel

    dtype = getattr(torch, job.dtype)
    model = GPTQModel.load(str(job.source), quantize_config(job), dtype=dtype, trust_remote_code=False)
    # AWQ_TORCH only packs, on every device. AUTO selects a kernel that needs nvcc and refuses a CPU.
    backend = BACKEND.AWQ_TORCH if job.method == "awq" else BACKEND.AUTO
    model.quantize(examples, batch_size=BATCH, backend=backend)
    model.save(str(job.folder / SAVED))


def quantize_config(job: QuantizationJob) -> Any:
    """GPTQ: Frantar et al., https://arxiv.org/abs/2210.17323. AWQ: Lin et al., https://arxiv.org/abs/2306.00978."""
    from gptqmodel import QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    method = {"awq": (METHOD.AWQ, FORMAT.GEMM), "gptq": (METHOD.GPTQ, FORMAT.GPTQ)}[job.method]
    return QuantizeConfig(
        bits=BITS,
        group_size=job.group_size,
        sym=job.symmetric,
        desc_act=False,
        method=method[0],
        format=method[1],
        offload_to_disk_path=str(job.folder / "offload"),
    )


if __name__ == "__main__":
    main(quantize)
