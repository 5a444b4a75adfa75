//! The native shell of [`primerl_orchestrator::run_command`].

// Requests and tokens are many small allocations on several threads, where the system's allocator costs a tenth of the
// process's time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ! {
    std::process::exit(primerl_orchestrator::run_command(
        std::env::args_os().skip(1),
        None,
    ))
}
