"""The table of renamings: prime-rl's whole run, its checkpoints, monitors and machines, and its inference."""

from __future__ import annotations

from primerl.config.foreign import rules, run_rules
from primerl.config.foreign.rows import Row, note, refused, row

RUN: list[Row] = [
    row("max_steps", "max_steps", default=1_000_000, why="prime-rl runs until it is stopped"),
    row("{trainer,orchestrator}.max_steps", "max_steps"),
    row("seq_len", "seq_len", rules.whole_length),
    row("output_dir", "output_dir", run_rules.run_folder),
    row("run.{name,dir}", "output_dir", run_rules.run_folder),
    row("name", "output_dir", lambda value, _: f"outputs/{value}"),
    note("the run", "{trainer,orchestrator,inference}.output_dir", "processes write into the run's own folder"),
    row("clean", "clean_output_dir", versions="0.9"),
    row("clean_output_dir", "clean_output_dir", versions="0.8"),
    row("dry_run", "dry_run"),
    note("the run", "inference.dry_run", "--dry-run checks the whole run", False),
    note("the run", "bench", "`primerl simulate` plans, and benches/ of the repository measure", False, versions="0.8"),
    note("the run", "experimental.**", "it has no settings that are tried out", versions="0.8"),
    note(
        "variables",
        "{trainer.,orchestrator.,inference.,}env_vars.**",
        "processes get the variables of the shell that starts primerl; set it there. Of env workers alone: env_files",
    ),
    note("hosting", "{image_tag,gpu_type,volume,volume_size,source_ref,type}", "a run is on machines of your own"),
    row("{env_file,env_files}", "env_files", lambda value, _: value if isinstance(value, list) else [value]),
    note("hosting", "k8s.**", "processes are started here, by Slurm or by yourself, as containers too"),
    # The model
    row("model.name", "model.path", default="Qwen/Qwen3-0.6B"),
    row("{trainer,orchestrator}.model.name", "model.path", run_rules.same_model),
    row("inference.vllm.model", "model.path", run_rules.same_model),
    row("inference.model.name", "model.path", run_rules.same_model, versions="0.8"),
    row("{trainer.,orchestrator.,}model.trust_remote_code", "model.trust_remote_code"),
    row("inference.{vllm,model}.trust_remote_code", "model.trust_remote_code"),
    refused("the model", "{trainer.,orchestrator.,}model.vlm.**", "models of text alone are trained"),
    refused(
        "the model",
        "{trainer.,orchestrator.,}tokenizer.name",
        "the tokenizer is that of the model's folder",
        None,
    ),
    note("the model", "{trainer.,orchestrator.,}tokenizer.trust_remote_code", "it is model.trust_remote_code", None),
    refused(
        "the model",
        "{trainer.,orchestrator.,}tokenizer.chat_template",
        "the chat template is that of the model's folder; write it to chat_template.jinja there",
        None,
    ),
    # Checkpoints
    row("ckpt{}", "ckpt", rules.table),
    row("ckpt.interval", "ckpt.interval"),
    row("ckpt.keep_last", "ckpt.keep_last", default=1_000_000, where="ckpt", why="prime-rl keeps all"),
    row("ckpt.keep_interval", "ckpt.keep_interval"),
    note(
        "checkpoints",
        "{trainer.,}ckpt.output_dir",
        "checkpoints are within output_dir; a link may lead elsewhere",
        None,
    ),
    row("ckpt.resume_step", "ckpt.resume_step", versions="0.8"),
    row("resume{}", "ckpt.resume_step", run_rules.resume_step, versions="0.9"),
    row("resume.step", "ckpt.resume_step", versions="0.9"),
    row("{trainer,orchestrator}.resume{}", "ckpt.resume_step", run_rules.resume_step, versions="0.9"),
    row("{trainer,orchestrator}.resume.step", "ckpt.resume_step", versions="0.9"),
    refused(
        "checkpoints",
        "{trainer.,orchestrator.,}resume.dir",
        "a checkpoint of prime-rl cannot be read, its model folder can: model.path; a run of primerl resumes in its "
        "own output_dir",
        None,
    ),
    row("trainer.ckpt{}", "ckpt", rules.table),
    row("trainer.ckpt.interval", "ckpt.interval"),
    row("trainer.ckpt.keep_last", "ckpt.keep_last"),
    row("trainer.ckpt.keep_interval", "ckpt.keep_interval"),
    row("{trainer.,}ckpt.weights_only", "ckpt.weights_only", versions="0.8"),
    row(
        "{trainer.,}ckpt.weights.save_adapter_separately",
        "ckpt.weights.save_adapter_separately",
        versions="0.8",
    ),
    note(
        "checkpoints",
        "{trainer.,}ckpt.weights{,.**}",
        "model folders are safetensors, in parts of trainer.weights.max_shard_bytes",
        versions="0.8",
    ),
    note(
        "checkpoints",
        "{trainer.,}ckpt.skip_gather_master_weights",
        "ckpt.weights.only_last saves the last folder only",
        False,
        versions="0.8",
    ),
    row("{trainer.,}ckpt.{skip_optimizer,skip_scheduler,skip_dataloader,skip_progress}", "ckpt", run_rules.skipped),
    note(
        "checkpoints",
        "orchestrator.ckpt.{interval,keep_last,keep_interval}",
        "the orchestrator's state is in the run's checkpoints",
    ),
    row("orchestrator.ckpt.skip_progress", "ckpt", run_rules.skipped),
    row("orchestrator.ckpt.wait_for_weights_timeout", "timeouts.start_s", rules.unset(None)),
    # Monitors and logs
    row("log.level", "log.level", rules.unset(None)),
    row("trainer.log.level", "trainer.log.level", lambda value, _: {"warn": "warning"}.get(value, value)),
    row("orchestrator.log.{level,vf_level}", "orchestrator.log.level"),
    row("inference.log.level", "inference.log.level"),
    note("logs", "{trainer,inference}.log.vf_level", "env workers log what verifiers says: orchestrator.log.vf_level"),
    note(
        "logs",
        "{trainer.,orchestrator.,inference.,}log.json_logging",
        "the log is lines of text; metrics are JSON lines",
        False,
    ),
    note("logs", "{trainer,orchestrator,inference}.log.log_data", "the page and `primerl trace` show samples", False),
    note("logs", "{trainer,orchestrator,inference}.log.interval", "lines come when something happens", 10.0),
    note("logs", "{trainer.,}log.ranks_filter", "the trainer's log is that of its leading rank", [0]),
    row("monitors.wandb{}", "wandb", rules.table),
    row("monitors.wandb.project", "wandb.project", default="prime-rl", where="monitors.wandb"),
    row("monitors.wandb.{name,entity,group,tags,offline}", "wandb.", rules.unset(None)),
    row("wandb{}", "wandb", rules.table, versions="0.8"),
    row("wandb.project", "wandb.project", default="prime-rl", where="wandb", versions="0.8"),
    row("wandb.{name,entity,group,tags,offline}", "wandb.", rules.unset(None), versions="0.8"),
    note("monitors", "wandb.shared", "one process writes all of the run", versions="0.8"),
    row(
        "orchestrator.wandb.log_extras.{samples,distributions,interval,sample_ratio}",
        "orchestrator.wandb.log_extras.",
        versions="0.8",
    ),
    note("monitors", "{trainer,orchestrator}.monitors.wandb.**", "W&B is set for the run as a whole: [wandb]"),
    note(
        "monitors",
        "{trainer.,orchestrator.,}monitors.file{,.**}",
        "metrics.jsonl of the run's folder is always written",
    ),
    row("{orchestrator.,}monitors.prime{}", "orchestrator.prime_monitor", rules.table, versions="0.9"),
    row(
        "{orchestrator.,}monitors.prime.name", "orchestrator.prime_monitor.run_name", rules.unset(None), versions="0.9"
    ),
    row("orchestrator.prime_monitor{}", "orchestrator.prime_monitor", rules.table, versions="0.8"),
    row("orchestrator.prime_monitor.{run_name,team_id,base_url}", "orchestrator.prime_monitor.", versions="0.8"),
    note(
        "monitors", "orchestrator.prime_monitor.{api_key_var,frontend_url}", "the key is PRIME_API_KEY", versions="0.8"
    ),
    note("monitors", "{trainer,orchestrator}.heartbeat.**", "what watches a run asks its /metrics"),
    row("trainer.metrics_server.port", "trainer.metrics_port"),
    note("monitors", "trainer.metrics_server.host", "/metrics is served to the trainer's own machine", "0.0.0.0"),
    # Weights and batches on their way
    row(
        "{trainer.,orchestrator.,inference.,}weight_broadcast.type",
        "trainer.weights.transport",
        rules.among({"filesystem": "files", "nccl": "collective"}, "nixl has no counterpart: use files or collective"),
    ),
    row("{trainer.,orchestrator.,}weight_broadcast.timeout", "orchestrator.timeouts.engine_update_s"),
    note("weights", "{trainer.,orchestrator.,}weight_broadcast.{host,port,session_id}", "processes find each other"),
    note(
        "weights", "{trainer.,orchestrator.,}weight_broadcast.inference_world_size", "engines say how many they are", 1
    ),
    note(
        "weights",
        "{trainer.,orchestrator.,}weight_broadcast.quantize_in_weight_transfer",
        "weights are sent in trainer.weights.dtype, and an engine with `quantization` makes its own copy",
        False,
    ),
    note(
        "weights",
        "{trainer.,orchestrator.,}weight_broadcast.save_sharded",
        "weights are in parts of trainer.weights.max_shard_bytes",
        versions="0.8",
    ),
    note(
        "batches",
        "{trainer.,orchestrator.,}rollout_transport.{type,host,port,hwm}",
        "batches go over HTTP, and are on disk until a checkpoint covers them",
    ),
]

