//! The native shell of [`primerl_orchestrator::run_command`].

fn main() -> ! {
    std::process::exit(primerl_orchestrator::run_command(
        std::env::args_os().skip(1),
    ))
}
