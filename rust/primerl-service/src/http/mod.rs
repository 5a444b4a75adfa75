//! Parts that every server of a run shares: connections and bodies within limits, errors in OpenAI's format, and the
//! encodings of requests and answers.

mod bodies;
mod connections;
mod error;
mod extract;
mod pulse;
mod routes;

pub use bodies::{Bodies, BodyLimits, discard};
pub use connections::{Limits, serve};
pub use error::ApiError;
pub use extract::{Encoding, RawBody, ReadsBodies, Wire, encoded};
pub use routes::Routes;

pub const MSGPACK: &str = "application/msgpack";
pub const JSON: &str = "application/json";
/// The error code once the run is over and no one can answer.
pub const RUN_OVER: &str = "run_over";
