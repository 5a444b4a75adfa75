"""The table of renamings: prime-rl's orchestrator, its environments and algorithms."""

from __future__ import annotations

from primerl.config.foreign import rules, run_rules
from primerl.config.foreign.rows import Row, expanded, moved, note, refused, row

_ENGINES = "engines ask for no key, and have to serve the run's model"
_TRAIN, _EVAL = "orchestrator.train", "orchestrator.eval"
_IN_FLIGHT = "orchestrator.oversampling_factor"
TIME = "orchestrator.timeouts.rollout_s"

ORCHESTRATOR: list[Row] = [
    row(rules.NO_KEY, TIME, default=3600, why="prime-rl has no limit"),
    row("orchestrator.batch_size", "orchestrator.batch_size"),
    row("orchestrator.token_batch_size", "orchestrator.token_batch_size", rules.unset(None)),
    row("orchestrator.group_size", "orchestrator.group_size", default=1),
    row("orchestrator.rollouts_per_example", "orchestrator.group_size", versions="0.8"),
    row(
        "orchestrator.oversampling_factor",
        "orchestrator.oversampling_factor",
        lambda value, _: max(1.0, value),
        versions="0.8",
    ),
    row("orchestrator.max_inflight_rollouts", "orchestrator.oversampling_factor", run_rules.in_flight, versions="0.8"),
    row(
        "orchestrator.concurrency.max_inflight", "orchestrator.oversampling_factor", run_rules.in_flight, versions="0.9"
    ),
    row(
        "orchestrator.concurrency.initial_inflight",
        "orchestrator.admission.start_per_engine",
        run_rules.first_in_flight,
        versions="0.9",
    ),
    note(
        "the batches",
        "orchestrator.concurrency.min_inflight",
        "orchestrator.admission.min_per_engine is of one engine",
        1,
        versions="0.9",
    ),
    row("orchestrator.max_off_policy_steps", "orchestrator.max_off_policy_steps", rules.stale),
    row("orchestrator.max_async_level", "orchestrator.max_async_level", versions="0.8"),
    row("orchestrator.{trajectory_strategy,trajectoryStrategy}", "orchestrator.trajectory_strategy", versions="0.8"),
    row("orchestrator.buffer.*", "orchestrator.buffer.*", versions="0.8"),
    row("orchestrator.seq_len", "seq_len"),
    note(
        "the batches",
        "orchestrator.{num_train_workers,pad_to_multiple_of}",
        "rows are packed whole, for the trainer's ranks",
        1,
    ),
    refused(
        "the batches", "orchestrator.tasks_per_minute", "max_concurrent of an environment bounds rollouts at once", None
    ),
    note("monitors", "orchestrator.collect_inference_metrics", "each engine serves /metrics", True),
    note("monitors", "orchestrator.inference_metrics_roles", "each engine serves /metrics", None),
    note(
        "environments",
        "orchestrator.env_install_prerelease",
        "python.requirements of an environment says what to install",
        False,
        versions="0.8",
    ),
    # What is rendered and parsed
    note("rendering", "orchestrator.renderer.name", "the model's own chat template is rendered", "auto", "default"),
    note(
        "rendering",
        "orchestrator.renderer.{reasoning_parser,tool_parser}",
        "answers are read by the model's chat template; orchestrator.parsers chooses another way",
        None,
    ),
    note(
        "rendering",
        "orchestrator.renderer.thinking_retention",
        "turns that extend each other are one sample, and what "
        "the template drops begins another (orchestrator.trajectory_strategy)",
    ),
    row(
        "orchestrator.renderer.enable_thinking",
        "orchestrator.sampling.chat_template_kwargs.enable_thinking",
        rules.unset(True, None),
    ),
    note(
        "rendering",
        "orchestrator.renderer.*",
        "orchestrator.sampling.chat_template_kwargs has the template's variables",
    ),
    # The model that samples
    row("orchestrator.model.lora{}", "trainer.model.lora", rules.table),
    row("orchestrator.model.lora.{rank,alpha}", "trainer.model.lora.", rules.unset(None)),
    note("the model", "orchestrator.model.lora.name", "an adapter is named by its run", None),
    row(
        "orchestrator.{model.,}client.base_url",
        "orchestrator.engines",
        run_rules.engines,
        default="http://localhost:8000/v1",
    ),
    note("engines", "orchestrator.{model.,}client.{api_key_var,skip_model_check,admin_base_url}", _ENGINES),
    note("engines", "orchestrator.{model.,}client.{headers,headers_from_env,extra_headers_from_state}{,.**}", _ENGINES),
    row("orchestrator.{model.,}client.wait_for_ready_timeout", "timeouts.start_s"),
    row("orchestrator.{model.,}client.timeout", "orchestrator.timeouts.engine_request_s", versions="0.8"),
    # Sampling
    row(f"{_TRAIN}.sampling.temperature", "orchestrator.sampling.temperature"),
    row(
        f"{_TRAIN}.sampling.max_completion_tokens",
        "orchestrator.sampling.max_tokens",
        rules.answer,
        default=None,
        why="prime-rl has no limit but the context",
    ),
    row(f"{_TRAIN}.sampling.max_tokens", "orchestrator.sampling.max_tokens", rules.answer, versions="0.8"),
    row(f"{_TRAIN}.sampling.extra_body", "orchestrator.sampling", rules.body),
    row(
        f"{_TRAIN}.sampling.enable_thinking",
        "orchestrator.sampling.chat_template_kwargs.enable_thinking",
        versions="0.8",
    ),
    refused(
        "sampling",
        f"{_TRAIN}.sampling.{{repetition_penalty,min_tokens,seed,temp_scheduler}}",
        "the trainer would compute other log-probabilities than the engine has sampled by",
        versions="0.8",
    ),
    note(
        "the batches",
        f"{_TRAIN}.filter_zero_advantages",
        "such tokens stay in the batch and in the loss's mean; orchestrator.buffer.online_difficulty_filtering draws "
        "other groups in their place",
    ),
    row(f"{_TRAIN}.max_retries", "orchestrator.train.env[].max_retries", versions="0.8"),
    row(f"{_TRAIN}.num_workers", "orchestrator.train.env[].num_workers", rules.unset("auto"), versions="0.8"),
    # Evaluations
    row(f"{_EVAL}.interval", "orchestrator.eval.env[].interval", default=100, where=_EVAL),
    row(f"{_EVAL}.num_examples", "orchestrator.eval.env[].num_examples", rules.all_if_negative),
    row(f"{_EVAL}.{{group_size,rollouts_per_example}}", "orchestrator.eval.env[].rollouts_per_example"),
    row(f"{_EVAL}.skip_first_step", "orchestrator.eval.env[].base_model", rules.inverted),
    row(f"{_EVAL}.eval_base_model", "orchestrator.eval.env[].base_model", versions="0.8"),
    note(
        "evaluations",
        f"{_EVAL}.retrigger_on_resume",
        "what was not measured when a run stopped is measured when it resumes",
    ),
    row(
        f"{_EVAL}.sampling.temperature",
        "orchestrator.eval.env[].sampling.temperature",
        rules.unset(None),
        default=1.0,
        where=_EVAL,
        why="prime-rl leaves it to the engine, ours is greedy",
    ),
    row(
        f"{_EVAL}.sampling.{{max_completion_tokens,max_tokens}}",
        "orchestrator.eval.env[].sampling.max_tokens",
        rules.answer,
    ),
    refused(
        "evaluations", f"{_EVAL}.sampling.{{top_p,top_k,min_p}}", "evaluations sample from all tokens", None, 1, 0, -1
    ),
    refused(
        "evaluations",
        f"{_EVAL}.sampling.reasoning_effort",
        "orchestrator.sampling.chat_template_kwargs has it, for training too",
        None,
    ),
    refused("evaluations", f"{_EVAL}.sampling.extra_body{{,.**}}", "requests of evaluations have no other fields", {}),
    row(
        f"{_EVAL}.max_retries",
        "orchestrator.eval.env",
        rules.only(1, "a rollout that failed is tried once more"),
        versions="0.8",
    ),
]

