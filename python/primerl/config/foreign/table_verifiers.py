"""The table of renamings: evaluations of prime-rl and of verifiers, and verifiers' prompt optimisation."""

from __future__ import annotations

from primerl.config.foreign import rules, run_rules, table_orchestrator
from primerl.config.foreign.rows import Row, expanded, moved, note, refused, row

TIME = "timeouts.rollout_s"
_LOCAL = "results are in the folder of the evaluation"
_LOGS = "lines come when something happens"

SAMPLING: list[Row] = [
    row("S.temperature", "temperature", rules.unset(None), default=1.0),
    row("S.{max_tokens,max_completion_tokens}", "max_tokens", rules.unset(None)),
    row("S.{reasoning_effort,enable_thinking}", "chat_template_kwargs.", rules.unset(None)),
    row("S.extra_body.chat_template_kwargs.**", "chat_template_kwargs.**"),
    refused("sampling", "S.{top_p,top_k,min_p}", "evaluations sample from all tokens", None, 1, 0, -1),
    refused(
        "sampling",
        "S.{n,seed,stop,presence_penalty,frequency_penalty,repetition_penalty,min_tokens}",
        "requests of evaluations have no such field",
        None,
    ),
    refused("sampling", "S.extra_body{,.**}", "requests of evaluations have no other fields", {}),
]

_HEADERS = "requests have the headers that an environment's own client gives them; keys are api_key_env"
CLIENT: list[Row] = [
    row("C.{base_url,api_base_url}", "base_url"),
    row("C.api_key_var", "api_key_env"),
    note(
        "endpoints",
        "C.{wait_for_ready_timeout,skip_model_check,admin_base_url,type,timeout}",
        "an endpoint is asked as it is; timeouts.answer_s bounds an answer",
    ),
    refused("endpoints", "C.{headers,headers_from_env,extra_headers_from_state}{,.**}", _HEADERS, {}),
]

_ENVIRONMENT = [one for one in table_orchestrator.ENVIRONMENT if one.versions != "0.8"]
PRIME_EVALS: list[Row] = [
    row(rules.NO_KEY, TIME, default=3600, why="prime-rl has no limit"),
    row("eval.source[].env.*.timeout.rollout", "env[].args.*.timeout.rollout", rules.rollout_time(TIME)),
    row("model", "model", default="Qwen/Qwen3-0.6B"),
    row("eval.client.base_url", "base_url", rules.of_a_server, default="http://localhost:8000/v1"),
    *moved(CLIENT, ("C.", "eval.client.")),
    *moved(SAMPLING, ("S.", "eval.sampling.")),
    row("eval.num_examples", "num_examples", rules.all_if_negative),
    row("eval.group_size", "rollouts_per_example"),
    row("eval.concurrency.max_inflight", "concurrency", default=1024, where="eval"),
    note("evaluations", "eval.concurrency.{initial_inflight,min_inflight}", "as many as concurrency are in flight"),
    note(
        "evaluations",
        "eval.{interval,skip_first_step,retrigger_on_resume}",
        "there is one evaluation, and the same command resumes it",
        100,
        False,
    ),
    note("environments", "eval.env_server_base_port", "env workers listen on no port"),
    note("evaluations", "eval.source[].interval", "there is one evaluation, and the same command resumes it", 100),
    refused(
        "evaluations",
        "online.{broadcasts_dir,max_steps,resume_step}",
        "an evaluation during training is [[orchestrator.eval.env]] of a run",
    ),
    refused(
        "evaluations", "weight_broadcast.**", "an evaluation during training is [[orchestrator.eval.env]] of a run"
    ),
    row("output_dir", "output_dir", run_rules.run_folder),
    row("log.{level,vf_level}", "log.level"),
    note("logs", "log.{json_logging,log_data,interval}", _LOGS),
    note("monitors", "monitors.{wandb,file}{,.**}", _LOCAL),
    *moved(expanded(_ENVIRONMENT), ("S[]", "eval.source[]"), ("S[]", "env[]")),
    note("evaluations", "eval.source[].ratio", "each environment is measured whole", 1.0),
    row("eval.source[].num_examples", "env[].num_examples", rules.all_if_negative),
    row("eval.source[].group_size", "env[].rollouts_per_example"),
    row("eval.source[].sampling.temperature", "env[].temperature", rules.unset(None)),
    row("eval.source[].sampling.max_completion_tokens", "env[].max_tokens", rules.unset(None)),
    refused(
        "sampling",
        "eval.source[].sampling.{top_p,top_k,min_p,reasoning_effort,extra_body}{,.**}",
        "requests of one environment have no other fields",
        None,
        {},
    ),
]

