//! The page itself: a few files that are part of the program. They hold no data, so they are served without a key; and
//! a strict policy forbids all other sources, so a model's text can never become part of the page.

use super::Page;
use axum::extract::Path;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use primerl_service::http::Routes;
use std::sync::Arc;

const FOLDER: &str = "/page/assets/";
pub const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const INDEX: &str = include_str!("web/index.html");
const SCRIPT: &str = "text/javascript; charset=utf-8";
/// Name, kind and content of each file.
pub const ASSETS: [(&str, &str, &str); 15] = [
    (
        "style.css",
        "text/css; charset=utf-8",
        include_str!("web/style.css"),
    ),
    ("icon.svg", "image/svg+xml", include_str!("web/icon.svg")),
    ("chart.js", SCRIPT, include_str!("web/chart.js")),
    ("common.js", SCRIPT, include_str!("web/common.js")),
    ("ending.js", SCRIPT, include_str!("web/ending.js")),
    ("evaluations.js", SCRIPT, include_str!("web/evaluations.js")),
    ("fork.js", SCRIPT, include_str!("web/fork.js")),
    ("group.js", SCRIPT, include_str!("web/group.js")),
    ("help.js", SCRIPT, include_str!("web/help.js")),
    ("main.js", SCRIPT, include_str!("web/main.js")),
    ("overview.js", SCRIPT, include_str!("web/overview.js")),
    ("panels.js", SCRIPT, include_str!("web/panels.js")),
    ("rollout.js", SCRIPT, include_str!("web/rollout.js")),
    ("rollouts.js", SCRIPT, include_str!("web/rollouts.js")),
    ("tokens.js", SCRIPT, include_str!("web/tokens.js")),
];

/// Whether a path is one of the page's own files.
pub fn is_asset(path: &str) -> bool {
    path == "/" || path.starts_with(FOLDER)
}

pub fn routes() -> Routes<Arc<Page>> {
    Routes::new()
        .route("/", get(async || file("text/html; charset=utf-8", INDEX)))
        .route("/page/assets/{name}", get(asset))
}

async fn asset(Path(name): Path<String>) -> Response {
    let found = ASSETS.iter().find(|(known, _, _)| *known == name);
    match found {
        Some((_, kind, content)) => file(kind, content),
        None => (StatusCode::NOT_FOUND, "there is no such file").into_response(),
    }
}

fn file(kind: &'static str, content: &'static str) -> Response {
    const OPENER: HeaderName = HeaderName::from_static("cross-origin-opener-policy");
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // Tomorrow another version of the program may be at the same address.
        (header::CACHE_CONTROL, "no-cache"),
        (OPENER, "same-origin"),
    ];
    (headers, content).into_response()
}