_SOURCE = "S[]"
ENVIRONMENT: list[Row] = [
    row(f"{_SOURCE}.name", f"{_SOURCE}.name", rules.unset(None)),
    row(f"{_SOURCE}.env{{}}", f"{_SOURCE}.args", rules.seats, versions="0.9"),
    row(f"{_SOURCE}.env.taskset.id", f"{_SOURCE}.id", versions="0.9"),
    row(f"{_SOURCE}.env.taskset.**", f"{_SOURCE}.taskset.**", versions="0.9"),
    row(f"{_SOURCE}.env.id", f"{_SOURCE}.args.id", rules.unset(""), versions="0.9"),
    row(
        f"{_SOURCE}.env.*.harness.id",
        f"{_SOURCE}.args.*.harness.id",
        rules.harness,
        versions="0.9",
        why="verifiers' chat (`null`) runs within the worker",
    ),
    row(
        f"{_SOURCE}.env.*.runtime.type",
        f"{_SOURCE}.args.*.runtime.type",
        rules.runtime,
        versions="0.9",
        why="a process of this machine is the default",
    ),
    row(
        f"{_SOURCE}.env.*.timeout.rollout",
        f"{_SOURCE}.args.*.timeout.rollout",
        rules.rollout_time(TIME),
        versions="0.9",
    ),
    row(f"{_SOURCE}.env.**", f"{_SOURCE}.args.**", versions="0.9"),
    row(f"{_SOURCE}.serve.pool.num_workers", f"{_SOURCE}.num_workers", versions="0.9"),
    note(
        "environments",
        f"{_SOURCE}.serve.pool.{{type,max_workers,multiplex}}",
        "the number of workers is fixed: num_workers, each with max_concurrent rollouts",
        versions="0.9",
    ),
    row(f"{_SOURCE}.serve.max_concurrent", f"{_SOURCE}.max_concurrent", rules.unset(None), versions="0.9"),
    refused(
        "environments",
        f"{_SOURCE}.{{serve.,}}address",
        "workers of other machines join: num_workers = 0 here, and `primerl env-worker --join` there",
        None,
    ),
    # 0.8
    row(f"{_SOURCE}.id", f"{_SOURCE}.id", versions="0.8"),
    row(f"{_SOURCE}.args.**", f"{_SOURCE}.args.**", versions="0.8"),
    row(f"{_SOURCE}.extra_env_kwargs.**", f"{_SOURCE}.args.**", versions="0.8"),
    row(f"{_SOURCE}.taskset.id", f"{_SOURCE}.id", versions="0.8"),
    row(f"{_SOURCE}.taskset.**", f"{_SOURCE}.taskset.**", versions="0.8"),
    row(f"{_SOURCE}.harness.**", f"{_SOURCE}.harness.**", versions="0.8"),
    row(f"{_SOURCE}.num_workers", f"{_SOURCE}.num_workers", rules.unset("auto"), versions="0.8"),
    row(f"{_SOURCE}.timeout", f"{_SOURCE}.rollout_s", rules.unset(None), versions="0.8"),
    row(f"{_SOURCE}.max_turns", f"{_SOURCE}.limits.turns", rules.unset(None), versions="0.8"),
    row(
        f"{_SOURCE}.{{max_total_completion_tokens,max_output_tokens}}",
        f"{_SOURCE}.limits.tokens",
        rules.unset(-1, None),
        versions="0.8",
    ),
    note("environments", f"{_SOURCE}.state_columns", "the journal has what a rollout reports", [], versions="0.8"),
]

