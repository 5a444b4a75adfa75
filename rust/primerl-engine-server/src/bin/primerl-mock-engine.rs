//! An engine without a model: see `primerl_engine_server::mock`.

use clap::Parser;
use primerl_engine_server::mock::{Faults, ScriptedAnswer};
use primerl_engine_server::{Config, MockBackend, MockConfig, ServerError};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A seeded engine for tests: deterministic tokens, latency and faults to order.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// 0 lets the operating system choose; the address is printed on stdout.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Name requests may give as `model`.
    #[arg(long, default_value = "mock")]
    served_model_name: String,
    /// Folder with the tokenizer and chat template of /v1/chat/completions; without it that route is refused.
    #[arg(long)]
    chat_model: Option<PathBuf>,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[arg(long, default_value_t = 264)]
    vocab_size: u32,
    /// Id of the end-of-sequence token; -1 for none.
    #[arg(long, default_value_t = 256, allow_negative_numbers = true)]
    eos_token_id: i64,
    /// Probability that a token is end of sequence.
    #[arg(long, default_value_t = 0.05)]
    eos_probability: f64,
    /// Other tokens are drawn from this id on ...
    #[arg(long, default_value_t = 0)]
    first_token: u32,
    /// ... up to this id, exclusive.
    #[arg(long, default_value_t = 256)]
    last_token: u32,
    #[arg(long, default_value_t = 2048)]
    max_model_len: u32,
    /// Most sequences that run at once.
    #[arg(long, default_value_t = 128)]
    max_num_seqs: u32,
    /// KV capacity, tokens; defaults to room for max_num_seqs full sequences.
    #[arg(long)]
    kv_cache_tokens: Option<u64>,
    /// Most tokens of one step.
    #[arg(long, default_value_t = 4096)]
    max_num_batched_tokens: u32,
    /// Cap of `logprobs`; -1 for none.
    #[arg(long, default_value_t = 20, allow_negative_numbers = true)]
    max_logprobs: i64,
    /// raw_logprobs, or processed_logprobs: after temperature and truncation.
    #[arg(long, default_value = "raw_logprobs", value_parser = ["raw_logprobs", "processed_logprobs"])]
    logprobs_mode: String,
    /// Milliseconds a step takes ...
    #[arg(long, default_value_t = 0.0)]
    step_latency_ms: f64,
    /// ... and per token in it.
    #[arg(long, default_value_t = 0.0)]
    token_latency_ms: f64,
    /// A step that takes longer makes /health answer 503, seconds.
    #[arg(long, default_value_t = 60.0)]
    step_deadline_s: f64,
    /// The forward call with this number (from 1) fails.
    #[arg(long)]
    fail_forward_at: Option<u64>,
    /// The forward call with this number (from 1) never returns.
    #[arg(long)]
    hang_forward_at: Option<u64>,
    /// Weight updates are refused.
    #[arg(long)]
    refuse_update: bool,
    /// The reported digest is not that of the tensors.
    #[arg(long)]
    wrong_digest: bool,
    /// New weights are taken and proved, but not computed with.
    #[arg(long)]
    wrong_weights: bool,
    /// Answers to order: a JSON file, [{"after": [ids], "answer": [ids]}, ...]. After a prompt that ends with `after`, the
    /// engine says `answer`; the first that fits counts.
    #[arg(long)]
    script: Option<PathBuf>,
}

impl Arguments {
    fn config(&self) -> Config {
        Config {
            served_model_name: self.served_model_name.clone(),
            model_root: "mock".into(),
            chat_model: self.chat_model.clone(),
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            kv_cache_tokens: self
                .kv_cache_tokens
                .unwrap_or(u64::from(self.max_num_seqs) * u64::from(self.max_model_len)),
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_logprobs: self.max_logprobs,
            seed: self.seed,
            step_deadline_s: self.step_deadline_s,
        }
    }

    fn mock(&self) -> Result<MockConfig, String> {
        if self.first_token >= self.last_token || self.last_token > self.vocab_size {
            return Err(
                "--first-token must be below --last-token, and that not above --vocab-size".into(),
            );
        }
        let latency = |milliseconds: f64| {
            Duration::try_from_secs_f64(milliseconds / 1e3)
                .map_err(|error| format!("latency: {error}"))
        };
        let script = self.script.as_deref().map(read_script).transpose()?;
        Ok(MockConfig {
            script: script.unwrap_or_default(),
            vocab_size: self.vocab_size,
            processed_logprobs: self.logprobs_mode == "processed_logprobs",
            reports_experts: false,
            slots: self.max_num_seqs,
            max_model_len: self.max_model_len,
            eos_token_id: u32::try_from(self.eos_token_id).ok(),
            eos_probability: self.eos_probability,
            first_token: self.first_token,
            last_token: self.last_token,
            step_latency: latency(self.step_latency_ms)?,
            token_latency: latency(self.token_latency_ms)?,
            loadable: None,
            faults: Faults {
                fail_forward_at: self.fail_forward_at,
                hang_forward_at: self.hang_forward_at,
                refuse_update: self.refuse_update,
                wrong_digest: self.wrong_digest,
                wrong_weights: self.wrong_weights,
            },
        })
    }
}

fn read_script(path: &Path) -> Result<Vec<ScriptedAnswer>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("--script {}: {error}", path.display());
    let text = std::fs::read(path).map_err(|error| failed(&error))?;
    serde_json::from_slice(&text).map_err(|error| failed(&error))
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()),
        )
        .with_writer(std::io::stderr)
        .init();
    match serve(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Input(message)) => {
            eprintln!("primerl-mock-engine: {message}");
            ExitCode::from(2)
        }
        Err(Failure::Run(error)) => {
            eprintln!("primerl-mock-engine: {error}");
            ExitCode::FAILURE
        }
    }
}

enum Failure {
    Input(String),
    Run(ServerError),
}

async fn listen(arguments: &Arguments) -> Result<TcpListener, Failure> {
    let address = format!("{}:{}", arguments.host, arguments.port);
    TcpListener::bind(&address).await.map_err(|error| {
        Failure::Input(format!(
            "cannot listen on {address} (--host, --port): {error}"
        ))
    })
}

/// Stops the server at the first signal; never resolves.
async fn stop_at_a_signal(mut terminate: Signal, stop: CancellationToken) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    stop.cancel();
    std::future::pending::<()>().await
}

async fn serve(arguments: Arguments) -> Result<(), Failure> {
    let mock = arguments.mock().map_err(Failure::Input)?;
    let listener = listen(&arguments).await?;
    let bound = listener
        .local_addr()
        .map_err(|error| Failure::Run(error.into()))?;
    let terminate = signal(SignalKind::terminate()).map_err(|error| Failure::Run(error.into()))?;
    let shutdown = CancellationToken::new();
    let stop = shutdown.clone();
    let run = primerl_engine_server::run(
        arguments.config(),
        MockBackend::new(mock),
        listener,
        shutdown,
    );
    println!("http://{bound}");
    let result = tokio::select! {
        result = run => result,
        () = stop_at_a_signal(terminate, stop) => Ok(()),
    };
    match result {
        Err(ServerError::Config(error)) => Err(Failure::Input(error.to_string())),
        other => other.map_err(Failure::Run),
    }
}
