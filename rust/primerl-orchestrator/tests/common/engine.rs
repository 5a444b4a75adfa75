//! Mock engines on ports of their own.

use primerl_engine::mock::{MockConfig, fold};
use primerl_engine::{Config, MockBackend};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub struct Engine {
    pub url: String,
    port: u16,
    mock: MockConfig,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Engine {
    pub async fn start(mock: MockConfig) -> Engine {
        Engine::start_at(0, mock).await
    }

    async fn start_at(port: u16, mock: MockConfig) -> Engine {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let config = Config {
            served_model_name: "m".into(),
            ..Config::default()
        };
        let stop = CancellationToken::new();
        let (backend, shutdown) = (MockBackend::new(mock.clone()), stop.clone());
        let task = tokio::spawn(async move {
            // How a faulty mock ends is told by what its clients see.
            let _ = primerl_engine::run(config, backend, listener, shutdown).await;
        });
        Engine {
            url: format!("http://127.0.0.1:{port}"),
            port,
            mock,
            stop,
            task,
        }
    }

    /// Answers what runs with what it has, then closes.
    pub async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }

    /// Closes without a word.
    pub async fn kill(self) -> (u16, MockConfig) {
        self.task.abort();
        let _ = self.task.await;
        self.stop.cancel();
        (self.port, self.mock)
    }

    /// A new process at the address of a dead one: no weights, another label.
    pub async fn restart((port, mock): (u16, MockConfig)) -> Engine {
        Engine::start_at(port, mock).await
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