_SHARED: list[Row] = [
    row("{max_concurrent,c}", "concurrency", rules.unset(None), default=128),
    row("dry_run", "dry_run"),
    row("clean", "clean_output_dir"),
    row("output_dir", "output_dir", run_rules.run_folder),
    row("run.{name,dir}", "output_dir", run_rules.run_folder),
    note("evaluations", "{resume,save_results,verbose,debug,push,rich,rich.show_logs,tui}", _LOCAL),
    note("environments", "serve{,.**}", "env workers are num_workers of each environment"),
]

_ENV = "env"
_SEATS: list[Row] = [
    row(rules.NO_KEY, TIME, default=3600, why="verifiers has no limit"),
    row(f"{_ENV}{{}}", "env[0].args", rules.seats),
    row(f"{_ENV}.taskset.id", "env[0].id"),
    row(f"{_ENV}.taskset.**", "env[0].taskset.**"),
    row(f"{_ENV}.id", "env[0].args.id", rules.unset("")),
    row(
        f"{_ENV}.*.harness.id",
        "env[0].args.*.harness.id",
        rules.harness,
        why="verifiers' chat (`null`) runs within the worker",
    ),
    row(
        f"{_ENV}.*.runtime.type",
        "env[0].args.*.runtime.type",
        rules.runtime,
        why="a process of this machine is the default",
    ),
    row(f"{_ENV}.*.timeout.rollout", "env[0].args.*.timeout.rollout", rules.rollout_time(TIME)),
    row(f"{_ENV}.**", "env[0].args.**"),
]

VERIFIERS_EVAL: list[Row] = [
    row("{model,m}", "model", default="deepseek/deepseek-v4-flash"),
    row("client.base_url", "base_url", rules.of_a_server, default=rules.PINFERENCE),
    row("client.api_key_var", "api_key_env", rules.of_a_server, default="PRIME_API_KEY"),
    *moved(CLIENT, ("C.", "client.")),
    *moved(SAMPLING, ("S.", "sampling.")),
    row("{num_tasks,num_examples,n,select.limit}", "num_examples", rules.unset(None, -1)),
    row("{num_rollouts,rollouts_per_example,group_size,r}", "rollouts_per_example"),
    note("evaluations", "{shuffle,s}", "examples come in the order that `seed` gives", False),
    *_SHARED,
    *_SEATS,
]

