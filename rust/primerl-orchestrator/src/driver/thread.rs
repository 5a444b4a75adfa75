//! The driver's thread. As a task among the HTTP server's tasks, it would wait behind every ready request; here it
//! waits only for a CPU core.

use super::Driver;
use primerl_service::inbox::Inbox;
use tokio_util::sync::CancellationToken;

/// Runs `driver` until `stop`, or until the journal cannot be written. The result fires when it has ended, in whatever
/// way.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn start(
    driver: Driver,
    inbox: Inbox,
    stop: CancellationToken,
) -> std::io::Result<CancellationToken> {
    // With its own timer, too: a timer shared with the server would wake the server for each of the driver's deadlines.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()?;
    let ended = CancellationToken::new();
    let guard = ended.clone().drop_guard();
    std::thread::Builder::new()
        .name("driver".into())
        .spawn(move || {
            let _told_even_by_a_panic = guard;
            runtime.block_on(driver.run(inbox, stop));
        })?;
    Ok(ended)
}