MACHINES: list[Row] = [
    note("machines", "deployment.type", "it follows from the number of nodes"),
    row("deployment.gpus_per_node", "deployment.gpus_per_node", default=8, where="slurm"),
    row("deployment.num_train_gpus", "trainer.ranks"),
    row("deployment.num_infer_gpus", "inference.replicas", run_rules.infer_gpus, default=1),
    row("deployment.num_train_nodes", "deployment.num_train_nodes", run_rules.train_nodes),
    row("deployment.num_infer_nodes", "deployment.num_infer_nodes", run_rules.infer_nodes),
    note("machines", "deployment.num_infer_replicas", "counted in deployment.num_infer_nodes and inference.replicas"),
    row(
        "deployment.nodes_per_fsdp_group",
        "trainer.dp_replicate",
        lambda value, context: context.get("deployment.num_train_nodes", 1) // value,
    ),
    note(
        "machines",
        "deployment.orchestrator_on_inference",
        "the orchestrator is on the first node of the trainer",
        False,
    ),
    row("slurm{}", "slurm", rules.table),
    row("slurm.job_name", "slurm.job_name", default="prime-rl", where="slurm"),
    row("slurm.partition", "slurm.partition", default="cluster", where="slurm"),
    row("slurm.{nodelist,exclude,account,time,pre_run_command,project_dir}", "slurm.", rules.unset(None)),
    refused("machines", "slurm.template_path", "templates have fields of their own here: docs/slurm.md", None),
    note("machines", "slurm.cleanup_grace_period", "the run saves and stops slurm.signal_s before the limit"),
    note("machines", "slurm.shared_fs", "nodes share the folder of the run", True),
    note("machines", "inference.slurm.**", "engines are in the run's own job"),
    note("environments", "{orchestrator.,}env_server_base_port", "env workers listen on no port"),
]