PUBLISHED_EVAL: list[Row] = [
    row("model", "model", default="openai/gpt-4.1-mini"),
    row("{api_base_url,base_url}", "base_url", rules.of_a_server, default=rules.PINFERENCE),
    row("api_key_var", "api_key_env", rules.of_a_server, default="PRIME_API_KEY"),
    row("num_examples", "num_examples", rules.all_if_negative, default=5),
    row("rollouts_per_example", "rollouts_per_example", default=3),
    *moved(SAMPLING, ("S.", "sampling_args.")),
    *moved(SAMPLING[1:], ("S.", "sampling.")),
    row("max_tokens", "max_tokens", rules.unset(None)),
    row("temperature", "temperature", rules.unset(None), default=1.0),
    row("eval[].{env_id,id}", "env[].id"),
    row("eval[].name", "env[].name"),
    row("eval[].{env_args,extra_env_kwargs,args}.**", "env[].args.**"),
    row("eval[].num_examples", "env[].num_examples", rules.all_if_negative),
    row("eval[].rollouts_per_example", "env[].rollouts_per_example"),
    row("eval[].{sampling_args.,}max_tokens", "env[].max_tokens"),
    row("eval[].{sampling_args.,}temperature", "env[].temperature"),
    row("eval[].model", "model", rules.one_model),
    refused("sampling", "eval[].sampling_args.*", "requests of one environment have no other fields"),
    note("evaluations", "eval[].*", "it is set for the whole evaluation, or follows from it"),
    refused(
        "evaluations",
        "ablation{,[].**}",
        "an evaluation has one set of values; `primerl eval run` runs a file's ablations one after the other",
    ),
    row("env_args.**", "env[].args.**"),
    note(
        "endpoints",
        "{endpoints_path,endpoint_id,provider}",
        "`primerl eval run -e` reads such a file; here a model has base_url and api_key_env",
    ),
    refused("endpoints", "{header,headers,header_from_state}{,.**}", _HEADERS, {}),
    note(
        "environments",
        "{env_dir_path,extra_env_kwargs,max_retries}",
        "environments are installed, and a rollout that failed is tried once more",
    ),
    note(
        "evaluations",
        "{independent_scoring,resume_path,state_columns,save_to_hf_hub,hf_hub_dataset_name,timeout,"
        "abbreviated_summary,num_workers,disable_env_server,max_concurrent_generation,max_concurrent_scoring}",
        _LOCAL,
    ),
    *_SHARED,
]

VERIFIERS_GEPA: list[Row] = [
    row("{model,m}", "model", default="openai/gpt-4.1-mini"),
    row("{reflection_model,initial_prompt}", ""),
    row("{api_base_url,base_url}", "base_url", rules.of_a_server, default=rules.PINFERENCE),
    row("{api_key_var,api_key_env}", "api_key_env", rules.of_a_server, default="PRIME_API_KEY"),
    *moved(CLIENT, ("C.", "client.")),
    row("reflection_client.base_url", "reflection_base_url"),
    row("reflection_client.api_key_var", "reflection_api_key_env"),
    refused("endpoints", "reflection_client.**", "the reflection model is asked as it is, with a key"),
    *moved(SAMPLING, ("S.", "sampling.")),
    *moved(SAMPLING[1:], ("S.", "execution.sampling_args.")),
    row("execution.sampling_args.temperature", "temperature", rules.unset(None)),
    row("gepa.{max_calls,minibatch_size,perfect_score,state_columns,num_train,num_val,max_concurrent,seed}", "gepa."),
    row("{num_train,num_val,max_concurrent,seed}", "gepa."),
    row("execution.{max_concurrent,seed}", "gepa."),
    row("max_total_rollouts", "gepa.max_calls"),
    row("reflection_minibatch_size", "gepa.minibatch_size"),
    row("reflection_columns", "gepa.state_columns"),
    row("run_dir", "output_dir"),
    row("output_dir", "output_dir", run_rules.run_folder),
    row("run.{name,dir}", "output_dir", run_rules.run_folder),
    row("dry_run", "dry_run"),
    row("env[].{env_id,id}", "env[].id"),
    row("env[].{env_args,extra_env_kwargs,args}.**", "env[].args.**"),
    row("env[].taskset.**", "env[].taskset.**"),
    row("env[].harness.**", "env[].harness.**"),
    row("env.env_id", "env[0].id"),
    row("env.{env_args,extra_env_kwargs}.**", "env[0].args.**"),
    *_SEATS,
    note("endpoints", "endpoints_path", "names of models are looked up in it before the file is read"),
    note("environments", "env_dir_path", "environments are installed"),
    note("the run", "{shuffle,s}", "the split follows from seed", True),
    note("the run", "{save_results,verbose,tui,rich,push}", _LOCAL),
]
