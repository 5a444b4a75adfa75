//! Appends pieces of JSON and of server-sent events to the output.

use serde::Serialize;

pub(super) fn append(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    // Writing to memory cannot fail.
    let _ = serde_json::to_writer(out, value);
}

/// One event with its name.
pub(super) fn event(out: &mut Vec<u8>, name: &str, data: &(impl Serialize + ?Sized)) {
    out.extend(b"event: ");
    out.extend(name.as_bytes());
    out.extend(b"\ndata: ");
    append(out, data);
    out.extend(b"\n\n");
}