_VLLM = "inference.vllm"
_EITHER = "inference.{vllm,vllm_extra}"
_ONE = "an engine is one API server, and those side by side are inference.replicas"
_ADAPTER = "it follows from trainer.model.lora"
_PARTS = "prefill and decoding apart have no counterpart; servers of your own are orchestrator.engines"
_ENGINE = "one engine is as another, and the orchestrator chooses among them"

INFERENCE: list[Row] = [
    row("inference{}", "inference.replicas", rules.said),
    row("inference.server.{host,port}", "inference.", rules.unset(None)),
    note("engines", "inference.server.liveness_timeout_seconds", "/health is asked every second"),
    note("engines", "inference.{backend_port,router.**}", _ENGINE),
    row(f"{_VLLM}.dtype", "inference.dtype", rules.unset("auto")),
    row("inference.model.dtype", "inference.dtype", rules.unset("auto"), versions="0.8"),
    row("inference.{vllm,model}.max_model_len", "inference.max_model_len", rules.unset(None)),
    row("inference.model.enforce_eager", "inference.vllm.enforce-eager", versions="0.8"),
    row(f"{_VLLM}.max_num_seqs", "inference.max_num_seqs"),
    refused(
        "the model", "inference.{vllm,model}.chat_template", "the chat template is that of the model's folder", None
    ),
    note(
        "engines",
        "inference.{vllm,model}.{tool_call_parser,reasoning_parser}",
        "the orchestrator reads answers, by the model's chat template; orchestrator.parsers chooses another way",
        "auto",
        None,
    ),
    row("inference.{vllm,model}.rope_scaling", "inference.vllm.rope-scaling", rules.unset(None)),
    row(f"{_VLLM}.tensor_parallel_size", "inference.vllm.tensor-parallel-size"),
    row("inference.parallel.tp", "inference.vllm.tensor-parallel-size", versions="0.8"),
    note(
        "engines",
        f"{_EITHER}.{{data_parallel_size,data_parallel_size_local,data_parallel_rpc_port,api_server_count,headless}}",
        _ONE,
    ),
    note(
        "engines",
        "inference.{parallel.dp,api_server_count,data_parallel_size_local,data_parallel_rpc_port}",
        _ONE,
        versions="0.8",
    ),
    row("inference.{vllm.,}seed", "seed"),
    note(
        "engines", "inference.{vllm.,}{enable_lora,max_loras,max_cpu_loras,max_lora_rank,lora_target_modules}", _ADAPTER
    ),
    note("engines", "inference.{vllm.,}enable_return_routed_experts", "it follows from trainer.enable_router_replay"),
    row("inference.gpu_memory_utilization", "inference.vllm.gpu-memory-utilization", versions="0.8"),
    row(
        "inference.{enable_prefix_caching,enable_expert_parallel,all2all_backend,enable_eplb,enable_dbo}",
        "inference.vllm.",
        rules.unset(None),
        versions="0.8",
    ),
    row("inference.vllm_extra.*", "inference.vllm.*", versions="0.8"),
    row(f"{_VLLM}.*", "inference.vllm.*", rules.unset(None)),
    note("engines", "inference.use_deep_gemm", "the variable VLLM_USE_DEEP_GEMM=1 is handed on to vLLM", False),
    note(
        "engines",
        "inference.enable_fp32_lm_head",
        "each engine has to agree with the trainer when it has loaded weights (orchestrator.probe_tolerance)",
        True,
    ),
    note(
        "engines",
        "inference.enable_fp32_router_logits",
        "each engine has to agree with the trainer when it has loaded weights (orchestrator.probe_tolerance)",
        True,
    ),
    note("engines", "inference.kv_cache_offload.**", "options of vLLM for it go into [inference.vllm]"),
    note("engines", "inference.use_pd_kv_transfer", _PARTS, False),
    refused("engines", "inference.deployment.type", _PARTS, "single_node", "multi_node"),
    note("engines", "inference.deployment.{gpus_per_node,num_nodes}", "it is [deployment] of the run"),
    note(
        "engines",
        "inference.deployment.{prefill_nodes_per_replica,decode_nodes_per_replica,num_prefill_replicas,"
        "num_decode_replicas,prefill_port,decode_port}",
        _PARTS,
    ),
    note(
        "engines",
        "inference.deployment.{prefill_env_vars,decode_env_vars,prefill_vllm_overrides,decode_vllm_overrides}.**",
        _PARTS,
    ),
]
