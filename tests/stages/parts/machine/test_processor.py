from __future__ import annotations

from pathlib import Path

import pytest

from stages.parts.machine.hardware import LIMIT, Processor, cpu_dtype, processor

ZEN_3 = "flags\t\t: fpu sse4_1 sse4_2 fma f16c avx bmi1 avx2 bmi2 sha_ni xsavec umip pku vaes vpclmulqdq rdpid fsrm"
ZEN_4 = (
    f"{ZEN_3} avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl avx512_bf16 avx512vbmi avx512_vbmi2 gfni "
    "avx512_vnni avx512_bitalg avx512_vpopcntdq"
)
ICE_LAKE = "flags\t\t: fpu sse4_1 fma avx f16c bmi1 avx2 bmi2 avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni"
SAPPHIRE_RAPIDS = f"{ICE_LAKE} avx_vnni avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8"
SANDY_BRIDGE = "flags\t\t: fpu sse4_1 sse4_2 aes xsave avx"
NEOVERSE_V1 = "Features\t: fp asimd aes sha2 crc32 atomics fphp asimdhp sve svebf16 i8mm bf16\nCPU architecture: 8"

AVX2 = Processor(avx2=True, avx512=False, bf16=False, amx=False)
AVX512 = Processor(avx2=True, avx512=True, bf16=False, amx=False)
BF16 = Processor(avx2=True, avx512=True, bf16=True, amx=False)
AMX = Processor(avx2=True, avx512=True, bf16=True, amx=True)
NONE = Processor(avx2=False, avx512=False, bf16=False, amx=False)


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT, raising=False)


def cpuinfo(folder: Path, described: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text("".join(f"processor\t: {core}\nmodel name\t: a cpu\n{described}\n\n" for core in range(2)))
    return path


@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize(
    ("described", "found", "name", "dtype"),
    [
        (ZEN_3, AVX2, "AVX2", "float32"),
        (ZEN_4, BF16, "AVX-512 with bf16", "bfloat16"),
        (ICE_LAKE, AVX512, "AVX-512", "float32"),
        (SAPPHIRE_RAPIDS, AMX, "AMX", "bfloat16"),
        (SANDY_BRIDGE, NONE, "no AVX2", "float32"),
    ],
)
def test_the_flags_say_what_an_x86_processor_can_do(tmp_path, described, found, name, dtype):
    assert processor(cpuinfo(tmp_path, described)) == found
    assert found.name == name
    assert cpu_dtype(found) == dtype


@pytest.mark.usefixtures("no_limit")
def test_nothing_is_known_of_other_processors_and_they_calculate_in_bfloat16(tmp_path):
    assert processor(cpuinfo(tmp_path, NEOVERSE_V1)) is None
    assert processor(tmp_path / "missing") is None
    assert cpu_dtype(None) == "bfloat16"


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("AVX", NONE),
        ("AVX2", AVX2),
        ("avx2_vnni", AVX2),
        ("AVX512_CORE", AVX512),
        ("AVX512_CORE_VNNI", AVX512),
        ("AVX512_CORE_BF16", BF16),
        ("AVX10_1_512", BF16),
        ("AVX512_CORE_AMX", AMX),
        ("DEFAULT", AMX),
        ("", AMX),
        ("not an instruction set", AMX),
    ],
)
def test_the_variable_of_onednn_limits_what_the_processor_can_do(tmp_path, monkeypatch, limit, found):
    monkeypatch.setenv(LIMIT, limit)
    assert processor(cpuinfo(tmp_path, SAPPHIRE_RAPIDS)) == found


def test_the_variable_adds_nothing_that_the_processor_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv(LIMIT, "AVX512_CORE_AMX")
    assert processor(cpuinfo(tmp_path, ZEN_3)) == AVX2


@pytest.mark.skipif(processor() is None, reason="PyTorch tells these of x86 processors alone")
def test_this_processor_is_seen_as_vllm_sees_it_when_it_picks_its_library():
    import torch

    found = processor()
    assert found.avx512 == torch.cpu._is_avx512_supported()
    assert found.bf16 == torch.cpu._is_avx512_bf16_supported()
