//! A router that knows its paths: a test visits all of them and shows which key opens each.

use axum::Router;
use axum::routing::MethodRouter;

pub struct Routes<S> {
    router: Router<S>,
    paths: Vec<String>,
}

impl<S: Clone + Send + Sync + 'static> Default for Routes<S> {
    fn default() -> Routes<S> {
        Routes::new()
    }
}

impl<S: Clone + Send + Sync + 'static> Routes<S> {
    pub fn new() -> Routes<S> {
        Routes {
            router: Router::new(),
            paths: Vec::new(),
        }
    }

    pub fn route(mut self, path: &str, methods: MethodRouter<S>) -> Routes<S> {
        self.paths.push(path.to_owned());
        Routes {
            router: self.router.route(path, methods),
            ..self
        }
    }

    pub fn merge(mut self, other: Routes<S>) -> Routes<S> {
        self.paths.extend(other.paths);
        Routes {
            router: self.router.merge(other.router),
            ..self
        }
    }

    pub fn with_state<T: Clone + Send + Sync + 'static>(self, state: S) -> Routes<T> {
        Routes {
            router: self.router.with_state(state),
            paths: self.paths,
        }
    }

    /// Paths in axum's format: `/rollouts/{rollout}/v1/models`.
    pub fn paths(&self) -> &[String] {
        &self.paths
    }

    pub fn into_router(self) -> Router<S> {
        self.router
    }
}
