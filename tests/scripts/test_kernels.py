"""The kinds of kernels, by names that profilers recorded, and of the operators of a CPU step."""

from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.benchmarks.one_device import profile_step
from scripts.benchmarks.one_device import setting as one_device_setting
from scripts.benchmarks.one_device.kernels import KINDS, kind_of
from scripts.benchmarks.one_device.profile_step import UNKNOWN, profiled, table
from scripts.benchmarks.one_device.setting import make_setting, write_corpora
from scripts.benchmarks.shared.rounds import Measurement, Results

NVIDIA = {
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "matrix products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": (
        "matrix products"
    ),
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nt>(T)": (
        "matrix products"
    ),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(T)": "matrix products",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, float, 128, 16>(T)": "matrix products",
    "triton_tem_fused_mm_3": "matrix products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_traits>(T)": (
        "attention"
    ),
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits>(T)": "attention",
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::Params)": "attention",
    "triton_poi_fused__to_copy_cat_mul_silu_silu_backward_4": "pointwise and norms",
    "triton_per_fused__fused_rms_norm__to_copy_add_mul_2": "pointwise and norms",
    "triton_poi_fused__scaled_dot_product_flash_attention_backward_transpose_8": (
        "pointwise and norms"
    ),
    "triton_red_fused__log_softmax__to_copy_arange_eq_exp_gather_sub_0": "loss",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
    "FusedAdamMathFunctor<float, 4, ADAM_MODE>>(T)": "optimizer",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(T)": (
        "gradient accumulation"
    ),
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>(T)": (
        "casts and copies"
    ),
    "Memcpy DtoD (Device -> Device)": "casts and copies",
    "Memset (Device)": "casts and copies",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps>>": (
        "norm reduction"
    ),
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, func_wrapper_t>>": (
        "pointwise and norms"
    ),
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::(anonymous namespace)::compute_grad_weight<float, float, long>(T)": "others",
}
AMD = {
    "Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x256x64_MI16x16x1_CMS_SN": (
        "matrix products"
    ),
    "Custom_Cijk_Ailk_Bljk_BBS_BH_Bias_SAV_UserArgs_MT128x128x64.kd": "matrix products",
    "_ZN7ck_tile6kentryILi1ENS_17GroupedGemmKernelINS_2": "matrix products",
    "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm_xdl_cshuffle_v3>": "matrix products",
    "_ZN7ck_tile6kentryILi1ENS_19FmhaBwdDQDKDVKernelINS_2": "attention",
    "void ck_tile::kentry<2, ck_tile::FmhaFwdKernel<ck_tile::FmhaFwdTilePartitioner>>": "attention",
    "attn_fwd.kd": "attention",
    "bwd_kernel_dk_dv.kd": "attention",
    "bwd_kernel_dq.kd": "attention",
    "bwd_preprocess.kd": "attention",
    "triton_poi_fused__to_copy_mul_silu_split_0.kd": "pointwise and norms",
    "triton_red_fused__log_softmax_exp_nll_loss_1.kd": "loss",
    "__amd_rocclr_copyBuffer.kd": "casts and copies",
    "__amd_rocclr_fillBufferAligned.kd": "casts and copies",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "communication",
}


@pytest.mark.parametrize("names", [NVIDIA, AMD], ids=["NVIDIA", "AMD"])
def test_recorded_names_have_their_kinds(names: dict[str, str]) -> None:
    assert {name: kind_of(name) for name in names} == names
    assert kind_of("some_new_kernel") is None


def test_every_operator_of_a_cpu_step_has_a_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_device_setting, "CORPUS_TOKENS", 4096)
    monkeypatch.setattr(profile_step, "PROFILED", 1)
    setting = make_setting(tmp_path, "1M", "fp32", 1, 1, batch=1, sequence_length=16)
    write_corpora([setting])
    figures = profiled(asdict(setting), compiled=False)
    assert [name for name in figures if name.startswith(UNKNOWN)] == []
    assert {kind for kind in KINDS if not figures[kind]} == {"communication"}
    results = Results(tmp_path)
    results.turns = [Measurement("1M", "eager", 0, {"setting": asdict(setting)}, figures)]
    assert "x the floor; device busy" in table(results)
