"""The table of renamings: prime-rl's trainer. Fine-tuning has the same keys without `trainer.`."""

from __future__ import annotations

from primerl.config.foreign import rules
from primerl.config.foreign.rows import Row, note, refused, row

_MODEL = "trainer.model"
_LAYERS = "models are transformers' own, and attention is chosen, and proved, when one is loaded"
_MIXTURE = "experts are divided among ranks as the rest of the model is"
_OFFLOAD = "weights, gradients and optimizer are on the trainer's devices; more of these divide them (trainer.ranks)"
_OWN = "the optimizer's file has its settings: trainer.optim.args"

TRAINER: list[Row] = [
    note("memory and speed", f"{_MODEL}.conversion_dir", "nothing is converted", None),
    row(f"{_MODEL}.seq_len", "seq_len", rules.micro_batch),
    note("memory and speed", f"{_MODEL}.{{attn,impl}}", _LAYERS, "auto"),
    row(f"{_MODEL}.compile{{}}", "trainer.compile", rules.present),
    note("memory and speed", f"{_MODEL}.compile.fullgraph", "layers are compiled each", False),
    row(
        f"{_MODEL}.ac{{}}",
        "trainer.activation_checkpointing",
        lambda value, _: "full" if rules.present(value, _) else "none",
    ),
    row(f"{_MODEL}.ac.mode", "trainer.activation_checkpointing"),
    note("memory and speed", f"{_MODEL}.ac.freq", "every layer is computed again", 1),
    note("memory and speed", f"{_MODEL}.ac.targets", "selective: all of a layer but its matrix products"),
    note("memory and speed", f"{_MODEL}.ac_offloading{{,.pin_memory,.max_inflight_activations}}", _OFFLOAD),
    note("memory and speed", f"{_MODEL}.{{fsdp_cpu_offload,optim_cpu_offload}}", _OFFLOAD, False),
    note("memory and speed", f"{_MODEL}.full_offload{{,.cpu_optimizer_backend,.numa_bind}}", _OFFLOAD, False),
    note("memory and speed", f"{_MODEL}.reshard_after_forward", "FSDP frees what it has gathered", True),
    row(f"{_MODEL}.dp_replicate", "trainer.dp_replicate"),
    note(
        "memory and speed", f"{_MODEL}.{{ep,ep_comm_backend,deepep_num_sms,deepep_token_chunk_size}}", _MIXTURE, "auto"
    ),
    note("memory and speed", f"{_MODEL}.{{moe_use_grouped_mm,moe_fused_kernel}}", _MIXTURE, True),
    note(
        "memory and speed",
        f"{_MODEL}.{{cp,cp_style}}",
        "a sequence is on one rank: context parallelism divides rows evenly, which packed rows are not; raise "
        "trainer.ranks, or set trainer.activation_checkpointing",
        1,
    ),
    note(
        "numbers", f"{_MODEL}.optimization_dtype", "weights are updated in float32; trainer.dtype is of the computation"
    ),
    note("numbers", f"{_MODEL}.reduce_dtype", "gradients are summed in float32"),
    note("numbers", f"{_MODEL}.moe_router_dtype", "routers compute as their model says", "float32"),
    note("numbers", "trainer.matmul_precision", "torch's own, for float32", "high", "highest"),
    note(
        "numbers",
        f"{_MODEL}.quantization.{{type,enable_grouped_gemm,ignore_patterns,recipe,enable_a2a}}",
        "it is trained in trainer.dtype, which is no coarser",
    ),
    refused("the model", f"{_MODEL}.index_cache.{{topk_freq,topk_pattern}}", "attention attends as the model says"),
    refused("the model", f"{_MODEL}.freeze_moe_router", "all weights are trained, or an adapter alone", False),
    row(f"{_MODEL}.lora{{}}", "trainer.model.lora", rules.table),
    row(f"{_MODEL}.lora.{{rank,alpha,dropout,target_modules}}", "trainer.model.lora."),
    refused("the model", f"{_MODEL}.lora.modules_to_save", "the base model is not trained with an adapter", []),
    refused(
        "the model",
        f"{_MODEL}.debug.{{num_layers,random_init,force_balanced_routing}}",
        "the model is as its folder has it; `primerl sft` makes a small one from scratch ([model.tiny])",
        None,
        False,
    ),
    note(
        "memory and speed",
        f"{_MODEL}.fused_lm_head_token_chunk_size",
        "log-probabilities are always computed in chunks",
    ),
    refused(
        "the batches",
        "trainer.data.fake{,.batch_size,.generate_samples}",
        "a trainer learns from rollouts; benches/ of the repository measure it alone",
    ),
    # Loss
    row("trainer.loss.type", "trainer.loss.type", rules.loss),
    row(
        "trainer.loss.{dppo_mask_low,dppo_mask_high,ipo_threshold,kl_tau,adv_tau}",
        "trainer.loss.args",
        rules.loss_setting,
    ),
    refused(
        "the loss",
        "trainer.loss.{import_path,kwargs.**}",
        "its function gets one sequence and returns a number; one for trainer.loss.custom gets the tokens of a step "
        "and returns a value for each: docs/custom-losses.md",
        None,
        {},
    ),
    # Optimizer
    row("trainer.optim.type", "trainer.optim.type", rules.optimizer),
    row("trainer.optim.lr", "trainer.optim.lr", rules.learning_rate, default=1e-6),
    row("trainer.optim.weight_decay", "trainer.optim.weight_decay", default=0.01),
    row("trainer.optim.max_norm", "trainer.optim.max_norm", rules.max_norm),
    row("trainer.optim.betas1", "trainer.optim.betas", rules.betas),
    row("trainer.optim.betas2", "trainer.optim.betas", rules.betas, default=0.999),
    note("the optimizer", "trainer.optim.{nesterov,momentum,mu}", _OWN),
    row("trainer.scheduler.type", "trainer.optim.schedule", rules.schedule),
    row(
        "trainer.scheduler.warmup_steps",
        "trainer.optim.warmup_steps",
        rules.warmup,
        default=10,
        where="trainer.scheduler",
    ),
    row(
        "trainer.scheduler.decay_steps",
        "trainer.optim.decay_steps",
        rules.warmup,
        default=10,
        where="trainer.scheduler",
    ),
    row(
        "trainer.scheduler.min_lr",
        "trainer.optim.final_lr_ratio",
        rules.ratio_of_peak,
        default=0.0,
        where="trainer.scheduler",
    ),
    # The process
    row("trainer.enable_router_replay", "trainer.enable_router_replay"),
    row("trainer.dist_timeout_seconds", "trainer.dist_timeout_s"),
    note("logs", "trainer.enable_token_export", "the journal has every token: the page, `primerl trace`", False),
    note("logs", "trainer.{memory_profiler_path,trace_path}", "`primerl trace` shows where time went", None),
    note("memory and speed", "trainer.gc{,.interval}", "Python's own collection"),
    note("the run", "trainer.max_concurrent_runs", "a trainer has one run", 1, versions="0.8"),
]
