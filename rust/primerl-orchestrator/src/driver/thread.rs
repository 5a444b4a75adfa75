//! The driver's own thread. As a task among the HTTP server's, it would wait behind every request that is ready before
//! it; here it waits for nothing but a core.

use super::Driver;
use primerl_service::inbox::Inbox;
use tokio_util::sync::CancellationToken;

/// Run `driver` until `stop`, or until the journal cannot be written. The result fires when it has ended, whichever way.
///
/// # Errors
/// There can be no such thread.
pub(crate) fn start(
    driver: Driver,
    inbox: Inbox,
    stop: CancellationToken,
) -> std::io::Result<CancellationToken> {
    // Its own clock as well: one shared with the server would wake the server for each of the driver's deadlines.
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
