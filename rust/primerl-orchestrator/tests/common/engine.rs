//! Mock engines on separate ports, each in a separate runtime: killing it cuts its connections, as with a process.

use primerl_engine_server::mock::{MockConfig, fold};
use primerl_engine_server::{Backend, Config, MockBackend};
use std::path::Path;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub struct Engine {
    pub url: String,
    port: u16,
    mock: MockConfig,
    stop: CancellationToken,
    task: JoinHandle<()>,
    /// `None` after it was stopped.
    runtime: Option<Runtime>,
}

impl Engine {
    pub async fn start(mock: MockConfig) -> Engine {
        Engine::start_at(0, mock).await
    }

    async fn start_at(port: u16, mock: MockConfig) -> Engine {
        let listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let config = Config {
            served_model_name: "m".into(),
            max_num_seqs: Config::default().max_num_seqs.min(mock.slots),
            ..Config::default()
        };
        let backend = MockBackend::new(mock.clone());
        Engine::run(config, listener, mock, backend).await
    }

    /// An engine that renders messages with the model in `folder`.
    pub async fn start_rendering(mock: MockConfig, folder: &Path) -> Engine {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let config = Config {
            served_model_name: "m".into(),
            chat_model: Some(folder.to_owned()),
            ..Config::default()
        };
        let backend = MockBackend::new(mock.clone());
        Engine::run(config, listener, mock, backend).await
    }

    /// As large as the mock.
    pub async fn start_whole(mock: MockConfig) -> Engine {
        Engine::start_with(mock.clone(), MockBackend::new(mock)).await
    }

    /// As large as the mock, which `backend` is, in some form.
    pub async fn start_with(mock: MockConfig, backend: impl Backend) -> Engine {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let config = Config {
            served_model_name: "m".into(),
            max_num_seqs: mock.slots,
            max_model_len: mock.max_model_len,
            kv_cache_tokens: u64::from(mock.slots) * u64::from(mock.max_model_len),
            max_num_batched_tokens: mock.max_model_len,
            ..Config::default()
        };
        Engine::run(config, listener, mock, backend).await
    }

    async fn run(
        config: Config,
        listener: std::net::TcpListener,
        mock: MockConfig,
        backend: impl Backend,
    ) -> Engine {
        let port = listener.local_addr().unwrap().port();
        let stop = CancellationToken::new();
        let shutdown = stop.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let task = runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            // A faulty mock's end is checked by what its clients see.
            let _ = primerl_engine_server::run(config, backend, listener, shutdown).await;
        });
        Engine {
            url: format!("http://127.0.0.1:{port}"),
            port,
            mock,
            stop,
            task,
            runtime: Some(runtime),
        }
    }

    /// Keeps the requests that it has and those that come, and computes nothing until [`Engine::resume`]: what they
    /// are doing lasts until a test has seen it, however long a busy machine takes.
    pub async fn pause(&self) {
        self.order("pause?mode=keep&clear_cache=false").await;
    }

    pub async fn resume(&self) {
        self.order("resume").await;
    }

    async fn order(&self, route: &str) {
        let order = super::client().post(format!("{}/{route}", self.url));
        assert_eq!(order.send().await.unwrap().status(), 200, "{route}");
    }

    /// Answers running requests with the tokens they have, then closes.
    pub async fn stop(mut self) {
        self.stop.cancel();
        (&mut self.task).await.unwrap();
    }

    /// Closes abruptly, without a goodbye.
    pub async fn kill(mut self) -> (u16, MockConfig) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        // Its tasks, and with them its sockets, are dropped once none of them runs any more.
        let _ = (&mut self.task).await;
        (self.port, self.mock.clone())
    }

    /// A new process at the address of a dead one: no weights, another label.
    pub async fn restart((port, mock): (u16, MockConfig)) -> Engine {
        Engine::start_at(port, mock).await
    }
}

impl Drop for Engine {
    /// A runtime cannot be dropped in async code.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The engine's own log-probability of each token of `ids` where `versions` is not negative.
pub fn expected_logprobs(ids: &[i32], versions: &[i32]) -> Vec<f32> {
    let mock = MockConfig::default();
    let mut prefix = 0;
    let mut expected = Vec::with_capacity(ids.len());
    for (&id, &version) in ids.iter().zip(versions) {
        expected.push(match u64::try_from(version) {
            Ok(version) => mock.score(prefix, id as u32, version, 0).logprob,
            Err(_) => 0.0,
        });
        prefix = fold(prefix, id as u32);
    }
    expected
}