TRAIN_ENVIRONMENT: list[Row] = [
    row(f"{_SOURCE}.ratio", f"{_SOURCE}.ratio"),
    row(f"{_SOURCE}.max_retries", f"{_SOURCE}.max_retries", versions="0.8"),
    row(f"{_SOURCE}.group_size", f"{_SOURCE}.group_size"),
    row(f"{_SOURCE}.sampling.temperature", f"{_SOURCE}.sampling.temperature"),
    row(f"{_SOURCE}.sampling.{{max_completion_tokens,max_tokens}}", f"{_SOURCE}.sampling.max_tokens", rules.answer),
    row(f"{_SOURCE}.sampling.extra_body", f"{_SOURCE}.sampling", rules.body),
    note(
        "environments",
        f"{_SOURCE}.curriculum.sampler.{{type,seed}}",
        "examples come in the run's seeded order",
        "standard",
        versions="0.9",
    ),
    refused(
        "environments",
        f"{_SOURCE}.curriculum.sampler.pools{{,.**}}",
        "orchestrator.buffer weighs easy and hard examples, of all environments",
        versions="0.9",
    ),
    row(f"{_SOURCE}.curriculum.gates{{}}", "orchestrator.buffer", rules.gates, versions="0.9"),
    row(
        f"{_SOURCE}.curriculum.gates.*.{{type,reject_min,reject_max}}",
        "orchestrator.buffer",
        rules.said,
        versions="0.9",
    ),
]

EVAL_ENVIRONMENT: list[Row] = [
    note("evaluations", f"{_SOURCE}.ratio", "each evaluation environment is measured whole", 1.0),
    row(f"{_SOURCE}.num_examples", f"{_SOURCE}.num_examples", rules.all_if_negative),
    row(f"{_SOURCE}.{{group_size,rollouts_per_example}}", f"{_SOURCE}.rollouts_per_example"),
    row(f"{_SOURCE}.interval", f"{_SOURCE}.interval"),
    row(f"{_SOURCE}.skip_first_step", f"{_SOURCE}.base_model", rules.inverted, versions="0.8"),
    row(f"{_SOURCE}.sampling.temperature", f"{_SOURCE}.sampling.temperature", rules.unset(None)),
    row(f"{_SOURCE}.sampling.{{max_completion_tokens,max_tokens}}", f"{_SOURCE}.sampling.max_tokens", rules.answer),
    refused(
        "evaluations", f"{_SOURCE}.sampling.{{top_p,top_k,min_p}}", "evaluations sample from all tokens", None, 1, 0, -1
    ),
    refused(
        "evaluations",
        f"{_SOURCE}.sampling.{{reasoning_effort,extra_body}}",
        "requests of evaluations have no other fields; orchestrator.sampling.chat_template_kwargs is for all",
        None,
        {},
    ),
]


_FILTER = "echo learns whole messages of the roles that it weighs; no function chooses among their tokens"
_TEACHER = "the teacher is asked with base_url, model and api_key_env alone"
ALGORITHM: list[Row] = [
    row("A.type", "B.type", rules.algorithm, subject="the algorithm"),
    row("A.{teacher,sampling.source}.{name,base_url,api_key_var}", "B.type", lambda _, context: rules.taught(context)),
    row("A.sampling.source{}", "B.type", rules.said),
    note("the algorithm", "A.{teacher,sampling.source}.{wait_for_ready_timeout,skip_model_check}", _TEACHER),
    refused(
        "the algorithm",
        "A.{teacher,sampling.source}.{headers,headers_from_env,extra_headers_from_state}{,.**}",
        _TEACHER,
        {},
    ),
    note("the algorithm", "A.{teacher,sampling.source}.admin_base_url", _TEACHER, None),
    row("A.length_penalty{}", "B.length_penalty", rules.table),
    row(
        "A.length_penalty.type",
        "B.length_penalty",
        rules.only("linear", "the only length penalty is linear"),
        subject="the algorithm",
    ),
    row(
        "A.length_penalty.{num_output_tokens_weight,num_input_tokens_weight,num_turns_weight}",
        "B.length_penalty.",
    ),
    row("A.roles{}", "B.echo", rules.said),
    row("A.roles.{system,user,assistant,tool}{}", "B.echo", rules.said),
    row("A.roles.{system,user,assistant,tool}.alpha", "B.echo", rules.said),
    refused("the algorithm", "A.filter.{import_path,kwargs}", _FILTER),
    refused("the algorithm", "A.filter.kwargs.**", _FILTER),
    row("A.decay", "B.decay"),
    row("A.episode_agents", "B.episode_agents"),
    row("A.demo_key", "B.type", rules.demonstration("key")),
    row("A.template", "B.type", rules.demonstration("template")),
    note("the algorithm", "A.renderer{,.**}", "the model's own chat template is rendered"),
]

OLD_ALGORITHM: list[Row] = [
    row("orchestrator.training_mode", "orchestrator.training_mode", versions="0.8"),
    row("orchestrator.teacher.client.base_url", "orchestrator.teacher.client.base_url", versions="0.8"),
    row("orchestrator.teacher.client.api_key_var", "orchestrator.teacher.client.api_key_env", versions="0.8"),
    note("the algorithm", "orchestrator.{teacher,student}.client.*", _TEACHER, versions="0.8"),
    row("orchestrator.teacher.model.name", "orchestrator.teacher.client.model", versions="0.8"),
    note("the algorithm", "orchestrator.student.model.*", "the model is model.path", versions="0.8"),
    row(
        "orchestrator.advantage.type",
        "orchestrator.algorithm.type",
        rules.among({"default": "grpo", "custom": "custom"}, "the algorithms are those of orchestrator.algorithm.type"),
        versions="0.8",
    ),
    row("orchestrator.advantage.import_path", "orchestrator.algorithm.path", rules.import_path, versions="0.8"),
    refused(
        "the algorithm",
        "orchestrator.advantage.{length_penalty,kwargs}{,.**}",
        "orchestrator.algorithm.path is a function of yours, without settings",
        None,
        versions="0.8",
    ),
    note(
        "the algorithm",
        "orchestrator.{pre_batch_filters,post_batch_filters}[].{type,enforce,*}",
        "orchestrator.buffer.online_difficulty_filtering draws other groups in place of those without signal; "
        "orchestrator.algorithm.path may give a rollout no advantage",
        versions="0.8",
    ),
]


def _all() -> list[Row]:
    found = [*ORCHESTRATOR, *OLD_ALGORITHM]
    for theirs in ("source", "env"):
        for role, own in (("train", TRAIN_ENVIRONMENT), ("eval", EVAL_ENVIRONMENT)):
            names = (_SOURCE, f"orchestrator.{role}.{theirs}[]"), (_SOURCE, f"orchestrator.{role}.env[]")
            found += moved(expanded([*ENVIRONMENT, *own]), *names)
        entry = f"orchestrator.train.{theirs}[].algo"
        found += moved(expanded(ALGORITHM), ("A", entry), ("B", "orchestrator.train.env[].algorithm"))
    found += moved(expanded(ALGORITHM), ("A", "orchestrator.algo"), ("B", "orchestrator.algorithm"))
    return found


ROWS = _all()
